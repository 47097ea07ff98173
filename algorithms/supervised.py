"""Supervised cross-entropy."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from algorithms.logprobs import Batch, Scores
from fncore import stats
from fncore.stats import Metrics


def cross_entropy(score: Callable[..., Scores]) -> Callable[..., tuple[Tensor, Metrics]]:
    """The loss `sum_t weights_t (-log p(token_t | tokens before t))` over the tokens that the mask selects.

    score: `(params, buffers, batch, *, key) -> Scores`. The batch holds "weights" `[B, T]` besides what scoring needs.
    """

    def loss(params: Any, buffers: Any, batch: Batch, *, key: Tensor | None = None) -> tuple[Tensor, Metrics]:
        logprobs = score(params, buffers, batch, key=key).logprobs
        total = -(batch["weights"].to(logprobs.dtype) * torch.where(batch["mask"], logprobs, 0.0)).sum()
        return total, {"nats_per_token": stats.mean(-logprobs, batch["mask"])}

    return loss
