"""Advantages from rewards. Axes: P prompts, G samples of a prompt, B rows, T tokens.

A group of equal rewards says nothing about what was better: its advantages are exactly 0, not rounding noise.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor


def _centered(rewards: Tensor) -> Tensor:
    if rewards.shape[1] < 2:
        raise ValueError("a group-relative advantage needs at least 2 samples a prompt")
    constant = (rewards == rewards[:, :1]).all(dim=1, keepdim=True)
    return torch.where(constant, 0.0, rewards - rewards.mean(dim=1, keepdim=True))


def group_normalized(
    rewards: Tensor, *, eps: float = 1e-4, std: Literal["population", "sample"] = "population"
) -> Tensor:
    """`(r - mean) / (std + eps)` within each group, `[P, G]` (GRPO, arXiv 2402.03300)."""
    centered = _centered(rewards)
    divisor = rewards.shape[1] - (std == "sample")
    return centered / ((centered.square().sum(dim=1, keepdim=True) / divisor).sqrt() + eps)


def group_centered(rewards: Tensor) -> Tensor:
    """`r - mean` within each group, `[P, G]` (Dr. GRPO, arXiv 2503.20783)."""
    return _centered(rewards)


def leave_one_out(rewards: Tensor) -> Tensor:
    """`r` less the mean of the other samples of its group, `[P, G]` (RLOO, arXiv 2402.14740)."""
    size = rewards.shape[1]
    return _centered(rewards) * (size / (size - 1))


def plain(rewards: Tensor) -> Tensor:
    """The rewards themselves, `[P, G]`: for a variant whose baseline is the whitening over the batch."""
    return rewards


class Moments(NamedTuple):
    """What whitening needs of all ranks, in parts that add."""

    number: Tensor
    total: Tensor
    square: Tensor


def moments(values: Tensor, mask: Tensor) -> Moments:
    kept = torch.where(mask, values, 0.0).double()
    return Moments(mask.sum(dtype=torch.float64), kept.sum(), kept.square().sum())


def whiten(values: Tensor, mask: Tensor, moments: Moments, *, eps: float = 1e-8) -> Tensor:
    """`(x - mean) / sqrt(var + eps)` where the mask is on, 0 elsewhere; moments of the global batch. `[B, T]`."""
    number = moments.number.clamp(min=1)
    mean = moments.total / number
    variance = (moments.square / number - mean.square()).clamp(min=0)
    return torch.where(mask, (values - mean) / (variance + eps).sqrt(), 0.0)
