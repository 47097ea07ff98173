"""The training step, in three lines that stand in every trainer:

grads, metrics = gradients(loss, state, microbatches, key=key)                       # local
grads, metrics = world.reduce((grads, metrics))                                      # the explicit all-reduce
state, grad_norm = apply_gradients(state, grads, optimizer=optimizer, clip=1.0)      # the same on every rank
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fncore import optim, stats, tree
from fncore.batch import Batch
from fncore.grad import value_and_grad
from fncore.stats import Metrics
from fncore.tree import Tree


class TrainState(NamedTuple):
    """All that a step changes, and all that it needs: nothing is hidden elsewhere."""

    params: Tree
    opt_state: Any
    buffers: Tree


def gradients(
    loss: Callable[..., tuple[Tensor, Metrics]],
    state: TrainState,
    microbatches: Sequence[Batch],
    *,
    key: Tensor | None = None,
) -> tuple[Tree, Metrics]:
    """The gradient of `loss(params, buffers, batch, key=key)` added up over this rank's microbatches, and its metrics.

    Nothing is averaged: the tokens carry their weights. So these gradients add up over ranks as they do over
    microbatches. `metrics["loss"]` is the sum of the losses. Raises `ValueError` for no microbatch: an empty shard
    is one of zero rows.
    """
    if not microbatches:
        raise ValueError("gradients: no microbatch; an empty shard is one microbatch of zero rows")
    grads, metrics = None, None
    differentiate = value_and_grad(loss)
    for batch in microbatches:
        total, part, grad = differentiate(state.params, state.buffers, batch, key=key)
        part = {"loss": total.double(), **part}
        grads = grad if grads is None else tree.add(grads, grad)
        metrics = part if metrics is None else stats.add(metrics, part)
    assert metrics is not None
    return grads, metrics


def apply_gradients(
    state: TrainState, grads: Tree, *, optimizer: optim.Optimizer, clip: float = float("inf")
) -> tuple[TrainState, Tensor]:
    """One optimizer update with reduced gradients, clipped by their global norm. Returns the state and that norm."""
    with torch.no_grad():
        grads, norm = optim.clip_by_global_norm(grads, clip)
        params, opt_state = optimizer.update(grads, state.opt_state, state.params)
    return state._replace(params=params, opt_state=opt_state), norm
