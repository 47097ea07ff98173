"""Log-probabilities and entropies of tokens: the one scoring function for old, new and reference policy.

Axes: B rows, T tokens, N scored tokens, V vocabulary, D width.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fncore import nn, random

Batch = dict[str, Tensor]
Forward = Callable[
    ..., tuple[Tensor, Tensor]
]  # (params, buffers, batch, *, key) -> hidden [B, T, D], unembedding [V, D]

LOGITS_PER_CHUNK = {"cpu": 1 << 21, "cuda": 1 << 24}  # 8 MiB in float32, which stays in a CPU's cache; 64 MiB
CHUNKS_PER_PRODUCT = 8  # of the gradient of logits, in the compute dtype, before it is multiplied


class Scores(NamedTuple):
    """Index t talks about token t given those before it; 0 where the mask is off."""

    logprobs: Tensor  # [B, T]
    entropy: Tensor  # [B, T], nats


def score(
    forward: Forward, params: Any, buffers: Any, batch: Batch, *, temperature: float = 1.0, key: Tensor | None = None
) -> Scores:
    """Score the tokens that the mask selects, in float32 at least whatever the compute dtype.

    batch: "tokens" `[B, T]`, "mask" `[B, T]` bool (off at index 0, which nothing predicts), "id" `[B]`: the rows'
    global example ids, from which dropout keys are made where `key` is given. The shift from "hidden t predicts token
    t + 1" to "index t scores token t" happens here and nowhere else.
    """
    tokens, mask = batch["tokens"], batch["mask"]
    row_keys = None if key is None else random.fold_in(key, batch["id"])
    hidden, weight = forward(params, buffers, batch, key=row_keys)
    chosen = mask[:, 1:].flatten().nonzero().squeeze(1)  # [N]
    logprobs, entropy = token_logprobs(
        hidden[:, :-1].flatten(0, 1)[chosen], weight, tokens[:, 1:].flatten()[chosen], temperature=temperature
    )

    def place(values: Tensor) -> Tensor:  # [N] -> [B, T]
        flat = values.new_zeros(mask[:, 1:].numel()).index_copy(0, chosen, values)
        return F.pad(flat.view(mask[:, 1:].shape), (1, 0))

    return Scores(place(logprobs), place(entropy))


def token_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, temperature: float = 1.0, chunk: int | None = None
) -> tuple[Tensor, Tensor]:
    """`log softmax(hidden weight^T / temperature)` at the targets, and the entropy of that distribution.

    hidden `[N, D]`, weight `[V, D]`, targets `[N]`; both results `[N]`, in float32 at least. At most `chunk` rows of
    logits exist at a time, in forward and in backward, which computes them again and holds the gradients of a few.
    """
    chunk = chunk or max(1, LOGITS_PER_CHUNK.get(weight.device.type, 1 << 24) // weight.shape[0])
    logprobs, entropy, _ = _TokenLogprobs.apply(hidden, weight, targets, temperature, chunk)
    return logprobs, entropy


def _scaled_logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    logits = F.linear(hidden, weight).to(nn.wide(hidden.dtype))
    return logits if temperature == 1.0 else logits / temperature


class _TokenLogprobs(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, chunk: int):  # type: ignore[override]
        parts = []
        for h, y in zip(hidden.split(chunk), targets.split(chunk), strict=True):
            logits = _scaled_logits(h, weight, temperature)
            total = logits.logsumexp(dim=-1)
            logprobs = logits.gather(-1, y[:, None]).squeeze(-1) - total
            entropy = total - ((logits - total[:, None]).exp() * logits).sum(dim=-1)
            parts.append((logprobs, entropy, total))
        return tuple(torch.cat(part) for part in zip(*parts, strict=True))

    @staticmethod
    def setup_context(ctx, inputs, output):
        hidden, weight, targets, ctx.temperature, ctx.chunk = inputs
        _, entropy, total = output
        ctx.save_for_backward(hidden, weight, targets, entropy, total)
        ctx.mark_non_differentiable(total)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy, _):  # type: ignore[override]
        hidden, weight, targets, entropy, total = ctx.saved_tensors

        def grad_logits(start: int, end: int) -> Tensor:
            rows = slice(start, end)
            h, y = hidden[rows], targets[rows, None]
            logprobs = _scaled_logits(h, weight, ctx.temperature) - total[rows, None]
            slope = torch.zeros_like(total[rows, None])
            if grad_logprobs is not None:  # d log p(y) / d logits = onehot(y) - p
                slope = -grad_logprobs[rows, None]
            if grad_entropy is not None:  # d H / d logits = -p (log p + H)
                slope = torch.addcmul(slope, grad_entropy[rows, None], logprobs + entropy[rows, None], value=-1)
            grad = logprobs.exp() * slope
            if grad_logprobs is not None:
                grad = grad.scatter_add_(-1, y, grad_logprobs[rows, None])
            return (grad if ctx.temperature == 1.0 else grad / ctx.temperature).to(h.dtype)

        grad_hidden, grad_weight = [], None
        size = ctx.chunk * CHUNKS_PER_PRODUCT
        for start in range(0, max(len(targets), 1), size):
            end = min(start + size, len(targets))
            cuts = [*range(start, end, ctx.chunk), end] if end > start else [start, end]
            grad = torch.cat([grad_logits(*cut) for cut in pairwise(cuts)])
            grad_hidden.append(grad @ weight)
            part = (grad.T @ hidden[start:end]).to(nn.wide(hidden.dtype))
            grad_weight = part if grad_weight is None else grad_weight.add_(part)
        return torch.cat(grad_hidden), grad_weight, None, None, None
