"""Stateless layers. Axes: B rows, T query tokens, S key slots, H query heads, K key heads, C head width, D width."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from fncore import random

Kernel = Literal["fused", "math"]
FEW_KEYS = 128  # so many, 32 rows: 14 ms forward and backward in bfloat16, 34 by the fused kernel; 256 are even


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of softmax, norms and losses: float32 at least, float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last axis, computed in float32 at least (arXiv 1910.07467)."""
    y = x.to(wide(x.dtype))
    y = y * torch.rsqrt(y.square().mean(dim=-1, keepdim=True) + eps)
    return (y * weight).to(x.dtype)


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """`down (silu(gate x) * up x)` (arXiv 2002.05202). Weights `[out, in]`."""
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


@dataclass(frozen=True)
class Llama3Scaling:
    """Long-context RoPE of Llama 3.1: waves longer than the original context turn `factor` times slower, short ones
    keep their pace, and those between are interpolated (arXiv 2407.21783, section 3.4.2)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __call__(self, frequencies: Tensor) -> Tensor:
        turns = self.original_max_position_embeddings * frequencies / (2 * math.pi)
        keep = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        keep = keep.clamp(0.0, 1.0)
        return frequencies * (keep + (1 - keep) / self.factor)


def rope_frequencies(head_dim: int, *, theta: float, scaling: Llama3Scaling | None = None) -> Tensor:
    """Angle per position of each pair of channels, `theta^(-2i / C)`: float64 `[C / 2]` (arXiv 2104.09864)."""
    frequencies = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    return frequencies if scaling is None else scaling(frequencies)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate channel i with channel i + C/2 by the angle of the token's position.

    x `[B, T, H, C]`; cos, sin `[B, T, C / 2]` or broadcastable.
    """
    cos, sin = cos[..., None, :].to(x.dtype), sin[..., None, :].to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def attention(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, kernel: Kernel | None = None) -> Tensor:
    """Grouped-query attention, `softmax(q k^T / sqrt(C)) v`.

    q `[B, T, H, C]`; k, v `[B, K, S, C]` with H a multiple of K; mask `[B, T, S]`, True where a query may look, or None
    for causal (then S = T). Returns `[B, T, H, C]`. A query that may look nowhere gets 0.

    `kernel="math"` is made of plain matrix products. It holds all scores at once, in the dtype of q, and has forward
    derivatives, which the fused CPU kernel lacks. By default it serves a single query, and few keys on a CPU, where it
    is the faster one.
    """
    if kernel is None:
        few = q.shape[1] == 1 or (q.device.type == "cpu" and k.shape[2] <= FEW_KEYS)
        kernel = "math" if few else "fused"
    if kernel == "fused":
        dtype = q.dtype
        if q.device.type == "cpu":  # its backward in bfloat16 takes twice the time of float32
            q, k, v = (x.to(wide(dtype)) for x in (q, k, v))
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k,
            v,
            attn_mask=None if mask is None else mask[:, None],
            is_causal=mask is None,
            enable_gqa=True if q.shape[2] != k.shape[1] else False,  # noqa: SIM210 - a bool when compiled, too
        )
        return out.transpose(1, 2).to(dtype)
    tokens, heads, slots = q.shape[1], k.shape[1], k.shape[2]
    allowed = torch.ones(1, tokens, slots, dtype=torch.bool, device=q.device).tril() if mask is None else mask
    bias = torch.zeros_like(allowed, dtype=q.dtype).masked_fill(~allowed, torch.finfo(q.dtype).min)
    grouped = rearrange(q / math.sqrt(q.shape[-1]), "b t (k g) c -> b k (g t) c", k=heads)
    scores = (grouped @ k.transpose(-1, -2)).unflatten(2, (q.shape[2] // heads, tokens)) + bias[:, None, None]
    weights = torch.softmax(scores, dim=-1).flatten(2, 3)  # rounds to bfloat16 at its end alone
    out = rearrange(weights @ v, "b k (g t) c -> b t (k g) c", t=tokens)
    return out if mask is None else out * mask.any(dim=-1)[..., None, None]


def dropout(x: Tensor, key: Tensor, *, rate: float) -> Tensor:
    """Zero channels with probability `rate` and scale the others by `1 / (1 - rate)`. key `[B, T, 2]`, x `[B, T, D]`.

    Each token has a key of its own, so what is dropped depends neither on padding nor on the neighbours in a batch.
    """
    keep = random.bernoulli(key, 1.0 - rate, (x.shape[-1],))
    return torch.where(keep, x / (1.0 - rate), 0.0)
