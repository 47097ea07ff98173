"""A run that can't go on, or can't write: one sentence, and no model that isn't whole."""

import errno
import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from fncore import policy, run
from fncore.errors import UserError
from fncore.run import Run, require_finite, require_finite_parameters
from launch import grpo, sft
from tests.launch.conftest import ROOT, Folder


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_ends_a_run(bad):
    require_finite(1.0, step=3, loss=-2.0)
    for grad_norm, loss in [(bad, 1.0), (1.0, bad)]:
        with pytest.raises(UserError, match=r"step 3: .*lower --lr"):
            require_finite(grad_norm, step=3, loss=loss)
    require_finite_parameters({"a": torch.ones(2), "b": [torch.zeros(3)]})
    with pytest.raises(UserError, match=r"not finite.*lower --lr"):
        require_finite_parameters({"a": torch.ones(2), "b": [torch.tensor([0.0, bad, 0.0])]})


@pytest.mark.parametrize("script", [grpo, sft])
def test_parameters_that_overflow_in_the_last_update_are_not_saved(script, fast, place, tmp_path):
    if script is grpo:
        settings = fast
    else:
        settings = dict(model=fast["model"], data=str(place / "chats.jsonl"), warmup_steps=0, eval_every=0)
    with pytest.raises(UserError, match="parameters that are not finite"):
        script.main(script.Config(**{**settings, "steps": 1, "lr": 1e39, "out": str(tmp_path / "run")}))
    assert len(Folder(tmp_path / "run").steps()) == 1
    assert not (tmp_path / "run/model").exists()


def full(*args, **kwargs):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def full_in_rust(*args, **kwargs):
    raise RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")


def bug(*args, **kwargs):
    raise RuntimeError("a bug")


@pytest.fixture
def opened(tmp_path):
    with Run(str(tmp_path / "run"), grpo.Config(), total=1, active=True) as opened:
        yield opened


@pytest.mark.parametrize("fails", [full, full_in_rust])
def test_a_full_disk_is_one_sentence(opened, fails, monkeypatch):
    monkeypatch.setattr(policy, "save", fails)
    monkeypatch.setattr(run, "draw", fails)
    monkeypatch.setattr(run.Path, "open", fails)
    for write in (
        lambda: opened.log({"step": 1, "loss": 0.5}, show=[]),
        lambda: opened.samples([{"reward": 1.0}]),
        lambda: opened.save_model(None, card=""),
        opened.finish,
    ):
        with pytest.raises(UserError, match=r"--out .*run: can't be written \(.*No space left on device"):
            write()


def test_another_error_while_writing_stays_what_it_is(opened, monkeypatch):
    monkeypatch.setattr(policy, "save", bug)
    with pytest.raises(RuntimeError, match="a bug"):
        opened.save_model(None, card="")


def test_an_interrupt_is_one_line(fast, tmp_path):
    """Ctrl-C reaches every process of the terminal's group, that of the rewards as well."""
    out = tmp_path / "run"
    settings = tmp_path / "settings.json"
    settings.write_text(json.dumps({**fast, "steps": 100000, "out": str(out)}))
    running = subprocess.Popen(
        [sys.executable, str(ROOT / "launch/grpo.py"), "--config", str(settings)],
        cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # a background job ignores it
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while not (out / "samples.jsonl").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        os.killpg(running.pid, signal.SIGINT)
        _, said = running.communicate(timeout=30)
    finally:
        running.kill()
    assert (running.returncode, said) == (130, f"stopped; no model was saved; the run is in {out}/\n")
