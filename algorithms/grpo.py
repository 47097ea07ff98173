"""GRPO and its variants: one loss, and one table of what the variants put into it.

To add a variant, add a row (and, where no piece fits, one pure function): the command line, the law tests and the
end-to-end tests iterate the table.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from algorithms import advantages, kl, objectives, weights
from algorithms.logprobs import Batch, Scores
from fncore import stats
from fncore.stats import Metrics


class Variant(NamedTuple):
    advantage: Callable[[Tensor], Tensor]  # rewards [P, G] -> [P, G]
    ratio: Callable[[Tensor, Tensor, Tensor], Tensor]  # logprobs, old_logprobs, mask [B, T] -> log-ratio [B, T]
    objective: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]  # -> objective, where a bound was active
    weights: Callable[..., Tensor]  # mask, counts, group -> [B, T]
    whiten: bool = False  # advantages over the tokens of the whole global batch

    @property
    def needs_group(self) -> bool:
        return self.advantage is not advantages.plain


_ppo_clip = partial(objectives.clipped, low=0.2, high=0.2)
_gspo_clip = partial(objectives.clipped, low=3e-4, high=4e-4)
_normalized, _token = advantages.group_normalized, objectives.token_ratio

# fmt: off
VARIANTS = {
    "grpo": Variant(_normalized, _token, _ppo_clip, weights.sequence_mean),
    "dr_grpo": Variant(advantages.group_centered, _token, _ppo_clip, weights.constant_length),
    "dapo": Variant(_normalized, _token, partial(objectives.clipped, low=0.2, high=0.28), weights.token_mean),
    "gspo": Variant(_normalized, objectives.sequence_ratio, _gspo_clip, weights.sequence_mean),
    "gspo_token": Variant(_normalized, objectives.sequence_token_ratio, _gspo_clip, weights.sequence_mean),
    "cispo": Variant(_normalized, _token, partial(objectives.cispo, high=5.0), weights.token_mean),
    "rloo": Variant(advantages.leave_one_out, _token, objectives.reinforce, weights.sequence_sum),
    "reinforce_pp": Variant(advantages.plain, _token, _ppo_clip, weights.token_mean, whiten=True),
    "sapo": Variant(_normalized, _token, partial(objectives.sapo, tau_pos=1.0, tau_neg=1.05), weights.sequence_mean),
}
# fmt: on


def with_bounds(variant: Variant, *, low: float | None = None, high: float | None = None) -> Variant:
    """The variant with other bounds in its objective. Raises `ValueError` for a bound that the objective lacks."""
    changes = {name: value for name, value in (("low", low), ("high", high)) if value is not None}
    known = getattr(variant.objective, "keywords", {})
    for name in changes.keys() - known.keys():
        raise ValueError(f"the objective of this variant has no bound {name!r}; it has {sorted(known) or 'none'}")
    return variant._replace(objective=partial(variant.objective, **changes)) if changes else variant


def policy_loss(
    score: Callable[..., Scores],
    variant: Variant,
    *,
    kl_estimator: Callable[[Tensor, Tensor], Tensor] = kl.k3,
    kl_coef: float = 0.0,
    entropy_coef: float = 0.0,
) -> Callable[..., tuple[Tensor, Metrics]]:
    """The loss `sum_t weights_t (-objective_t + kl_coef kl_t - entropy_coef entropy_t)`.

    score: `(params, buffers, batch, *, key) -> Scores`. The batch holds, besides what scoring needs, "advantages" and
    "weights", and as far as they are wanted "old_logprobs" and "ref_logprobs", all `[B, T]`. Without the former the
    policy is taken to be the one that sampled, so its ratio is 1 by construction; without the latter there is no KL to
    log, and `kl_coef` must be 0.
    """

    def loss(params: Any, buffers: Any, batch: Batch, *, key: Tensor | None = None) -> tuple[Tensor, Metrics]:
        scores, mask = score(params, buffers, batch, key=key), batch["mask"]
        logprobs, dtype = scores.logprobs, scores.logprobs.dtype
        old = torch.where(mask, batch["old_logprobs"], 0.0) if "old_logprobs" in batch else logprobs.detach()
        log_ratio = variant.ratio(logprobs, old, mask)
        objective, bounded = variant.objective(log_ratio, batch["advantages"].to(dtype), logprobs)
        per_token = -objective
        metrics: Metrics = {
            "clip_fraction": stats.mean(bounded.to(dtype), mask),
            "entropy": stats.mean(scores.entropy, mask),
        }
        if "old_logprobs" in batch:
            change = (logprobs - old).abs()
            metrics["log_ratio/max_abs"] = stats.peak(change, mask)
            metrics["log_ratio/mean_abs"] = stats.mean(change, mask)
        if "ref_logprobs" in batch or kl_coef:
            ref = torch.where(mask, batch["ref_logprobs"], 0.0)
            per_token = per_token + kl_coef * kl_estimator(logprobs, ref)
            metrics["kl/ref"] = stats.mean(kl.k3(logprobs, ref), mask)
        if entropy_coef:
            per_token = per_token - entropy_coef * scores.entropy
        total = (batch["weights"].to(dtype) * torch.where(mask, per_token, 0.0)).sum()
        return total, metrics

    return loss
