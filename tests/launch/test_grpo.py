"""launch/grpo.py end to end: what a run leaves behind, and what its options do."""

import json
import math
import shutil

import pytest
import torch

from fncore.errors import UserError
from tests.launch.conftest import ROOT, Folder, command, logits

KEYS = {
    "step", "loss", "reward/mean", "reward/std", "eval/accuracy", "log_ratio/max_abs", "clip_fraction", "kl/ref",
    "entropy", "grad_norm", "lr", "completion/mean_length", "completion/truncated", "tokens_per_second",
    "seconds/rollout", "seconds/train", "replicas/equal", "reward/errors",
}  # fmt: skip
STEPS, EVERY = 4, 3


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A short training of the packaged model by torchrun: its folder and what it printed."""
    out = tmp_path_factory.mktemp("trained") / "run"
    done = command(
        ROOT / "launch/grpo.py", "--steps", STEPS, "--eval-every", EVERY, "--eval-size", 100, "--dropout", 0.1,
        "--out", out, ranks=2, cwd=out.parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return Folder(out), done.stdout


def test_answers_get_better(trained):
    lines = trained[0].lines()
    assert lines[-1]["eval/accuracy"] >= lines[0]["eval/accuracy"] + 0.15
    assert 0.05 < lines[0]["eval/accuracy"] < 0.5


def test_run_folder(trained):
    folder, printed = trained
    names = {"config.json", "provenance.json", "metrics.jsonl", "samples.jsonl", "curves.png", "model"}
    assert {path.name for path in folder.path.iterdir()} == names
    assert (folder.path / "curves.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    config = json.loads((folder.path / "config.json").read_text())
    assert (config["steps"], config["eval_size"], config["out"]) == (STEPS, 100, str(folder.path))
    provenance = json.loads((folder.path / "provenance.json").read_text())
    assert (provenance["ranks"], provenance["rewards"]) == (2, [{"name": "task", "weight": 1.0}])
    assert f"step {STEPS}/{STEPS}" in printed
    assert "sampled completions" in printed


def test_metrics(trained):
    lines = trained[0].lines()
    assert [line["step"] for line in lines] == list(range(STEPS + 1))
    assert all(line.keys() >= KEYS for line in lines)
    assert [line["step"] for line in lines if line["eval/accuracy"] is not None] == [0, EVERY, STEPS]
    assert [line["step"] for line in lines if line["replicas/equal"]] == [STEPS]
    for name in ("entropy", "grad_norm", "tokens_per_second", "seconds/rollout", "seconds/train", "reward/std"):
        assert all(value > 0 for value in trained[0].column(name))
    assert lines[1]["log_ratio/max_abs"] == lines[1]["kl/ref"] == 0.0
    assert lines[2]["kl/ref"] > 0


def test_samples(trained):
    samples = trained[0].lines("samples.jsonl")
    assert len(samples) == STEPS * 8  # the first group of each step
    assert {sample["step"] for sample in samples} == set(range(1, STEPS + 1))
    for sample in samples:
        assert sample["reward"] == sample["scores"]["task"]
        assert (sample["reward"] == 1.0) == (sample["completion"].strip() == sample["answer"])


def test_transformers_loads_the_model(trained):
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    model = trained[0].path / "model"
    tokens = torch.randint(3, 300, (3, 11), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)(tokens).logits
    torch.testing.assert_close(logits(model, tokens), expected, atol=1e-4, rtol=1e-4)
    chat = [{"role": "user", "content": "1 + 2 ="}]
    prompt = AutoTokenizer.from_pretrained(model).apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert prompt == "<|im_start|>user\n1 + 2 =<|im_end|>\n<|im_start|>assistant\n"
    assert GenerationConfig.from_pretrained(model).eos_token_id in (2, [2])
    assert "step 4" in (model / "README.md").read_text()


def test_bfloat16_with_dropout_starts_on_policy(launch, fast, capsys):
    run = launch("grpo", **fast, dtype="bfloat16", dropout=0.2, debug_log_ratio=True)
    assert run.column("log_ratio/max_abs")[0] == run.column("kl/ref")[0] == 0.0
    assert run.column("kl/ref")[-1] > 0
    assert run.column("eval/accuracy") == [None] * 3
    assert run.lines()[0]["eval/accuracy"] is None
    printed = capsys.readouterr().out
    for step in (1, 2, 3):
        assert f"step {step}: |new - old| log-probability on the first minibatch: max 0, mean 0" in printed


def test_several_rewards(launch, fast):
    """Each is logged on its own; they count with their weights, which choose what is learnt."""
    both = {**fast, "reward": ("my_rewards:varied", "my_rewards:length")}
    run = launch("grpo", **both, reward_weights=(2.0, 0.5))
    for line in run.steps():
        expected = 2.0 * line["reward/my_rewards:varied"] + 0.5 * line["reward/my_rewards:length"]
        assert line["reward/mean"] == pytest.approx(expected, abs=1e-12)
        assert line["reward/my_rewards:length"] < 0
    files = [row["file"] for row in json.loads((run.path / "provenance.json").read_text())["rewards"]]
    assert all(file.endswith("my_rewards.py") for file in files)


@pytest.mark.parametrize(
    ("function", "says"),
    [("raising", "raised KeyError: 'no such thing'"), ("nan", "returned nan"), ("hanging", "took longer than 1")],
)
def test_a_failing_reward_ends_the_run(launch, fast, tmp_path, function, says):
    settings = {**fast, "reward": (f"my_rewards:{function}",), "reward_timeout": 1.0, "out": tmp_path / "run"}
    with pytest.raises(UserError) as error:
        launch("grpo", **settings)
    assert f"Reward 'my_rewards:{function}' {says}" in str(error.value)
    assert " =" in str(error.value)  # the prompt
    assert not (tmp_path / "run/model").exists()


def test_a_failing_reward_may_count_a_default(launch, fast, capfd):
    settings = {**fast, "reward": ("my_rewards:raising", "my_rewards:varied"), "reward_on_error": 0.25}
    run = launch("grpo", **settings)
    assert run.column("reward/my_rewards:raising") == [0.25] * 3
    assert [line["reward/errors"] for line in run.lines()] == [0, 16, 16, 16]
    told = [line for line in capfd.readouterr().err.splitlines() if "my_rewards:raising" in line]
    assert [line.split(": ")[0] for line in told] == [f"step {step}, rank 0" for step in (1, 2, 3)]
    assert all("raised KeyError: 'no such thing'; prompt" in line for line in told)


def test_a_gradient_that_is_not_finite_ends_the_run(launch, fast, tmp_path):
    with pytest.raises(UserError, match=r"step 2: the norm of the gradient is nan and the loss .*lower --lr"):
        launch("grpo", **{**fast, "lr": 1e30, "out": tmp_path / "run"})
    assert [line["step"] for line in Folder(tmp_path / "run").lines()] == [0, 1]  # what was written stays
    assert not (tmp_path / "run/model").exists()


def test_schedule_and_resampling(launch, fast):
    run = launch("grpo", **{**fast, "group_size": 2}, schedule="linear", warmup_steps=1, dynamic_sampling=True)
    assert run.column("lr") == [0.005, 0.01, 0.0]
    assert all(drawn % 4 == 0 for drawn in run.column("groups/drawn"))
    assert max(run.column("groups/drawn")) > 4
    assert all(kept <= 4 for kept in run.column("groups/kept"))


def test_truncated_completions(launch, fast):
    """Of one token at most, most completions are truncated: left out they don't count, punished they score less."""
    settings = {**fast, "max_new_tokens": 1, "steps": 1}
    kept, masked = launch("grpo", **settings), launch("grpo", **settings, truncated="mask")
    punished = launch("grpo", **settings, truncated="punish", overlong_buffer=1)
    assert kept.column("completion/truncated")[0] > 0.5
    assert masked.column("entropy")[0] != kept.column("entropy")[0]
    assert punished.column("reward/mean")[0] == pytest.approx(kept.column("reward/mean")[0] - 1.0)


@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="--compile needs a C++ compiler")
def test_compiled(launch, fast):
    """The compiled block trains, and rounds alike with and without gradients: in bfloat16 that is the hard case."""
    run = launch("grpo", **{**fast, "steps": 2}, dtype="bfloat16", compile=True)
    assert run.column("log_ratio/max_abs")[0] == run.column("kl/ref")[0] == 0.0
    assert all(norm > 0 and math.isfinite(norm) for norm in run.column("grad_norm"))
