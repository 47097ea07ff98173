"""Bad input: one sentence, before any training, with nothing written or overwritten."""

import json
import shutil
from dataclasses import replace

import pytest
import torch

from fncore import policy
from fncore.errors import UserError
from launch import grpo, sft
from tests.launch.conftest import ROOT, command, save_model
from tests.laws import problems

CPU = dict(dtype=torch.float32, device=torch.device("cpu"))
BAD_GRPO = {
    "model folder": (dict(model="./no/such/folder"), ["./no/such/folder", "no such folder"]),
    "hub id without a network": (dict(model="nobody/nothing"), ["nobody/nothing", "no such folder"]),
    "task": (dict(task="chain_sums"), ["'chain_sums'", "'chain_sum'"]),
    "variant": (dict(variant="dr_grop"), ["--variant dr_grop", "'dr_grpo'"]),
    "task setting": (dict(task="chain_sum", task_config={"max_term": 3}), ["'max_term'", "'max_terms'"]),
    "type of a task setting": (dict(task="chain_sum", task_config={"max_terms": "3"}), ["'max_terms'", "'3'", "int"]),
    "task setting out of range": (dict(task="chain_sum", task_config={"max_terms": -3}), ["chain_sum", "-3"]),
    "settings of a file": (dict(task_config={"max_terms": 3}), ["sums.jsonl", "'max_terms'"]),
    "group of one": (dict(group_size=1), ["--group-size 1", "2 or more", "reinforce_pp"]),
    "temperature 0": (dict(temperature=0.0), ["--temperature 0.0", "above 0"]),
    "temperature infinite": (dict(temperature=float("inf")), ["--temperature inf", "above 0 and finite"]),
    "rate nan": (dict(lr=float("nan")), ["--lr nan", "a finite number"]),
    "rate infinite": (dict(lr=float("inf")), ["--lr inf", "a finite number"]),
    "KL infinite": (dict(kl_coef=float("inf")), ["--kl-coef inf", "a finite number"]),
    "weight decay infinite": (dict(weight_decay=float("inf")), ["--weight-decay inf", "a finite number"]),
    "entropy nan": (dict(entropy_coef=float("nan")), ["--entropy-coef nan", "a finite number"]),
    "entropy infinite": (dict(entropy_coef=-float("inf")), ["--entropy-coef -inf", "a finite number"]),
    "lower bound nan": (dict(clip_low=float("nan")), ["--clip-low nan", "a finite number"]),
    "lower bound negative": (dict(clip_low=-0.1), ["--clip-low -0.1", "0 or more"]),
    "upper bound nan": (dict(clip_high=float("nan")), ["--clip-high nan", "above 0 and finite"]),
    "upper bound 0": (dict(clip_high=0.0), ["--clip-high 0.0", "above 0 and finite"]),
    "clip nan": (dict(clip_grad=float("nan")), ["--clip-grad nan", "above 0"]),
    "temperature nan": (dict(temperature=float("nan")), ["--temperature nan", "above 0"]),
    "no steps": (dict(steps=0), ["--steps 0", "1 or more"]),
    "negative steps": (dict(steps=-3), ["--steps -3", "1 or more"]),
    "negative rate": (dict(lr=-1e-3), ["--lr -0.001", "0 or more"]),
    "negative interval": (dict(eval_every=-1), ["--eval-every -1", "0 or more"]),
    "negative KL": (dict(kl_coef=-0.1), ["--kl-coef -0.1", "0 or more"]),
    "dropout of all": (dict(dropout=1.0), ["--dropout 1.0", "below 1"]),
    "gradients clipped away": (dict(clip_grad=0.0), ["--clip-grad 0.0", "above 0"]),
    "warm-up that never ends": (dict(schedule="wsd", warmup_steps=9, steps=3), ["warm (9)", "total (3)"]),
    "bound that there isn't": (dict(variant="rloo", clip_low=0.1), ["no bound 'low'"]),
    "buffer": (dict(truncated="punish", overlong_buffer=7), ["--overlong-buffer 7", "--max-new-tokens"]),
    "device": (dict(device="tpu9"), ["--device tpu9", "cpu or cuda"]),
    "device that exists but computes nothing": (dict(device="meta"), ["--device meta", "cpu or cuda"]),
    "seed of 65 bits": (dict(seed=2**63), [f"--seed {2**63}", "below 2**63"]),
    "reward": (dict(reward=("maths",)), ["'maths'", "'math'"]),
    "reward module": (dict(reward=("my_reward:varied",)), ["'my_reward:varied'", "No module named 'my_reward'"]),
    "reward function": (dict(reward=("my_rewards:variet",)), ["my_rewards", "'variet'", "'varied'"]),
    "number of weights": (dict(reward_weights=(1.0, 2.0)), ["--reward-weights", "2 weights for 1 rewards"]),
    "reward twice": (dict(reward=("task", "task")), ["task", "different names"]),
    "time limit": (dict(reward_timeout=0.0), ["0.0 seconds", "positive"]),
    "prompt and reply too long": (dict(max_new_tokens=60), ["--max-new-tokens 60", "64 positions", " ='"]),
}
BAD_SFT = {
    "model folder": (dict(model="./no/such/folder"), ["./no/such/folder"]),
    "share": (dict(careless=-0.5), ["--careless -0.5"]),
    "width": (dict(model="new", hidden_size=30, heads=4), ["--hidden-size 30", "--heads 4"]),
    "share above 1": (dict(careless=40.0), ["--careless 40.0", "1 at most"]),
    "too long": (dict(max_length=5, eval_size=0), ["tokens", "--max-length 5", "spell"]),
    "warm-up that never ends": (dict(schedule="wsd", warmup_steps=9, steps=3), ["warm (9)"]),
    "seed of 65 bits": (dict(seed=-(2**63) - 1), [f"--seed {-(2**63) - 1}", "at least -2**63"]),
    "dropout": (dict(dropout=-0.1), ["--dropout -0.1"]),
    "rate infinite": (dict(lr=float("inf")), ["--lr inf", "a finite number"]),
    "share nan": (dict(careless=float("nan")), ["--careless nan", "a finite number"]),
    "weight decay nan": (dict(weight_decay=float("nan")), ["--weight-decay nan", "a finite number"]),
    "clip nan": (dict(clip_grad=float("nan")), ["--clip-grad nan", "above 0"]),
}


