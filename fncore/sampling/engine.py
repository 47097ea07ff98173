"""The in-process engine: chats in, rollouts and texts out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fncore.errors import UserError
from fncore.models import decoder
from fncore.sampling.generate import Rollouts, generate
from fncore.text import chat


@dataclass(frozen=True)
class Engine:
    """What stays the same from one rollout to the next. Parameters are an argument of each call."""

    config: decoder.Config
    buffers: Any
    tokenizer: Any
    stops: frozenset[int]
    dtype: torch.dtype
    max_new_tokens: int

    def __call__(
        self,
        params: Any,
        prompts: Sequence[chat.Messages],
        *,
        keys: Tensor,
        temperature: float,
        dropout_keys: Tensor | None = None,
    ) -> Rollouts:
        """Sample a reply to each chat for each of its keys `[B, 2]`; the parameters are cast once for all of it.

        Raises `UserError` for a chat that leaves no room for a reply under the model's position limit.
        """
        ids = [chat.encode_prompt(self.tokenizer, messages) for messages in prompts]
        longest, limit = max(map(len, ids), default=0), self.config.max_position_embeddings
        if longest + self.max_new_tokens > limit:
            raise UserError(f"a prompt of {longest} tokens and {self.max_new_tokens} new ones exceed {limit} positions")
        return generate(
            decoder.cast(params, self.dtype),
            self.buffers,
            ids,
            config=self.config,
            keys=keys,
            max_new_tokens=self.max_new_tokens,
            stop_tokens=self.stops,
            temperature=temperature,
            dropout_keys=dropout_keys,
            pad_token=self.tokenizer.pad_token_id or 0,
        )

    def texts(self, rollouts: Rollouts) -> list[str]:
        """The completions as text, without special tokens."""
        return self.tokenizer.batch_decode(rollouts.completions(), skip_special_tokens=True)
