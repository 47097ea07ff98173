"""Importance ratios, and the objectives made of them. Everything is `[B, T]`; an objective is maximised.

A ratio is kept as its logarithm until an objective needs it, and is held to exp(+-20), outside of which its gradient is
0. Ratios mask before they subtract, so what stands at a masked position never matters.
"""

import torch
from torch import Tensor

LIMIT = 20.0


def _ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LIMIT, LIMIT).exp()


def token_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """`log pi(token) - log pi_old(token)`."""
    return torch.where(mask, logprobs - old_logprobs, 0.0)


def sequence_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """The mean of the token log-ratios of a row, at each of its tokens (GSPO, arXiv 2507.18071, eq. 7)."""
    tokens = token_ratio(logprobs, old_logprobs, mask)
    mean = tokens.sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)
    return torch.where(mask, mean, 0.0)


def sequence_token_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """The value of `sequence_ratio` with the gradient of each token's own log-probability (GSPO-token, eq. 14)."""
    sequence = sequence_ratio(logprobs, old_logprobs, mask).detach()
    return torch.where(mask, sequence + logprobs - logprobs.detach(), 0.0)


def clipped(
    log_ratio: Tensor, advantages: Tensor, logprobs: Tensor, *, low: float, high: float, dual: float | None = None
) -> tuple[Tensor, Tensor]:
    """`min(r A, clip(r, 1 - low, 1 + high) A)` (PPO, arXiv 1707.06347), and where the bound was active.

    dual: for A < 0 the objective is no less than `dual * A` (dual clip, arXiv 1912.09729, eq. 5).
    """
    ratio = _ratio(log_ratio)
    free, bound = ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages
    objective = torch.minimum(free, bound)
    if dual is not None:
        objective = torch.where(advantages < 0, torch.maximum(objective, dual * advantages), objective)
    return objective, objective != free


def cispo(log_ratio: Tensor, advantages: Tensor, logprobs: Tensor, *, high: float) -> tuple[Tensor, Tensor]:
    """`stop(min(r, high)) A log pi` (CISPO, arXiv 2506.13585, eq. 4), and where the ratio was capped.

    Every token keeps a gradient; only its importance weight is bounded. `high` bounds the ratio itself.
    """
    ratio = _ratio(log_ratio).detach()
    return ratio.clamp(max=high) * advantages * logprobs, ratio > high


def reinforce(log_ratio: Tensor, advantages: Tensor, logprobs: Tensor) -> tuple[Tensor, Tensor]:
    """`A log pi` (Williams 1992): no ratio, so right for the first update of a rollout alone. Nothing is clipped."""
    return advantages * logprobs, torch.zeros_like(log_ratio, dtype=torch.bool)


def sapo(
    log_ratio: Tensor, advantages: Tensor, logprobs: Tensor, *, tau_pos: float, tau_neg: float
) -> tuple[Tensor, Tensor]:
    """`4 / tau sigmoid(tau (r - 1)) A`, tau by the sign of A: a soft gate, not a clip (SAPO, arXiv 2511.20347)."""
    tau = torch.where(advantages > 0, advantages.new_tensor(tau_pos), tau_neg)
    gate = 4 / tau * torch.sigmoid(tau * (_ratio(log_ratio) - 1))
    return gate * advantages, torch.zeros_like(log_ratio, dtype=torch.bool)
