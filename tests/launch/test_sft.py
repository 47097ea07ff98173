"""launch/sft.py end to end. Its ranks and its dropout are in test_ranks.py."""

import json

import pytest
import torch

from tests.launch.conftest import largest_difference, logits

TASK = dict(steps=8, examples_per_step=32, lr=5e-4, warmup_steps=0, eval_size=40)


def test_a_task_is_learnt(launch):
    """From its own answers the packaged model, which saw many careless ones, gets better: in nats and in accuracy."""
    lines = launch("sft", **TASK, eval_every=8).lines()
    assert lines[-1]["eval/nats_per_token"] < lines[0]["eval/nats_per_token"]
    assert lines[-1]["eval/accuracy"] > lines[0]["eval/accuracy"] + 0.15
    assert ["eval/accuracy" in line for line in lines] == [True, *[False] * 7, True]
    assert [line["step"] for line in lines] == list(range(9))


def test_careless_answers_are_learnt_too(launch):
    lines = launch("sft", **TASK, careless=1.0).lines()
    assert lines[-1]["eval/nats_per_token"] > lines[0]["eval/nats_per_token"] + 0.1
    assert lines[-1]["eval/accuracy"] < lines[0]["eval/accuracy"]


def test_a_new_model_learns_conversations(launch, place):
    """A fresh decoder and tokenizer; the folder loads by transformers with the same logits."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run = launch(
        "sft", model="new", data=str(place / "chats.jsonl"), hidden_size=32, layers=1, heads=2, vocab_size=280,
        steps=20, examples_per_step=16, lr=1e-2, eval_size=10, eval_every=20,
    )  # fmt: skip
    lines = run.lines()
    assert lines[-1]["eval/nats_per_token"] < 0.7 * lines[0]["eval/nats_per_token"]
    assert lines[-1]["nats_per_token"] < lines[1]["nats_per_token"]
    assert lines[-1]["replicas/equal"] is True
    tokens = torch.arange(3, 33).view(2, 15)
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(run.path / "model", dtype=torch.float64)(tokens).logits
    torch.testing.assert_close(logits(run.path / "model", tokens), expected, atol=1e-4, rtol=1e-4)
    tokenizer = AutoTokenizer.from_pretrained(run.path / "model")
    assert tokenizer.decode(tokenizer.encode("spell 173")) == "spell 173"
    assert json.loads((run.path / "config.json").read_text())["layers"] == 1
    assert (run.path / "curves.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_no_evaluation(launch, place):
    run = launch("sft", model=str(place / "tied"), data=str(place / "chats.jsonl"), steps=1, eval_every=0)
    assert not [name for line in run.lines() for name in line if name.startswith("eval/")]


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_dtypes(launch, place, dtype):
    run = launch("sft", model=str(place / "tied"), data=str(place / "chats.jsonl"), steps=2, eval_every=0, dtype=dtype)
    expected = torch.float64 if dtype == "float64" else torch.float32
    assert {leaf.dtype for leaf in run.weights().values()} == {expected}
    assert all(norm > 0 for norm in run.column("grad_norm"))


@pytest.mark.parametrize("option", [{"weight_decay": 0.5}, {"clip_grad": 0.01}])
def test_an_option_has_an_effect(launch, place, option):
    settings = dict(model=str(place / "tied"), data=str(place / "chats.jsonl"), steps=3, examples_per_step=4)
    settings |= dict(warmup_steps=0, weight_decay=0.0, clip_grad=float("inf"), eval_every=0)
    without, with_it = launch("sft", **settings), launch("sft", **{**settings, **option})
    assert largest_difference(with_it.weights(), without.weights()) > 1e-5
