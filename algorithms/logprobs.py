"""Log-probabilities and entropies of tokens: the one scoring function for old, new and reference policy.

Axes: B rows, T tokens, N scored tokens, V vocabulary, D width.
"""

from collections.abc import Callable, Iterator
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
    rows = rows or max(1, LOGITS_PER_PRODUCT // weight.shape[0])
    return _TokenLogprobs.apply(hidden, weight, targets, temperature, rows)


def _products(
    hidden: Tensor, weight: Tensor, targets: Tensor, rows: int
) -> Iterator[tuple[slice, Tensor, list[tuple[slice, Tensor, Tensor]]]]:
    """Logits in the compute dtype, as many rows as are to exist at a time: their slice of N, the logits, and their
    chunks, each with its own slice of N, its logits (a view) and its targets `[n, 1]`."""
    chunk = max(1, LOGITS_PER_CHUNK.get(weight.device.type, 1 << 24) // weight.shape[0])
    for start in range(0, max(len(targets), 1), rows):
        part = slice(start, min(start + rows, len(targets)))
        logits = F.linear(hidden[part], weight)
        cuts = [slice(cut, min(cut + chunk, part.stop)) for cut in range(start, max(part.stop, start + 1), chunk)]
        yield part, logits, [(cut, logits[cut.start - start : cut.stop - start], targets[cut, None]) for cut in cuts]


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    logits = logits.to(nn.wide(logits.dtype))
    return (logits if temperature == 1.0 else logits / temperature).log_softmax(dim=-1)


class _TokenLogprobs(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, rows: int):  # type: ignore[override]
        parts = []
        for _, _, chunks in _products(hidden, weight, targets, rows):
            for _, logits, y in chunks:
                logprobs = _log_softmax(logits, temperature)
                entropy = -torch.linalg.vecdot(logprobs.exp(), logprobs)
                parts.append((logprobs.gather(-1, y).squeeze(-1), entropy))
        return tuple(torch.cat(part) for part in zip(*parts, strict=True))

    @staticmethod
    def setup_context(ctx, inputs, output):
        hidden, weight, targets, ctx.temperature, ctx.rows = inputs
        ctx.save_for_backward(hidden, weight, targets, output[1])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy):  # type: ignore[override]
        hidden, weight, targets, entropy = ctx.saved_tensors
        grad_hidden, grad_weight = [], torch.zeros_like(weight, dtype=nn.wide(weight.dtype))
        for part, product, chunks in _products(hidden, weight, targets, ctx.rows):
            for rows, logits, y in chunks:
                logprobs = _log_softmax(logits, ctx.temperature)
                slope = torch.zeros_like(entropy[rows, None])
                if grad_logprobs is not None:  # d log p(y) / d logits = onehot(y) - p
                    slope = -grad_logprobs[rows, None]
                if grad_entropy is not None:  # d H / d logits = -p (log p + H)
                    slope = torch.addcmul(slope, grad_entropy[rows, None], logprobs + entropy[rows, None], value=-1)
                grad = logprobs.exp_().mul_(slope)
                if grad_logprobs is not None:
                    grad.scatter_add_(-1, y, grad_logprobs[rows, None])
                logits.copy_(grad if ctx.temperature == 1.0 else grad.div_(ctx.temperature))
            grad_hidden.append(product @ weight)  # the product holds the gradient of the logits by now
            grad_weight += product.T @ hidden[part]
        return torch.cat(grad_hidden), grad_weight, None, None, None
