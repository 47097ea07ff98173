"""Chats in, texts out."""

import pytest
import torch

from fncore import random
from fncore.errors import UserError
from fncore.models import decoder
from fncore.sampling.engine import Engine
from fncore.text import bpe


@pytest.fixture(scope="module")
def setup():
    tokenizer = bpe.train(["1+2", "34+56"], vocab_size=262)
    config = decoder.Config(len(tokenizer), 8, 12, 1, 2, 1, 4, max_position_embeddings=32)
    buffers = decoder.buffers(config, device="cpu")
    engine = Engine(config, buffers, tokenizer, frozenset({tokenizer.eos_token_id}), torch.float32, 4)
    return engine, decoder.init(config, key=random.key(0))


def ask(setup, question):
    engine, params = setup
    keys = random.split(random.key(1), 2)
    return engine(params, [[{"role": "user", "content": question}]], keys=keys, temperature=1.0)


def test_a_chat_is_sampled_once_for_each_key(setup):
    rollouts = ask(setup, "1+2")
    assert len(setup[0].texts(rollouts)) == 2
    assert (rollouts.lengths - rollouts.prompt_lengths).max() <= 4


def test_a_chat_that_leaves_no_room_is_refused(setup):
    with pytest.raises(UserError, match="exceed 32 positions"):
        ask(setup, "1+2" * 20)
