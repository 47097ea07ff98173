"""Sampling completions: prompts are read once, a preallocated cache, one fused step a token.

Axes: P prompts, G samples of a prompt, B = P * G rows in the order of prompts, V vocabulary.
"""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fncore import batch, nn, random
from fncore.models import decoder

SLOTS = 128  # positions by which the cache grows: it is read whole, so neither cut to length nor far too long


class Rollouts(NamedTuple):
    """Prompts with their completions, padded on the right. Lengths are recorded: nothing is inferred from ids."""

    tokens: Tensor  # [B, T]
    prompt_lengths: Tensor  # [B]
    lengths: Tensor  # [B], prompt and completion, a sampled stop token included
    truncated: Tensor  # [B] bool: the limit was reached before a stop token

    @property
    def mask(self) -> Tensor:
        """True on sampled tokens, `[B, T]`."""
        return batch.spans(self.prompt_lengths, self.lengths, width=self.tokens.shape[1])

    def rows(self) -> list[list[int]]:
        """Ids of prompt and completion, without padding."""
        return [row[:end] for row, end in zip(self.tokens.tolist(), self.lengths.tolist(), strict=True)]

    def completions(self) -> list[list[int]]:
        """Ids of the completions alone."""
        return [row[start:] for row, start in zip(self.rows(), self.prompt_lengths.tolist(), strict=True)]


def filter_logits(logits: Tensor, *, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """Put -inf where a token is not among the `top_k` likeliest (0: no limit), or not in the smallest set of likeliest
    tokens whose probability reaches `top_p` (arXiv 1904.09751). At least one token stays. `[..., V]`.
    """
    if 0 < top_k < logits.shape[-1]:
        least = logits.topk(top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if top_p < 1.0:
        ordered, order = logits.sort(dim=-1, descending=True, stable=True)
        probs = ordered.softmax(dim=-1)
        before = probs.cumsum(dim=-1) - probs
        drop = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, before >= top_p)
        drop.scatter_(-1, order[..., :1], False)
        logits = logits.masked_fill(drop, -torch.inf)
    return logits


def sample(logits: Tensor, keys: Tensor, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """One token a row: logits `[B, V]`, keys `[B, 2]` give `[B]`. Temperature 0 takes the likeliest token."""
    if temperature == 0.0:
        return logits.argmax(dim=-1)
    logits = logits.to(nn.wide(logits.dtype))
    if temperature != 1.0:
        logits = logits / temperature
    return random.categorical(keys, filter_logits(logits, top_k=top_k, top_p=top_p))


@torch.no_grad()
def generate(
    params: Any,
    buffers: Any,
    prompts: Sequence[Sequence[int]],
    *,
    config: decoder.Config,
    keys: Tensor,
    max_new_tokens: int,
    stop_tokens: Collection[int],
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    dropout_keys: Tensor | None = None,
    pad_token: int = 0,
) -> Rollouts:
    """Sample completions of `prompts`, each prompt as many times as there are keys for it.

    params: in the compute dtype (`decoder.cast`). keys `[B, 2]`: one for each sample, B a multiple of P, made from the
    samples' global ids so that a completion depends neither on the rank nor on its neighbours. A row ends after a
    token of `stop_tokens`, which is kept, or after `max_new_tokens`. dropout_keys `[B, 2]`: sample with dropout on;
    each sample then reads its prompt under its own key, as a forward pass over the finished row with that key does.

    Raises `ValueError` before any work for an empty prompt, or one that leaves too little room under the model's
    position limit.
    """
    device = keys.device
    longest = max(map(len, prompts), default=1)
    if any(not prompt for prompt in prompts):
        raise ValueError("generate: an empty prompt has nothing to continue")
    if longest + max_new_tokens > config.max_position_embeddings:
        raise ValueError(
            f"generate: a prompt of {longest} tokens and {max_new_tokens} new ones exceed the model's "
            f"{config.max_position_embeddings} positions"
        )
    rows = len(keys)
    group = rows // max(len(prompts), 1)
    if group * len(prompts) != rows:
        raise ValueError(f"generate: {rows} keys are not a multiple of {len(prompts)} prompts")
    if dropout_keys is not None:
        prompts, group = [prompt for prompt in prompts for _ in range(group)], 1
    starts = torch.tensor([len(prompt) for prompt in prompts], dtype=torch.int64, device=device)
    starts = starts.repeat_interleave(group)  # [B]
    tokens = torch.full((rows, longest + max_new_tokens), pad_token, dtype=torch.int64, device=device)
    lengths, truncated = starts.clone(), torch.ones(rows, dtype=torch.bool, device=device)
    prompt_tokens = batch.pad(prompts, value=pad_token, device=device)  # [P, T]
    tokens[:, :longest] = prompt_tokens.repeat_interleave(group, dim=0)
    if rows == 0 or max_new_tokens == 0:
        return Rollouts(tokens, starts, lengths, truncated)
    dtype = params["embed"].dtype
    prefix = decoder.empty_cache(config, rows=len(prompts), slots=longest, dtype=dtype, device=device)
    hidden = decoder.apply(params, buffers, prompt_tokens, config=config, cache=prefix, key=dropout_keys).hidden
    last = hidden[torch.arange(len(prompts), device=device), starts[::group] - 1]  # [P, D]
    logits = decoder.unembed(params, last).repeat_interleave(group, dim=0)  # [B, V]
    cache = decoder.widen_cache(prefix, group=group, slots=longest + min(SLOTS, max_new_tokens))

    stops = torch.tensor(sorted(stop_tokens), dtype=torch.int64, device=device)
    active = torch.arange(rows, device=device)  # the rows that the cache and the logits hold
    done = torch.zeros(rows, dtype=torch.bool, device=device)
    for step in range(max_new_tokens):
        positions = starts[active] + step
        chosen = sample(
            logits, random.fold_in(keys[active], positions), temperature=temperature, top_k=top_k, top_p=top_p
        )
        alive = ~done[active]
        tokens[active[alive], positions[alive]] = chosen[alive]
        lengths[active[alive]] += 1
        ended = active[alive & torch.isin(chosen, stops)]
        done[ended], truncated[ended] = True, False
        left = int((~done).sum())
        if left == 0 or step + 1 == max_new_tokens:
            break
        if left <= 0.75 * len(active):  # compacting copies the cache, so it must pay
            keep = (~done[active]).nonzero().flatten()
            active, chosen, positions = active[keep], chosen[keep], positions[keep]
            cache = decoder.Cache(*([part[keep] for part in parts] for parts in cache))
        if step and step % SLOTS == 0:
            cache = decoder.widen_cache(cache, group=1, slots=longest + min(step + SLOTS, max_new_tokens))
        hidden = decoder.apply(
            params,
            buffers,
            chosen[:, None],
            config=config,
            positions=positions[:, None],
            cache=cache,
            key=None if dropout_keys is None else dropout_keys[active],
        ).hidden
        logits = decoder.unembed(params, hidden[:, 0])
    return Rollouts(tokens[:, : int(lengths.max())], starts, lengths, truncated)