def says(error, words):
    message = str(error.value)
    for word in words:
        assert word in message
    assert "\n" not in message


@pytest.mark.parametrize("name", BAD_GRPO)
def test_grpo_refuses(name, fast, tmp_path):
    settings, words = BAD_GRPO[name]
    with pytest.raises(UserError) as error:
        grpo.main(grpo.Config(**{**fast, **settings}, out=str(tmp_path / "run")))
    says(error, words)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", BAD_SFT)
def test_sft_refuses(name, place, tmp_path):
    settings, words = BAD_SFT[name]
    start = dict(model=str(place / "tied"), data=str(place / "chats.jsonl"), eval_size=3)
    with pytest.raises(UserError) as error:
        sft.main(sft.Config(**{**start, **settings}, out=str(tmp_path / "run")))
    says(error, words)
    assert not (tmp_path / "run").exists()


BAD_LINES = {
    "not JSON": ('{"prompt": "1 + 1 ="', "not valid JSON"),
    "a list": ("[1]", "expected a JSON object"),
    "blank": ("", "blank"),
    "neither prompt nor chat": ('{"text": "1 + 1 = 2"}', "expected an object with"),
}


@pytest.mark.parametrize("script", [grpo, sft])
@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_line_is_named(name, script, fast, tmp_path, monkeypatch):
    line, problem = BAD_LINES[name]
    chat = [{"role": "user", "content": "1 + 1 ="}, {"role": "assistant", "content": "2"}]
    good = json.dumps({"prompt": "1 + 1 =", "answer": "2", "messages": chat})
    (tmp_path / "lines.jsonl").write_text(f"{good}\n{line}\n{good}\n")
    monkeypatch.chdir(tmp_path)
    settings = {**fast, "task": "lines.jsonl"} if script is grpo else {"model": fast["model"], "data": "lines.jsonl"}
    with pytest.raises(UserError) as error:
        script.main(script.Config(**settings, out="run"))
    says(error, ["lines.jsonl, line 2", problem])
    assert not (tmp_path / "run").exists()


def test_one_completion_a_prompt_where_advantages_need_no_group(launch, fast):
    run = launch("grpo", **{**fast, "group_size": 1, "steps": 1}, variant="reinforce_pp")
    assert run.column("grad_norm")[0] > 0


@pytest.mark.parametrize("script", [grpo, sft])
def test_a_folder_that_holds_files_stays_as_it_is(script, fast, place, tmp_path):
    out = tmp_path / "run"
    (out / "model").mkdir(parents=True)
    (out / "metrics.jsonl").write_text("a line\n")
    settings = fast if script is grpo else dict(model=fast["model"], data=str(place / "chats.jsonl"))
    with pytest.raises(UserError) as error:
        script.main(script.Config(**{**settings, "out": str(out)}))
    says(error, [str(out), "already holds files"])
    assert {path.name for path in out.rglob("*")} == {"metrics.jsonl", "model"}
    assert (out / "metrics.jsonl").read_text() == "a line\n"


@pytest.mark.parametrize("script", [grpo, sft])
def test_a_taken_folder_is_refused_before_anything_is_loaded(script, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="already holds files"):
        script.main(script.Config(model="./no/such/folder", task="no such task", out=str(tmp_path)))


