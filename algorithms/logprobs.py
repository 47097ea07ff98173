"""Log-probabilities and entropies of tokens: the one scoring function for old, new and reference policy.

Axes: B rows, T tokens, N scored tokens, V vocabulary, D width.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fncore import nn, random

Batch = dict[str, Tensor]
Forward = Callable[
    ..., tuple[Tensor, Tensor]
]  # (params, buffers, batch, *, key) -> hidden [B, T, D], unembedding [V, D]

LOGITS_PER_PRODUCT = 1 << 25  # in the compute dtype: 64 MiB in bfloat16
LOGITS_PER_CHUNK = {"cpu": 1 << 20, "cuda": 1 << 24}  # of a product, in float32: 4 MiB, which stay in a CPU's cache


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
    hidden: Tensor, weight: Tensor, targets: Tensor, *, temperature: float = 1.0, rows: int | None = None
) -> tuple[Tensor, Tensor]:
    """`log softmax(hidden weight^T / temperature)` at the targets, and the entropy of that distribution.

    hidden `[N, D]`, weight `[V, D]`, targets `[N]`; both results `[N]`, in float32 at least. At most `rows` rows of
    logits exist at a time, a part of them in float32, in forward and in backward, which computes them again.
    """
    vocabulary = weight.shape[0]
    rows = rows or max(1, LOGITS_PER_PRODUCT // vocabulary)
    chunk = max(1, LOGITS_PER_CHUNK.get(weight.device.type, 1 << 24) // vocabulary)
    return _TokenLogprobs.apply(hidden, weight, targets, temperature, rows, chunk)


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    logits = logits.to(nn.wide(logits.dtype))
    return (logits if temperature == 1.0 else logits / temperature).log_softmax(dim=-1)


def _cuts(stop: int, size: int) -> list[slice]:
    """0 to `stop` in slices of at most `size`; of nothing, one empty slice."""
    return [slice(start, min(start + size, stop)) for start in range(0, max(stop, 1), size)]


class _TokenLogprobs(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, rows: int, chunk: int):  # type: ignore[override]
        parts = []
        for h, t in zip(hidden.split(rows), targets.split(rows), strict=True):
            for logits, y in zip(F.linear(h, weight).split(chunk), t.split(chunk), strict=True):
                logprobs = _log_softmax(logits, temperature)
                entropy = -torch.linalg.vecdot(logprobs.exp(), logprobs)
                parts.append((logprobs.gather(-1, y[:, None]).squeeze(-1), entropy))
        return tuple(torch.cat(part) for part in zip(*parts, strict=True))

    @staticmethod
    def setup_context(ctx, inputs, output):
        hidden, weight, targets, ctx.temperature, ctx.rows, ctx.chunk = inputs
        ctx.save_for_backward(hidden, weight, targets, output[1])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy):  # type: ignore[override]
        hidden, weight, targets, entropy = ctx.saved_tensors

        def grad_logits(logits: Tensor, n: slice) -> Tensor:
            logprobs = _log_softmax(logits, ctx.temperature)
            slope = torch.zeros_like(entropy[n, None])
            if grad_logprobs is not None:  # d log p(y) / d logits = onehot(y) - p
                slope = -grad_logprobs[n, None]
            if grad_entropy is not None:  # d H / d logits = -p (log p + H)
                slope = torch.addcmul(slope, grad_entropy[n, None], logprobs + entropy[n, None], value=-1)
            grad = logprobs.exp() * slope
            if grad_logprobs is not None:
                grad = grad.scatter_add(-1, targets[n, None], grad_logprobs[n, None])
            return grad if ctx.temperature == 1.0 else grad / ctx.temperature

        grad_hidden, grad_weight = [], torch.zeros_like(weight, dtype=nn.wide(weight.dtype))
        for part in _cuts(len(targets), ctx.rows):
            h = hidden[part]
            product = F.linear(h, weight)
            for cut in _cuts(len(product), ctx.chunk):  # the gradient of the logits takes their place
                n = slice(part.start + cut.start, part.start + cut.stop)
                product[cut] = grad_logits(product[cut], n)
            grad_hidden.append(product @ weight)
            grad_weight += product.T @ h
        return torch.cat(grad_hidden), grad_weight, None, None, None, None
