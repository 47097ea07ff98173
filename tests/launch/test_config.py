"""--config: a run repeated from its config.json, and files that can't be used."""

import json

import pytest

from fncore import cli
from fncore.errors import UserError
from launch import grpo, sft
from tests.launch.conftest import Folder, same_bits


def test_a_run_repeats_from_its_config(launch, fast, tmp_path):
    settings = {**fast, "reward": ("my_rewards:varied", "my_rewards:length"), "reward_weights": (1.0, -0.25)}
    first = launch(
        "grpo", **settings, variant="dapo", clip_high=0.3, system="-be brief", rollout_eval_mode=False, dropout=0.1
    )
    config = cli.parse(grpo.Config, ["--config", str(first.path / "config.json"), "--out", str(tmp_path / "again")])
    grpo.main(config)
    again = Folder(tmp_path / "again")
    assert again.column("completions") == first.column("completions")
    assert same_bits(again.weights(), first.weights())
    left, right = (json.loads((folder.path / "config.json").read_text()) for folder in (first, again))
    changed = {name for name in left if left[name] != right[name]}
    assert changed == {"out", "config"}


def test_flags_override_the_file(tmp_path):
    file = tmp_path / "settings.json"
    file.write_text(json.dumps({"steps": 7, "lr": 1, "task_config": {"max_terms": 3}, "rollout_eval_mode": False}))
    config = cli.parse(grpo.Config, ["--steps", "9", f"--config={file}", "--rollout-eval-mode"])
    assert (config.steps, config.lr, config.task_config) == (9, 1.0, {"max_terms": 3})
    assert config.rollout_eval_mode is True
    assert cli.parse(grpo.Config, [f"--config={file}"]).rollout_eval_mode is False


@pytest.mark.parametrize("kind", [grpo.Config, sft.Config])
def test_the_defaults_survive_the_file(kind, tmp_path):
    import dataclasses

    file = tmp_path / "settings.json"
    file.write_text(json.dumps(dataclasses.asdict(kind())))
    assert cli.read(kind, file) == kind()


BAD_FILES = {
    "unknown key": ('{"group_siez": 4}', ["'group_siez'", "'group_size'"]),
    "text for a number": ('{"steps": "many"}', ["steps", "'many'"]),
    "null for a number": ('{"steps": null}', ["steps", "None"]),
    "an object for a number": ('{"steps": {"of": 4}}', ["steps", "{'of': 4}"]),
    "a fraction for a whole number": ('{"prompts_per_step": 2.5}', ["prompts_per_step", "2.5"]),
    "true for a number": ('{"lr": true}', ["lr", "True"]),
    "a number for a switch": ('{"compile": 3}', ["compile", "3"]),
    "a word that isn't a choice": ('{"dtype": "float16"}', ["dtype", "'float16'"]),
    "text for an object": ('{"task_config": "terms"}', ["task_config", "'terms'"]),
    "text among weights": ('{"reward_weights": [1, "two"]}', ["reward_weights", "two"]),
    "not JSON": ('{"steps": 4', ["not JSON"]),
    "deep nesting": ("[" * 100_000, ["not JSON"]),
    "a list": ("[1, 2]", ["an object of settings", "list"]),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_one_sentence(name, tmp_path, capsys):
    content, words = BAD_FILES[name]
    file = tmp_path / "settings.json"
    file.write_text(content)
    with pytest.raises(UserError) as error:
        cli.parse(grpo.Config, ["--config", str(file)])
    for word in [str(file), *words]:
        assert word in str(error.value)
    assert "\n" not in str(error.value)
    assert capsys.readouterr() == ("", "")


def test_deep_nesting_in_a_flag_is_a_usage_error(capsys):
    with pytest.raises(SystemExit) as error:
        cli.parse(grpo.Config, ["--task-config", "[" * 100_000])
    assert error.value.code == 2


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(UserError, match=r"--config .*nothing.json: can't be read \(No such file"):
        cli.parse(grpo.Config, ["--config", str(tmp_path / "nothing.json")])
    with pytest.raises(UserError, match=r"can't be read \(Is a directory"):
        cli.parse(grpo.Config, ["--config", str(tmp_path)])
