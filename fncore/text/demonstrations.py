"""Conversations to learn from by example: answers of a task, or chats of a file. A function of (seed, position)."""

import re
from collections.abc import Callable
from typing import NamedTuple

from fncore import random
from fncore.text.chat import Messages
from fncore.text.jsonl import conversations
from fncore.text.tasks import Task


class Demonstrations(NamedTuple):
    train: Callable[[int], Messages]  # the conversation at a position of the training sequence
    heldout: list[Messages]


def from_task(task: Task, *, seed: int, careless: float = 0.0, eval_size: int = 0) -> Demonstrations:
    """A task's questions with their answers.

    careless: the share of training answers whose last number is one too high, as examples of mixed quality.
    """
    key = random.fold_in(random.key(seed), "careless")

    def train(position: int) -> Messages:
        example = task.train(position)
        slip = careless > 0 and float(random.uniform(random.fold_in(key, position))) < careless
        return [
            *example.prompt,
            {"role": "assistant", "content": one_too_high(example.answer) if slip else example.answer},
        ]

    heldout = [
        [*example.prompt, {"role": "assistant", "content": example.answer}]
        for example in (task.heldout(eval_size) if eval_size else [])
    ]
    return Demonstrations(train, heldout)


def one_too_high(answer: str) -> str:
    """The text with 1 added to the last whole number in it."""
    return re.sub(r"-?\d+(?=\D*$)", lambda match: str(int(match.group()) + 1), answer, count=1)


def from_file(path: str, *, seed: int, eval_size: int = 0) -> Demonstrations:
    """The conversations of a JSONL file, in a new order each epoch; up to a tenth of them, at most `eval_size`, is held
    out: the same ones for every seed."""
    chats = conversations(path)
    order = random.permutation(random.key(0), len(chats)).tolist()
    held = min(eval_size, len(chats) // 10)
    heldout, rest = [chats[index] for index in order[:held]], order[held:]
    orders: dict[int, list[int]] = {}

    def train(position: int) -> Messages:
        epoch, offset = divmod(position, len(rest))
        if epoch not in orders:
            orders.clear()  # positions are visited in order, so one epoch is enough
            orders[epoch] = random.permutation(random.fold_in(random.key(seed), epoch), len(rest)).tolist()
        return chats[rest[orders[epoch][offset]]]

    return Demonstrations(train, heldout)
