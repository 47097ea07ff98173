"""Scores completions in a child process, so that no verifier can hang, crash or corrupt the training process."""

import contextlib
import json
import math
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from algorithms.rewards.verifiers import BUILTIN
from fncore.errors import UserError, shorten
from fncore.text.tasks import Example

Scores = dict[str, float]
"""Raw scores by the name of the reward, in the order of the rewards."""

_ROOT = Path(__file__).resolve().parents[2]
_START_SECONDS = 120.0


class RewardError(UserError):
    """A reward function failed on a sample, and no score stands in for it."""


@dataclass(frozen=True)
class Sample:
    """A completion to score, with the prompt, reference answer and index of the example that it answers."""

    prompt: list[dict[str, str]]
    completion: str
    answer: str
    index: int


class Scorer:
    """Runs verifiers on completions, with a time limit for each.

    The built-in verifiers give 0 to a completion that they can't judge within the limit: what can't be checked isn't
    right, and a model must not be able to stop its training by what it writes. A failure of an operator's function
    stops the run, unless `on_error` says what it is worth. Both are counted in `errors`, and told by `failures`.

    Args:
        rewards: Names of verifiers: "task", "math", "module:function".
        weights: A weight for each reward, for `combine`.
        task_spec: What the task's `spec()` returned.
        timeout: Seconds for one reward on one completion.
        on_error: The score where a verifier raises, hangs, dies or returns what isn't a finite number; None raises.

    Raises:
        UserError: at once for arguments that don't fit together, at `start` for a reward that can't be loaded.
    """

    def __init__(
        self,
        rewards: list[str],
        *,
        weights: list[float],
        task_spec: dict[str, Any],
        timeout: float = 10.0,
        on_error: float | None = None,
    ) -> None:
        if not rewards or len(set(rewards)) != len(rewards):
            raise UserError(f"The rewards are {rewards!r}, expected one or more different names.")
        if len(weights) != len(rewards) or not all(math.isfinite(weight) for weight in weights):
            raise UserError(f"The weights are {weights!r}, expected a finite number for each of {', '.join(rewards)}.")
        if not 0 < timeout < math.inf:
            raise UserError(f"The time limit of rewards is {timeout!r} seconds, expected a positive number.")
        if on_error is not None and not math.isfinite(on_error):
            raise UserError(f"The score on an error is {on_error!r}, expected a finite number.")
        self.rewards, self.weights, self.errors = list(rewards), list(weights), 0
        self._task_spec, self._timeout, self._on_error = task_spec, timeout, on_error
        self._failures: list[str] = []
        self._child: _Child | None = None
        self._loaded: list[dict[str, str]] | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """Start the child process and load every verifier in it.

        Raises:
            UserError: a verifier that can't be loaded, or whose file has changed since it was first loaded.
        """
        with self._lock:
            self._running()

    def close(self) -> None:
        """End the child process; a later call of `score` starts another."""
        with self._lock:
            self._stop()

    def score(self, samples: Sequence[Sample]) -> list[Scores]:
        """The raw score of each reward for each sample. Safe to call from any thread.

        Raises:
            RewardError: a verifier failed and `on_error` is None.
        """
        with self._lock:
            return [
                {name: self._score(number, sample) for number, name in enumerate(self.rewards)} for sample in samples
            ]

    def failures(self) -> list[str]:
        """What failed since the last call: a sentence for each score that `on_error`, or 0, stands in for."""
        with self._lock:
            failures, self._failures = self._failures, []
            return failures

    def provenance(self) -> list[dict[str, Any]]:
        """For each reward its name, its weight and, for a function of the operator, its file and the file's SHA-256."""
        self.start()
        rows = zip(self.rewards, self.weights, self._loaded or [], strict=True)
        return [{"name": name, "weight": weight, **loaded} for name, weight, loaded in rows]

    def _score(self, number: int, sample: Sample) -> float:
        try:
            reply = self._running().ask({"reward": number, **asdict(sample)}, self._timeout)
        except _Lost as lost:
            self._stop()
            reply = {"error": str(lost)}
        if "score" in reply:
            return reply["score"]
        self.errors += 1
        name = self.rewards[number]
        failure = (
            f"Reward {name!r} {reply['error']}; prompt {shorten(sample.prompt, 200)}, "
            f"completion {shorten(sample.completion, 200)}."
        )
        if self._on_error is None and name not in BUILTIN:
            raise RewardError(failure)
        self._failures.append(failure)
        return 0.0 if self._on_error is None else self._on_error

    def _running(self) -> "_Child":
        if self._child is not None:
            return self._child
        child = _Child()
        setup = {"rewards": self.rewards, "task": self._task_spec, "limit": 2 * self._timeout + 5}
        try:
            reply = child.ask(setup, _START_SECONDS)
            if "fatal" in reply:
                raise UserError(reply["fatal"])
            if self._loaded not in (None, reply["provenance"]):
                raise UserError("The file of a reward function has changed since the run began.")
        except _Lost as lost:
            child.stop()
            raise UserError(f"The process of the rewards {', '.join(self.rewards)} {lost} while it started.") from None
        except BaseException:
            child.stop()
            raise
        self._child, self._loaded = child, reply["provenance"]
        return child

    def _stop(self) -> None:
        if self._child is not None:
            self._child.stop()
            self._child = None


def combine(scores: Scores, weights: Sequence[float]) -> float:
    """The weighted sum of a sample's scores; `weights` are in the order of the rewards.

    Raises:
        ValueError: there aren't as many weights as scores.
    """
    return math.fsum(weight * score for weight, score in zip(weights, scores.values(), strict=True))


def grade(scorer: Scorer, examples: Sequence[Example], completions: Sequence[str]) -> list[float]:
    """The first reward alone, for one completion of each example: what held-out accuracy is made of."""
    pairs = zip(examples, completions, strict=True)
    samples = [Sample(example.prompt, text, example.answer, example.index) for example, text in pairs]
    return [scores[scorer.rewards[0]] for scores in scorer.score(samples)]


class _Lost(Exception):
    """The child gave no reply; the text says why, as the end of a sentence about it."""


class _Child:
    """A worker process and the thread that waits for its replies, so that waiting can end without signals."""

    def __init__(self) -> None:
        path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
        self._process = subprocess.Popen(
            # -P keeps modules in the current folder from standing in for the worker's own.
            [sys.executable, "-P", "-m", "algorithms.rewards.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            encoding="utf-8",
            env={**os.environ, "PYTHONPATH": path},
        )
        self._replies: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def ask(self, message: dict[str, Any], timeout: float) -> dict[str, Any]:
        """Send a message and return the reply, or raise `_Lost`."""
        began = time.monotonic()
        assert self._process.stdin is not None
        try:
            # ASCII carries what a tokenizer can emit but UTF-8 can't, such as half of a surrogate pair.
            self._process.stdin.write(json.dumps(message, ensure_ascii=True) + "\n")
            self._process.stdin.flush()
            line = self._replies.get(timeout=timeout)
        except (BrokenPipeError, OSError):
            line = ""
        except queue.Empty:
            raise _Lost(f"took longer than {time.monotonic() - began:.3g} seconds") from None
        if not line:
            raise _Lost("ended its process")
        return json.loads(line)

    def stop(self) -> None:
        """Kill the process, wait for its end and close its pipes."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as stdout:
            for line in stdout:
                self._replies.put(line)
        self._replies.put("")
