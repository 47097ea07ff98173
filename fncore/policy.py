"""A model with its tokenizer, as loaded from a folder and as written to one."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fncore.errors import UserError, shorten
from fncore.models import decoder, hf, locate
from fncore.text.chat import Messages, encode_prompt, stop_tokens
from fncore.text.tokenizer import load_tokenizer


class Policy(NamedTuple):
    config: decoder.Config
    params: decoder.Params  # in the master dtype
    tokenizer: Any
    stops: frozenset[int]


def master_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of parameters and optimizer state for a compute dtype: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def load(model: str, *, dtype: torch.dtype, device: torch.device, dropout: float = 0.0) -> Policy:
    """A folder, hub id, `.gguf` file or the name of a packaged model. dtype: the compute dtype."""
    place = locate(model)
    config, params = hf.load(place, dtype=master_dtype(dtype), device=device, dropout=dropout)
    tokenizer = load_tokenizer(place)
    named = stop_tokens(tokenizer, place)
    stops = frozenset(token for token in named if 0 <= token < config.vocab_size)
    if not stops:
        raise UserError(
            f"{model}: no end-of-sequence token ({', '.join(map(str, sorted(named)))}) is among the model's "
            f"{config.vocab_size} tokens, so no reply could end; use the tokenizer that the model was trained with"
        )
    return Policy(config, params, tokenizer, stops)


def check_prompts(policy: Policy, prompts: Iterable[Messages], *, max_new_tokens: int) -> None:
    """Raise `UserError` for a prompt with ids that the model lacks, or with too little room for a reply under the
    model's position limit."""
    limit = policy.config.max_position_embeddings
    for messages in prompts:
        ids = encode_prompt(policy.tokenizer, messages)
        check_ids(policy, ids, messages)
        length = len(ids)
        if length + max_new_tokens > limit:
            raise UserError(
                f"a prompt of {length} tokens and --max-new-tokens {max_new_tokens} exceed the model's {limit} "
                f"positions: {shorten(messages[-1]['content'])}"
            )


def check_ids(policy: Policy, ids: Sequence[int], messages: Messages) -> None:
    """Raise `UserError` for an id of the encoded messages beyond the model's vocabulary."""
    largest, size = max(ids, default=0), policy.config.vocab_size
    if largest >= size:
        raise UserError(
            f"the tokenizer gives id {largest}, but the model has {size} tokens: {shorten(messages[-1]['content'])}; "
            "use the tokenizer that the model was trained with"
        )


def save(folder: Path, policy: Policy, *, card: str) -> None:
    """Write a Hugging Face folder that `load` and `transformers` read."""
    generation = {"eos_token_id": sorted(policy.stops), "pad_token_id": policy.tokenizer.pad_token_id}
    hf.save(folder, policy.params, policy.config, tokenizer=policy.tokenizer, generation=generation, card=card)
