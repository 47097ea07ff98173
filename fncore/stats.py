"""Numbers that can be put together across microbatches and ranks without averaging averages.

A metric is one of three kinds: a plain 0-d tensor (a sum, such as a loss whose tokens carry weights), a `Stat`
(reported as total / number) or a `Peak` (a maximum). Nothing is divided before it is reported.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Stat(NamedTuple):
    """A mean in two parts that add: `total / number` when reported, 0 where nothing was counted."""

    total: Tensor
    number: Tensor

    def mean(self) -> float:
        return self.total.item() / self.number.item() if self.number.item() else 0.0


class Peak(NamedTuple):
    """A maximum; `-inf` where nothing was seen."""

    value: Tensor


Metrics = dict[str, Tensor | Stat | Peak]


def mean(values: Tensor, mask: Tensor) -> Stat:
    """The mean of `values` where `mask`, as a `Stat` in float64."""
    kept = torch.where(mask, values.detach(), 0.0)
    return Stat(kept.sum(dtype=torch.float64), mask.sum(dtype=torch.float64))


def peak(values: Tensor, mask: Tensor) -> Peak:
    """The largest of `values` where `mask`."""
    kept = torch.where(mask, values.detach(), -torch.inf).double()
    return Peak(kept.max() if kept.numel() else kept.new_tensor(-torch.inf))


def add(left: Metrics, right: Metrics) -> Metrics:
    """Both together. They must hold the same names."""
    if left.keys() != right.keys():
        raise ValueError(f"metrics differ in their names: {sorted(left.keys() ^ right.keys())}")
    return {name: _add(value, right[name]) for name, value in left.items()}


def _add(a: Tensor | Stat | Peak, b: Tensor | Stat | Peak) -> Tensor | Stat | Peak:
    if isinstance(a, Stat) and isinstance(b, Stat):
        return Stat(a.total + b.total, a.number + b.number)
    if isinstance(a, Peak) and isinstance(b, Peak):
        return Peak(torch.maximum(a.value, b.value))
    assert isinstance(a, Tensor)
    assert isinstance(b, Tensor)
    return a + b


def report(metrics: Metrics) -> dict[str, float]:
    """Plain numbers for a log line. A `Peak` that saw nothing is 0."""
    out = {}
    for name, value in metrics.items():
        if isinstance(value, Stat):
            out[name] = value.mean()
        elif isinstance(value, Peak):
            out[name] = 0.0 if value.value.item() == -torch.inf else value.value.item()
        else:
            out[name] = value.item()
    return out
