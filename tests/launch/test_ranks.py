"""The scripts under torchrun: equal results on any number of ranks, and errors that end all of them."""

import json
import time

import pytest
import torch

from fncore.text.tasks import load_task
from tests.launch.conftest import ROOT, Folder, command, environment, free_ports, largest_difference, same_bits

GRPO = dict(dtype="float64", steps=5, prompts_per_step=5, group_size=3, max_new_tokens=6, lr=1e-2, eval_every=0)
CASES = {  # script, numbers of ranks, settings
    "grpo, tied": ("grpo", (1, 2, 3, 4), dict(GRPO, model="tied", updates_per_rollout=2, kl_coef=0.05)),
    "gspo, untied": ("grpo", (1, 3), dict(GRPO, model="untied", variant="gspo")),
    "reinforce_pp, groups of one": ("grpo", (1, 4), dict(GRPO, model="tied", variant="reinforce_pp", group_size=1)),
    "sft with dropout": (
        "sft", (1, 2, 4), dict(model="untied", dtype="float64", steps=4, examples_per_step=5, lr=1e-2, dropout=0.2)
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(place, tmp_path_factory):
    """The folders of all cases by name and number of ranks, made by one torchrun."""
    home = tmp_path_factory.mktemp("ranks")
    jobs = [(script, ranks, settings, f"{name} on {ranks}") for name, (script, counts, settings) in CASES.items()
            for ranks in counts]  # fmt: skip
    data = {
        "grpo": {"task": str(place / "sums.jsonl"), "reward": ["my_rewards:varied"]},
        "sft": {"data": str(place / "chats.jsonl"), "eval_size": 3},
    }
    listed = [
        (
            script,
            ranks,
            port,
            {**settings, **data[script], "model": str(place / settings["model"]), "out": str(home / out)},
        )
        for (script, ranks, settings, out), port in zip(jobs, free_ports(len(jobs)), strict=True)
    ]
    (home / "jobs.json").write_text(json.dumps(listed))
    done = command(ROOT / "tests/launch/driver.py", home / "jobs.json", ranks=4)
    assert done.returncode == 0, done.stderr
    return {name: {ranks: Folder(home / f"{name} on {ranks}") for ranks in case[1]} for name, case in CASES.items()}


@pytest.mark.parametrize("name", CASES)
def test_any_number_of_ranks_trains_the_same_model(runs, name):
    script, counts, _ = CASES[name]
    alone = runs[name][1]
    for ranks in counts[1:]:
        assert largest_difference(runs[name][ranks].weights(), alone.weights()) < 1e-9
        if script == "grpo":
            assert runs[name][ranks].column("completions") == alone.column("completions")
        assert runs[name][ranks].column("replicas/equal")[-1] is True
        assert runs[name][ranks].column("grad_norm") == pytest.approx(alone.column("grad_norm"), rel=1e-9)
    assert all(norm > 0 for norm in alone.column("grad_norm"))


def test_the_model_has_the_master_dtype(runs):
    assert {leaf.dtype for leaf in runs["grpo, tied"][2].weights().values()} == {torch.float64}
    config = json.loads((runs["grpo, tied"][2].path / "model/config.json").read_text())
    assert config["dtype"] == "float64"


def test_tied_stays_tied_and_untied_untied(runs):
    assert "lm_head.weight" not in runs["grpo, tied"][3].weights()
    assert "lm_head.weight" in runs["gspo, untied"][3].weights()


def test_dropout_has_an_effect_in_sft(runs, launch, place):
    settings = {**CASES["sft with dropout"][2], "model": str(place / "untied"), "dropout": 0.0}
    without = launch("sft", data=str(place / "chats.jsonl"), eval_size=3, **settings)
    with_dropout = runs["sft with dropout"][1]
    assert without.lines()[0]["eval/nats_per_token"] == with_dropout.lines()[0]["eval/nats_per_token"]
    assert largest_difference(with_dropout.weights(), without.weights()) > 1e-6


def test_one_rank_of_torchrun_is_no_torchrun(launch, fast, monkeypatch):
    alone = launch("grpo", **fast)
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    ranked = launch("grpo", **fast)
    assert same_bits(ranked.weights(), alone.weights())
    assert ranked.column("completions") == alone.column("completions")


def test_an_error_on_one_rank_ends_all(place, fast, tmp_path):
    """A reward fails on a prompt that the second rank alone sees: both end, with its message."""
    poison = load_task(fast["task"], seed=0).train(1).prompt[-1]["content"]
    start = time.monotonic()
    done = command(
        ROOT / "launch/grpo.py", "--model", fast["model"], "--task", fast["task"], "--reward", "my_rewards:poisoned",
        "--eval-every", 0, "--prompts-per-step", 2, "--max-new-tokens", 4, "--out", tmp_path / "run",
        ranks=2, cwd=tmp_path, env=environment(POISON=poison),
    )  # fmt: skip
    assert done.returncode != 0
    assert time.monotonic() - start < 60  # a wait for peers would last ten minutes
    lines = [line for line in done.stderr.splitlines() if line.startswith("error (rank 1)")]
    assert len(lines) == 1
    assert "Reward 'my_rewards:poisoned' raised ValueError: poison" in lines[0]
    assert poison in lines[0]
    assert not (tmp_path / "run/model").exists()
