"""Held-out accuracy."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fncore import random
from fncore.sampling.engine import Engine
from fncore.stats import Stat
from fncore.text.tasks import Example

ROWS = 128  # prompts in one generation batch


def accuracy(
    engine: Engine,
    params: Any,
    examples: Sequence[Example],
    *,
    grade: Callable[[Sequence[Example], Sequence[str]], Sequence[float]],
    device: torch.device,
) -> Stat:
    """The share of greedy replies whose grade is 1 or more, over this rank's examples."""
    right = 0
    ordered = sorted(examples, key=lambda example: sum(len(message["content"]) for message in example.prompt))
    for start in range(0, len(ordered), ROWS):
        part = ordered[start : start + ROWS]
        keys = random.split(random.key(0, device=device), len(part))  # greedy: never used
        rollouts = engine(params, [example.prompt for example in part], keys=keys, temperature=0.0)
        right += sum(value >= 1.0 for value in grade(part, engine.texts(rollouts)))
    as_tensor = lambda number: torch.tensor(float(number), dtype=torch.float64, device=device)
    return Stat(as_tensor(right), as_tensor(len(examples)))
