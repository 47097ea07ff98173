"""Small models, a task that starts at once, and ways to run the scripts."""

import importlib
import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fncore import policy
from fncore.models import decoder, hf
from fncore.text import bpe
from tests.laws import problems

ROOT = Path(__file__).parents[2]

REWARDS = """
import math, os, time, zlib

def exact(prompt, completion, answer): return float(completion.strip() == answer)
def varied(prompt, completion, answer): return zlib.crc32(completion.encode("utf-8", "replace")) % 3
def length(prompt, completion, answer): return -len(completion)
def raising(prompt, completion, answer): raise KeyError("no such thing")
def nan(prompt, completion, answer): return math.nan
def hanging(prompt, completion, answer): time.sleep(60)
def poisoned(prompt, completion, answer):
    if prompt[-1]["content"] == os.environ.get("POISON"): raise ValueError("poison")
    return len(completion)
"""


class Folder:
    """What a run left behind."""

    def __init__(self, path):
        self.path = Path(path)

    def lines(self, name="metrics.jsonl"):
        return [json.loads(line) for line in (self.path / name).read_text().splitlines()]

    def steps(self):
        """The lines of metrics.jsonl after the one of step 0."""
        return self.lines()[1:]

    def column(self, name):
        return [line[name] for line in self.steps()]

    def weights(self):
        from safetensors.torch import load_file

        return load_file(self.path / "model" / "model.safetensors")


def same_bits(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def largest_difference(left, right):
    """Over all tensors, the largest difference relative to the tensor's largest element."""
    assert left.keys() == right.keys()
    return max(float((left[name] - right[name]).abs().max() / right[name].abs().max()) for name in left)


@pytest.fixture(scope="session", autouse=True)
def place(tmp_path_factory):
    """A folder with the reward functions, the task and the models; on the path of the processes that score."""
    folder = tmp_path_factory.mktemp("launch")
    (folder / "my_rewards.py").write_text(REWARDS)
    problem = lambda n: {"prompt": f"{n % 10} + {n // 10} =", "answer": str(n % 10 + n // 10)}
    (folder / "sums.jsonl").write_text("".join(json.dumps(problem(n)) + "\n" for n in range(100)))
    chat = lambda n: [{"role": "user", "content": f"spell {n}"}, {"role": "assistant", "content": " ".join(str(n))}]
    (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": chat(n)}) + "\n" for n in range(100, 200)))
    for name, shape in problems.MODELS.items():
        save_model(folder / name, shape)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("OMP_NUM_THREADS", "1")
        yield folder


def save_model(folder, shape, *, positions=64, vocab_size=None):
    """A random decoder with a byte tokenizer, for which any of some letters ends a reply."""
    tokenizer = bpe.train(["1 + 2 =", "3"], vocab_size=262)
    shape = replace(shape, vocab_size=vocab_size or len(tokenizer), max_position_embeddings=positions, dropout=0.0)
    params = problems.parameters(shape, 0, dtype=torch.float32, scale=4.0)
    stops = frozenset({tokenizer.eos_token_id, *range(40, 80)})
    policy.save(folder, policy.Policy(shape, params, tokenizer, stops), card="random")


@pytest.fixture(scope="session")
def fast(place):
    """Settings of a run of launch/grpo.py that takes a second."""
    return dict(
        model=str(place / "tied"),
        task=str(place / "sums.jsonl"),
        reward=("my_rewards:varied",),
        steps=3,
        prompts_per_step=4,
        group_size=4,
        max_new_tokens=6,
        lr=1e-2,
        eval_every=0,
    )


@pytest.fixture(scope="session")
def launch(tmp_path_factory):
    """`launch("grpo", steps=2, ...)` calls the script's main in this process and returns its folder."""

    def run(script, **settings):
        module = importlib.import_module(f"launch.{script}")
        out = Path(settings.pop("out", tmp_path_factory.mktemp(script) / "run"))
        module.main(module.Config(out=str(out), **settings))
        return Folder(out)

    return run


def command(*words, ranks=None, **options):
    """Run a script in a process of its own, under torchrun where `ranks` is given."""
    torchrun = [str(Path(sys.executable).parent / "torchrun"), "--standalone", "--nproc-per-node", str(ranks)]
    start = torchrun if ranks else [sys.executable]
    return subprocess.run([*start, *map(str, words)], capture_output=True, text=True, timeout=120, **options)


def free_ports(number):
    sockets = [socket.socket() for _ in range(number)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def logits(model, tokens):
    """Of a model folder, by our loader and decoder."""
    config, params = hf.load(str(model), dtype=torch.float64, device="cpu")
    buffers = decoder.buffers(config, device="cpu", dtype=torch.float64)
    return decoder.unembed(params, decoder.apply(params, buffers, tokens, config=config).hidden)


def environment(**changes):
    return {**os.environ, **changes}
