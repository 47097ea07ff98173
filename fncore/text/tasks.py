"""Where prompts come from: procedural tasks of reasoning-gym, and files of prompts with answers.

Two properties make runs comparable. The n-th training example is a function of the seed and n alone, so a resumed run
and any number of ranks see the same prompts. And whether a problem is held out depends on its own text alone, so no
run, whatever its seed or method, trains on a problem that another one is measured on.
"""

import dataclasses
import difflib
import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from fncore.errors import UserError, shorten
from fncore.text.jsonl import bad, messages, read_jsonl, text

Message = dict[str, str]

TWO_TERM_SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}
"""The packaged model's task: 47 + 38, 5 - 61."""

_HELDOUT_ONE_IN = 10
_ATTEMPTS = 200
_DATASET_SEED = 0
_ENTRIES = 1 << 20
# These two prepare all of their entries, or refuse a large number of them, when they are made.
_FEWER_ENTRIES = {"acre": 1 << 13, "word_ladder": 20_000}


@dataclass(frozen=True)
class Example:
    """A problem: chat messages to answer, the reference answer, and the index by which its task finds it again."""

    index: int
    prompt: list[Message]
    answer: str


class Task(Protocol):
    """A source of problems."""

    def train(self, position: int) -> Example:
        """The training example at `position` (0 or more, unbounded), a function of the seed and `position` alone."""

    def heldout(self, count: int) -> list[Example]:
        """Distinct problems that `train` never gives, in an order that is the same for every seed.

        A file may hold fewer than `count`, or none, and gives what it has; a reasoning-gym task raises `UserError`.
        """

    def spec(self) -> dict[str, Any]:
        """Plain JSON data from which another process can rebuild the task's verifier."""


def load_task(task: str, *, config: dict[str, Any] | None = None, seed: int, system: str | None = None) -> Task:
    """Load a reasoning-gym task by name, or a JSON Lines file of prompts by path.

    Args:
        task: A name such as "chain_sum"; or a path, which ends in .jsonl or is a file. Records of a file are
            `{"prompt": text or messages, "answer": ...}`, `{"question": ..., "answer": ...}` (of an answer with "####",
            what follows the last one counts), or `{"messages" or "conversations": [...]}` without a last reply, with
            "answer" or "gt" where known. Other keys are ignored.
        config: Options of the reasoning-gym dataset, without its seed and size; `{}` for a file. By default the
            dataset's own, but two-term sums for "chain_sum".
        seed: Chooses the order of training examples, nothing else.
        system: A system message for prompts that don't bring their own.

    Raises:
        UserError: an unknown task or option, an option's value that the task refuses, or a bad record.
    """
    if config is None:
        config = TWO_TERM_SUMS if task == "chain_sum" else {}
    if not isinstance(config, dict):
        raise UserError(f"The options of task {task!r} are {shorten(config)}, expected an object of names and values.")
    if task.endswith(".jsonl") or Path(task).is_file():
        if config:
            raise UserError(
                f"Task {task!r} is a file and has no options, but {', '.join(map(repr, config))} was given."
            )
        return _FileTask(task, seed, system)
    return _GymTask(task, config, seed, system)


def is_heldout(question: str) -> bool:
    """Whether a problem belongs to the held-out tenth: a hash of its text, whatever its case and spacing."""
    return _hash(_normal(question)) % _HELDOUT_ONE_IN == 0


def gym_dataset(name: str, config: dict[str, Any]) -> Any:
    """The reasoning-gym dataset whose entry `i` is the problem of `Example.index == i`.

    Raises:
        UserError: an unknown name, an unknown option, or a value that the dataset refuses.
    """
    # The import takes a second, which tasks from files needn't pay.
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        raise UserError(
            f"There is no task {name!r}{_nearest(name, DATASETS)}; "
            "a task is a reasoning-gym dataset or the path of a .jsonl file."
        )
    fields = {field.name: field for field in dataclasses.fields(DATASETS[name][1])}
    options = {option: field for option, field in fields.items() if option not in ("seed", "size")}
    checked = {}
    for option, value in config.items():
        if option not in options:
            raise UserError(
                f"Task {name!r} has no option {option!r}{_nearest(str(option), options)}; "
                f"its options are {', '.join(options)}."
            )
        checked[option] = _option(name, option, value, options[option].default)
    try:
        dataset = reasoning_gym.create_dataset(
            name, seed=_DATASET_SEED, size=_FEWER_ENTRIES.get(name, _ENTRIES), **checked
        )
        dataset[0]
    except Exception as error:
        # Datasets check their options by assertions and errors of any type, some only when they make an entry.
        problem = str(error) or type(error).__name__
        raise UserError(f"Task {name!r} refuses its options {shorten(config, 200)}: {problem}.") from error
    return dataset


