"""What each token counts in one optimizer step's loss, which is `sum(weights * loss_per_token)` and never divides.

The counts are those of the whole global batch, summed over ranks before any loss runs. So the gradients of any cut of
the batch add up to the gradient of the whole. A row whose mask is all off is not counted as a sequence.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Counts(NamedTuple):
    """Sums over the rows of a batch, so counts of shards add."""

    tokens: Tensor
    sequences: Tensor
    prompts: Tensor
    budget: Tensor  # tokens that the sequences were allowed


def count(mask: Tensor, group: Tensor, *, budget: int) -> Counts:
    """mask `[B, T]`; group `[B]`, the prompt that each row answers, with all its rows here; budget: tokens a row."""
    alive = mask.any(dim=1)
    sequences = alive.sum()
    prompts = torch.tensor(torch.unique(group[alive]).numel(), device=mask.device)
    return Counts(mask.sum(), sequences, prompts, sequences * budget)


def _share(mask: Tensor, total: Tensor) -> Tensor:
    return mask.double() / total.clamp(min=1)


def token_mean(mask: Tensor, counts: Counts, group: Tensor | None = None) -> Tensor:
    """`1 / N`: every token of the batch counts alike (DAPO, arXiv 2503.14476). `[B, T]`, float64."""
    return _share(mask, counts.tokens)


def sequence_mean(mask: Tensor, counts: Counts, group: Tensor | None = None) -> Tensor:
    """`1 / (len_i B)`: every sequence counts alike (GRPO). `[B, T]`, float64."""
    return _share(mask, mask.sum(dim=1, keepdim=True) * counts.sequences)


def sequence_sum(mask: Tensor, counts: Counts, group: Tensor | None = None) -> Tensor:
    """`1 / B`: the mean over sequences of their sums, the policy gradient as derived. `[B, T]`, float64."""
    return _share(mask, counts.sequences)


def constant_length(mask: Tensor, counts: Counts, group: Tensor | None = None) -> Tensor:
    """`1 / (B L)`, L the longest completion allowed: no length bias (Dr. GRPO, arXiv 2503.20783). `[B, T]`, float64."""
    return _share(mask, counts.budget)


def prompt_mean(mask: Tensor, counts: Counts, group: Tensor) -> Tensor:
    """`1 / (P n_p)` with n_p the tokens of all rows of prompt p: every prompt counts alike. `[B, T]`, float64."""
    _, index = torch.unique(group, return_inverse=True)
    tokens = torch.zeros(len(group), dtype=torch.int64, device=mask.device).index_add(0, index, mask.sum(dim=1))
    return _share(mask, tokens[index][:, None] * counts.prompts)
