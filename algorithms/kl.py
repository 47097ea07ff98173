"""Per-token estimators of KL(policy || reference) from tokens that the policy sampled (Schulman 2020, "Approximating KL
divergence", http://joschu.net/blog/kl-approx.html).

With d = ref_logprobs - logprobs at a sampled token, all three have the reverse KL as their expected value, k1 and k3
exactly. Their *gradients*, used as a loss, differ: in expectation that of k1 is 0, of k2 that of the reverse KL, of k3
that of the forward KL. The difference is held to +-20 nats, outside of which the gradient is 0: exp(89) is inf.
"""

from torch import Tensor

LIMIT = 20.0


def _difference(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    return (ref_logprobs - logprobs).clamp(-LIMIT, LIMIT)


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """`-d`, i.e. `logprobs - ref_logprobs`: unbiased, of either sign. `[B, T]`."""
    return -_difference(logprobs, ref_logprobs)


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """`d^2 / 2`: never negative, biased. `[B, T]`."""
    return _difference(logprobs, ref_logprobs).square() / 2


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """`exp(d) - d - 1`: never negative, unbiased. `[B, T]`."""
    difference = _difference(logprobs, ref_logprobs)
    return difference.expm1() - difference


ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}
