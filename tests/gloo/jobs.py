"""What the ranks of the pool run. Results are plain data: they travel through queues."""

import hashlib
import importlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from algorithms.rewards.scorer import Sample
from fncore import optim, random, tree
from fncore.batch import take
from fncore.distributed import World, fingerprint
from fncore.models import decoder
from fncore.policy import Policy
from fncore.step import TrainState, apply_gradients, gradients
from fncore.text import bpe
from fncore.text.demonstrations import Demonstrations
from fncore.text.tasks import Example
from launch import grpo
from tests.gloo.pool import Collectives
from tests.laws import problems
from tests.laws.problems import ALGORITHMS, GROUP, MODELS

DTYPES = {"float32": torch.float32, "bfloat16": torch.float32, "float64": torch.float64}


def outcome(state: TrainState, recorded: Collectives, **extra: Any) -> dict[str, Any]:
    return {
        "params": [leaf.double().numpy() for leaf in tree.leaves(state.params)],
        "prints": fingerprint((state.params, state.opt_state, state.buffers)).tolist(),
        "calls": recorded.calls,
        "bytes": recorded.bytes,
        **extra,
    }


def train(
    world: World, algorithm: str, model: str, seed: int, batches: list[list[tuple[int, int]]], dtype: str = "float64"
) -> dict[str, Any]:
    """One update for each batch of row lengths, by the three lines of the step, each rank on its own groups."""
    master = DTYPES[dtype]
    config = MODELS[model]
    params = problems.parameters(config, seed, dtype=master)
    buffers = decoder.buffers(config, device="cpu", dtype=master)
    scores = problems.scorer(config, dtype=getattr(torch, dtype))
    loss = ALGORITHMS[algorithm].loss(scores)
    optimizer = optim.adamw(1e-2, weight_decay=0.1)
    state = TrainState(params, optimizer.init(params), buffers)
    with Collectives() as recorded:
        for step, lengths in enumerate(batches):
            batch = problems.rows(seed + step, lengths)
            mine = world.share(range(len(lengths) // GROUP))
            shard = take(batch, torch.tensor([GROUP * g + k for g in mine for k in range(GROUP)], dtype=torch.int64))
            shard = problems.weigh(ALGORITHMS[algorithm], shard, world.sum)
            grads, metrics = gradients(loss, state, [shard], key=random.fold_in(random.key(seed), step))
            grads, metrics = world.reduce((grads, metrics))
            state, norm = apply_gradients(state, grads, optimizer=optimizer, clip=0.5)
    return outcome(state, recorded, norm=norm.item())


class Quiz:
    """Sums whose questions differ in length, as a task without an import."""

    def heldout(self, number: int) -> list[Example]:
        return []

    def train(self, position: int) -> Example:
        a, b = position * 7 % 23, position * 13 % 101
        return Example(position, [{"role": "user", "content": f"{a}+{b}"}], str(a + b))


class HashScorer:
    """Rewards of 0, 1 or 2 that look random and depend on the text alone."""

    rewards, weights = ("task",), (1.0,)

    def score(self, samples: list[Sample]) -> list[dict[str, float]]:
        digest = lambda sample: hashlib.blake2b(repr((sample.index, sample.completion)).encode()).digest()
        return [{"task": float(digest(sample)[0] % 3)} for sample in samples]

    def failures(self) -> list[str]:
        return []

    def provenance(self) -> list[dict[str, Any]]:
        return []


def launch(world: World, model: str = "tied", steps: int = 3, **settings: Any) -> dict[str, Any]:
    """The step of launch/grpo.py itself, with a small model, a task and a scorer that need no set-up."""
    defaults = dict(
        dtype="float64", prompts_per_step=5, group_size=3, max_new_tokens=5, lr=1e-2, kl_coef=0.05, steps=steps
    )
    config = grpo.Config(**{**defaults, **settings})
    tokenizer = bpe.train(["1+2", "34+56"], vocab_size=262)
    shape = replace(MODELS[model], vocab_size=len(tokenizer), max_position_embeddings=64, dropout=config.dropout)
    params = problems.parameters(shape, config.seed, dtype=DTYPES[config.dtype], scale=4.0)
    loaded = Policy(shape, params, tokenizer, frozenset({tokenizer.eos_token_id, *range(40, 80)}))
    scorer: Any = HashScorer()
    task: Any = Quiz()
    setup, state = grpo.prepare(config, world, task, scorer, loaded, optim.constant(config.lr))
    records = []
    with Collectives() as recorded:
        for step in range(1, steps + 1):
            state, record, _ = grpo.training_step(setup, state, step)
            records.append(record)
    return outcome(state, recorded, records=records)


def mutated(world: World, mutant: str, job: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Run a job with one deliberate fault in the library."""
    from tests.laws.mutants import MUTANTS

    with MUTANTS[mutant](world):
        return globals()[job](world, *args, **kwargs)


def reduce_values(world: World) -> SimpleNamespace:
    """Every kind of reduction, on values that name their rank."""
    from fncore.stats import Peak, Stat

    mine = torch.tensor([float(world.rank + 1)])
    grads, metrics = world.reduce(
        (
            {"w": mine},
            {"m": Stat(mine.double(), mine.double() * 0 + 4), "p": Peak(mine.double()), "loss": mine.double()},
        )
    )
    return SimpleNamespace(
        grad=grads["w"].item(),
        mean=metrics["m"].mean(),
        peak=metrics["p"].value.item(),
        counts=world.sum({"n": torch.tensor([world.rank + 1]), "b": torch.tensor([True])})["n"].tolist(),
        small=world.sum(torch.full((1,), 1.0 if world.rank == 0 else 2.0**-8, dtype=torch.bfloat16)).item(),
        gathered=[part.item() for part in world.gather(mine)],
        share=world.share(list(range(7))),
    )


def differing(world: World) -> str:
    """One element of one leaf of the last rank is another."""
    from fncore.distributed import ReplicasDiffer

    params = {"a": torch.arange(6.0), "b": {"c": torch.ones(3, 3)}}
    world.assert_replicated(params)
    if world.rank == world.size - 1:
        params["b"]["c"][1, 2] += 2**-20
    try:
        world.assert_replicated(params)
    except ReplicasDiffer as error:
        return str(error)
    return ""


def failing(world: World) -> int:
    """What launch/grpo.py counts where rank r had r failures."""
    scorer: Any = SimpleNamespace(failures=lambda: ["a failure"] * world.rank)
    return grpo.failures(scorer, world, 1)


def astray(world: World, script: str, part: str, out: str) -> str:
    """What a script says after one step in which the last rank's update of `part` went its own way."""
    from fncore.distributed import ReplicasDiffer

    module = importlib.import_module(f"launch.{script}")
    apply = module.apply_gradients

    def applied(*args: Any, **kwargs: Any) -> tuple[TrainState, torch.Tensor]:
        state, norm = apply(*args, **kwargs)
        if world.rank == world.size - 1:
            changed = state.params if part == "params" else state.opt_state.square
            tree.leaves(changed)[-1].view(-1)[-1] += 1.0
        return state, norm

    config = module.Config(steps=1, eval_every=0, warmup_steps=0, out=str(Path(out)), device="cpu")
    chat = [{"role": "user", "content": "1+2"}, {"role": "assistant", "content": "3"}]
    size = {"prompts_per_step": 2, "group_size": 2} if script == "grpo" else {"examples_per_step": 2}
    task: list[Any] = [Quiz(), HashScorer()] if script == "grpo" else [Demonstrations(lambda position: chat, []), None]
    with patch.object(module, "apply_gradients", applied):
        try:
            module.train(replace(config, **size), world, *task)
        except ReplicasDiffer as error:
            return str(error)
    return ""