def test_a_model_that_is_too_short_for_its_prompts(fast, tmp_path):
    save_model(tmp_path / "short", replace(problems.MODELS["untied"]), positions=16)
    with pytest.raises(UserError) as error:
        grpo.main(grpo.Config(**{**fast, "model": str(tmp_path / "short"), "out": str(tmp_path / "run")}))
    says(error, ["16 positions", "a prompt of"])
    assert not (tmp_path / "run").exists()


def edited(place, folder, **changes):
    """A copy of a model folder, with a file's settings changed or its content replaced."""
    shutil.copytree(place / "tied", folder)
    for name, change in changes.items():
        file = folder / f"{name}.json"
        kept = json.loads(file.read_text()) if isinstance(change, dict) and file.is_file() else {}
        file.write_text(change if isinstance(change, str) else json.dumps({**kept, **change}))
    return str(folder)


TEMPLATES = {
    "refusal": "{{ raise_exception('System role not supported') }}",
    "syntax": "{% if %}",
    "sandbox": "{% for i in range(10**7) %}{% endfor %}",
    "type": "{{ messages[0].role + 1 }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_that_refuses_a_chat(name, fast, place, tmp_path):
    model = edited(place, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(TEMPLATES[name])
    with pytest.raises(UserError) as error:
        grpo.main(grpo.Config(**{**fast, "model": model}, system="Be brief.", out=str(tmp_path / "run")))
    says(error, [model, "refuses the roles system, user", "leave out --system"])
    assert "System role not supported" in str(error.value) or name != "refusal"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("script", [grpo, sft])
def test_a_tokenizer_with_more_ids_than_the_model(script, fast, place, tmp_path):
    save_model(tmp_path / "model", problems.MODELS["tied"], vocab_size=65)
    settings = fast if script is grpo else dict(data=str(place / "chats.jsonl"))
    with pytest.raises(UserError) as error:
        script.main(script.Config(**{**settings, "model": str(tmp_path / "model"), "out": str(tmp_path / "run")}))
    says(error, ["the tokenizer gives id", "the model has 65 tokens: '", "tokenizer that the model was trained with"])
    assert not (tmp_path / "run").exists()


BAD_STOPS = {
    "not JSON": ("{", "generation_config.json: not JSON"),
    "a list": ("[1]", "generation_config.json: expected a JSON object, not [1]"),
    "text": ({"eos_token_id": "x"}, "generation_config.json: eos_token_id must be"),
    "text in a list": ({"eos_token_id": [1, "x"]}, "not [1, 'x']"),
}


@pytest.mark.parametrize("name", BAD_STOPS)
def test_a_bad_generation_config(name, place, tmp_path):
    content, problem = BAD_STOPS[name]
    with pytest.raises(UserError) as error:
        policy.load(edited(place, tmp_path / "model", generation_config=content), **CPU)
    says(error, [str(tmp_path / "model"), problem])


def test_stop_tokens_are_those_of_the_model(place, tmp_path):
    some = edited(place, tmp_path / "some", generation_config={"eos_token_id": [5, 2**70]})
    assert 5 in policy.load(some, **CPU).stops
    assert 2**70 not in policy.load(some, **CPU).stops
    none = edited(place, tmp_path / "none", generation_config={"eos_token_id": [-1, 2**70]})
    tokenizer = json.loads((tmp_path / "none" / "tokenizer_config.json").read_text())
    (tmp_path / "none" / "tokenizer_config.json").write_text(json.dumps({**tokenizer, "eos_token": None}))
    with pytest.raises(UserError) as error:
        policy.load(none, **CPU)
    says(error, [none, f"(-1, {2**70})", "no reply could end"])


COMMANDS = {
    "grpo.py": (["--variant", "dr_grop"], "error: --variant dr_grop: unknown; did you mean 'dr_grpo'?"),
    "sft.py": (
        ["--config", "settings.json"],
        "error: --config settings.json: unknown setting 'step'; did you mean 'steps'?",
    ),
}


@pytest.mark.parametrize("script", COMMANDS)
def test_the_command_prints_one_line_and_exits_with_2(script, tmp_path):
    words, expected = COMMANDS[script]
    (tmp_path / "settings.json").write_text('{"step": 3}')
    done = command(ROOT / "launch" / script, *words, "--out", "run", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", expected + "\n")
    assert [path.name for path in tmp_path.iterdir()] == ["settings.json"]


def test_an_unknown_flag_names_the_nearest(tmp_path, capsys):
    from fncore import cli

    with pytest.raises(SystemExit) as error:
        cli.parse(grpo.Config, ["--group-siez", "4"])
    assert error.value.code == 2
    assert "--group-size" in capsys.readouterr().err