class _GymTask:
    """A reasoning-gym dataset of a fixed seed, of which each run draws entries by hashing its own seed."""

    def __init__(self, name: str, config: dict[str, Any], seed: int, system: str | None) -> None:
        self._name, self._config, self._seed, self._system = name, dict(config), seed, system
        self._dataset = gym_dataset(name, config)

    def train(self, position: int) -> Example:
        _check_position(position)
        for attempt in range(_ATTEMPTS):
            index = _hash(f"{self._seed}/{position}/{attempt}") % len(self._dataset)
            entry = self._dataset[index]
            if not is_heldout(entry["question"]):
                return self._example(index, entry)
        raise UserError(
            f"Task {self._name!r} with options {shorten(self._config)} has too few distinct problems: "
            f"{_ATTEMPTS} draws gave only held-out ones; widen its options."
        )

    def heldout(self, count: int) -> list[Example]:
        found: dict[str, Example] = {}
        # Ten times as many suffice when all entries differ; the rest is for tasks that repeat themselves.
        for index in range(min(len(self._dataset), 100 * count + 1000)):
            if len(found) >= count:
                break
            entry = self._dataset[index]
            if is_heldout(entry["question"]):
                found.setdefault(_normal(entry["question"]), self._example(index, entry))
        if len(found) < count:
            raise UserError(
                f"Task {self._name!r} with options {shorten(self._config)} has too few distinct problems: "
                f"{count} held-out ones were asked for, {len(found)} found; ask for fewer or widen its options."
            )
        return list(found.values())

    def spec(self) -> dict[str, Any]:
        return {"kind": "reasoning_gym", "name": self._name, "config": self._config}

    def _example(self, index: int, entry: dict[str, Any]) -> Example:
        answer = entry["answer"]
        prompt = _with_system([{"role": "user", "content": entry["question"]}], self._system)
        # Some datasets (graph_color) accept any valid answer and name none.
        return Example(index, prompt, "" if answer is None else str(answer))


class _FileTask:
    """The records of a JSON Lines file, shuffled anew in each epoch."""

    def __init__(self, path: str, seed: int, system: str | None) -> None:
        self._path = path
        self._examples = [
            _example(index, record, f"{path}, line {number}", system)
            for index, (number, record) in enumerate(read_jsonl(path))
        ]
        heldout = {example.index for example in self._examples if is_heldout(_question(example))}
        train = [index for index in range(len(self._examples)) if index not in heldout]
        if not train:
            raise UserError(f"{path}: all of its {len(self._examples)} records are held out, none is left to train on.")
        self._heldout, self._num_train = sorted(heldout), len(train)

        @lru_cache(maxsize=2)
        def order(epoch: int) -> list[int]:
            return sorted(train, key=lambda index: _hash(f"{seed}/{epoch}/{index}"))

        self._order = order

    def train(self, position: int) -> Example:
        _check_position(position)
        epoch, offset = divmod(position, self._num_train)
        return self._examples[self._order(epoch)[offset]]

    def heldout(self, count: int) -> list[Example]:
        found: dict[str, Example] = {}
        for index in self._heldout:
            if len(found) >= count:
                break
            found.setdefault(_normal(_question(self._examples[index])), self._examples[index])
        return list(found.values())

    def spec(self) -> dict[str, Any]:
        return {"kind": "jsonl", "path": self._path}


def _example(index: int, record: dict[str, Any], where: str, system: str | None) -> Example:
    key = next((key for key in ("prompt", "question", "messages", "conversations") if key in record), None)
    if key is None:
        bad(where, "the record", record, 'an object with "prompt", "question", "messages" or "conversations"')
    if isinstance(record[key], list) and key != "question":
        prompt = [
            {"role": message["role"], "content": message["content"]}
            for message in messages(record[key], where=where, what=f'"{key}"')
        ]
        if prompt[-1]["role"] == "assistant" and not prompt[-1]["content"].strip():
            prompt.pop()
    elif key in ("prompt", "question"):
        prompt = [{"role": "user", "content": text(record[key], where=where, what=f'"{key}"')}]
    else:
        bad(where, f'"{key}"', record[key], "a list of messages")
    if not prompt or prompt[-1]["role"] not in ("user", "tool") or not prompt[-1]["content"].strip():
        bad(where, f'"{key}"', record[key], "a prompt that isn't blank and ends before the reply")
    return Example(index, _with_system(prompt, system), _answer(key, record, where))


def _answer(key: str, record: dict[str, Any], where: str) -> str:
    name = "gt" if "answer" not in record and "gt" in record else "answer"
    if name not in record and key in ("messages", "conversations"):
        return ""
    value = record.get(name)
    parts = value if isinstance(value, list) and value else [value]
    if not all((isinstance(part, str | int) and not isinstance(part, bool)) or _is_finite(part) for part in parts):
        bad(where, f'"{name}"', value, "text, a finite number or a list of them")
    answer = text(", ".join(str(part) for part in parts), where=where, what=f'"{name}"')
    if key == "question":
        answer = answer.rpartition("####")[2]
    if not answer.strip():
        bad(where, f'"{name}"', value, "an answer that isn't blank")
    return answer.strip()


def _is_finite(value: object) -> bool:
    return isinstance(value, float) and math.isfinite(value)


def _option(task: str, option: str, value: object, default: object) -> object:
    """`value` in the type of the option's default, for the types that JSON tells apart."""
    if isinstance(default, tuple) and isinstance(value, list):
        return tuple(value)
    allowed: dict[type, tuple[type, ...]] = {bool: (bool,), int: (int,), float: (int, float), str: (str,)}
    kinds = allowed.get(type(default))
    if kinds and (not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds)):
        raise UserError(
            f"Option {option!r} of task {task!r} is {shorten(value)}, "
            f"expected a value of type {type(default).__name__} such as {default!r}."
        )
    return value


def _with_system(prompt: list[Message], system: str | None) -> list[Message]:
    if system is None or prompt[0]["role"] == "system":
        return prompt
    return [{"role": "system", "content": system}, *prompt]


def _question(example: Example) -> str:
    return "\n".join(message["content"] for message in example.prompt if message["role"] != "system")


def _check_position(position: int) -> None:
    if position < 0:
        raise ValueError(f"position is {position}, expected 0 or more")


def _normal(question: str) -> str:
    return " ".join(question.casefold().split())


def _hash(value: str) -> int:
    return int.from_bytes(hashlib.blake2b(value.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=3, cutoff=0.5)
    return f", did you mean {' or '.join(map(repr, near))}" if near else ""
