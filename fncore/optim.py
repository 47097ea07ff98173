"""Optimizers as pairs of pure functions, learning-rate schedules, and clipping.

    optimizer = adamw(cosine(1e-3, total=100))
    opt_state = optimizer.init(params)
    params, opt_state = optimizer.update(grads, opt_state, params)

`update` returns new trees. With `donate=True` it writes into the given ones instead, by the fused kernel where there
is one, and returns them: the same mathematics with no second copy, for a caller that has no further use for the old.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fncore import tree
from fncore.tree import Tree

Schedule = Callable[[int], float]


class Optimizer(NamedTuple):
    init: Callable[[Tree], Any]
    update: Callable[[Tree, Any, Tree], tuple[Tree, Any]]  # grads, opt_state, params -> params, opt_state


def constant(peak: float) -> Schedule:
    """`peak` at every step."""
    return lambda step: peak


def linear(peak: float, *, total: int, final: float = 0.0) -> Schedule:
    """A straight line from `peak` at step 0 to `final` at step total - 1."""
    return lambda step: peak + (final - peak) * _progress(step, total)


def cosine(peak: float, *, total: int, final: float = 0.0) -> Schedule:
    """Half a cosine from `peak` at step 0 to `final` at step total - 1 (arXiv 1608.03983)."""
    return lambda step: final + (peak - final) * 0.5 * (1 + math.cos(math.pi * _progress(step, total)))


def _progress(step: int, total: int) -> float:
    return min(step / max(total - 1, 1), 1.0)


def warmup(schedule: Schedule, *, steps: int) -> Schedule:
    """Rise through `steps` steps, `(step + 1) / (steps + 1)` of the start, then run `schedule` from its step 0."""
    return lambda step: schedule(0) * (step + 1) / (steps + 1) if step < steps else schedule(step - steps)


def warmup_stable_decay(peak: float, *, total: int, warm: int, decay: int, final: float = 0.0) -> Schedule:
    """Warm up for `warm` steps, hold `peak`, end with a line to `final` over the last `decay` (arXiv 2404.06395)."""
    stable = total - warm - decay
    if stable < 0:
        raise ValueError(f"warm ({warm}) and decay ({decay}) together exceed total ({total})")
    tail = linear(peak, total=decay + 1, final=final)
    return warmup(lambda step: tail(max(step - stable + 1, 0)), steps=warm)


def named_schedule(name: str, peak: float, *, total: int, warm: int = 0) -> Schedule:
    """The schedule that a command line names: warm up for `warm` steps, then "constant", "linear" or "cosine" to 0, or
    "wsd" with a last tenth of decay."""
    if name == "wsd":
        return warmup_stable_decay(peak, total=total, warm=warm, decay=total // 10)
    rest = max(total - warm, 1)
    shapes = {"constant": constant(peak), "linear": linear(peak, total=rest), "cosine": cosine(peak, total=rest)}
    return warmup(shapes[name], steps=warm)


def clip_by_global_norm(grads: Tree, max_norm: float) -> tuple[Tree, Tensor]:
    """Scale so that the global norm is at most `max_norm`. Returns the gradients and the norm before.

    Where the norm is NaN or infinite, the scaled gradients are of no use (NaN, or 0): callers look at the norm.
    """
    norm = tree.global_norm(grads)
    return tree.scale(grads, (max_norm / (norm + 1e-6)).clamp(max=1.0)), norm


def decay_matrices(name: str, leaf: Tensor) -> bool:
    """The default choice of what weight decay applies to: matrices, but no embedding. Norms and biases are vectors."""
    return leaf.dim() >= 2 and name != "embed"


class AdamWState(NamedTuple):
    step: Tensor  # how many updates were made, 0-d int64
    mean: Tree
    square: Tree


def adamw(
    lr: float | Schedule,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    decays: Callable[[str, Tensor], bool] = decay_matrices,
    donate: bool = False,
) -> Optimizer:
    """Adam with decoupled weight decay (arXiv 1711.05101), the arithmetic of `torch.optim.AdamW`:

        m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
        p = (1 - lr wd) p - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

    `decays(path, leaf)` says which leaves are decayed. Moments are kept in the dtype of the parameters.
    """
    schedule = lr if callable(lr) else constant(lr)
    b1, b2 = betas

    def init(params: Tree) -> AdamWState:
        return AdamWState(torch.zeros((), dtype=torch.int64), tree.zeros_like(params), tree.zeros_like(params))

    def update(grads: Tree, state: AdamWState, params: Tree) -> tuple[Tree, AdamWState]:
        step = state.step + 1
        rate, t = schedule(int(state.step)), int(step)
        mean = tree.map(lambda m, g: m.lerp(g, 1 - b1), state.mean, grads)
        square = tree.map(lambda v, g: v * b2 + (1 - b2) * g * g, state.square, grads)

        def move(p: Tensor, m: Tensor, v: Tensor, decay: bool) -> Tensor:
            denominator = v.sqrt() / math.sqrt(1 - b2**t) + eps
            return p * (1 - rate * weight_decay * decay) - rate / (1 - b1**t) * m / denominator

        return tree.map(move, params, mean, square, tree.map_named(decays, params)), AdamWState(step, mean, square)

    def donated(grads: Tree, state: AdamWState, params: Tree) -> tuple[Tree, AdamWState]:
        step = state.step + 1
        for decay in (True, False):
            chosen = [decays(name, leaf) == decay for name, leaf in tree.named_leaves(params)]
            if not any(chosen):  # the kernel takes no empty list
                continue
            p, g, m, v = (
                [leaf for leaf, take in zip(tree.leaves(part), chosen, strict=True) if take]
                for part in (params, grads, state.mean, state.square)
            )
            steps = [torch.tensor(float(step), device=p[0].device)] * len(p)
            torch._fused_adamw_(
                p, g, m, v, [], steps,
                lr=schedule(int(state.step)), beta1=b1, beta2=b2, weight_decay=weight_decay * decay, eps=eps,
                amsgrad=False, maximize=False,
            )  # fmt: skip
        return params, AdamWState(step, state.mean, state.square)

    return Optimizer(init, donated if donate else update)


class SGDState(NamedTuple):
    step: Tensor
    velocity: Tree


def sgd(
    lr: float | Schedule,
    *,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    decays: Callable[[str, Tensor], bool] = decay_matrices,
) -> Optimizer:
    """Stochastic gradient descent, the arithmetic of `torch.optim.SGD`: `g += wd p; u = momentum u + g; p -= lr u`."""
    schedule = lr if callable(lr) else constant(lr)

    def init(params: Tree) -> SGDState:
        return SGDState(torch.zeros((), dtype=torch.int64), tree.zeros_like(params))

    def update(grads: Tree, state: SGDState, params: Tree) -> tuple[Tree, SGDState]:
        rate = schedule(int(state.step))
        full = tree.map(lambda p, g, decay: g + weight_decay * decay * p, params, grads, tree.map_named(decays, params))
        velocity = tree.map(lambda u, g: momentum * u + g, state.velocity, full)
        return tree.map(lambda p, u: p - rate * u, params, velocity), SGDState(state.step + 1, velocity)

    return Optimizer(init, update)
