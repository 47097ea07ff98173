"""A tiny decoder that every file here may build, with random norms and biases so that nothing cancels by luck."""

import pytest
import torch

from fncore import random, tree
from fncore.models import decoder

SIZES = dict(
    vocab_size=11,
    hidden_size=8,
    intermediate_size=12,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    max_position_embeddings=32,
)


def build(*, seed=0, dtype=torch.float64, **overrides):
    """`(config, params, buffers)` of a decoder whose next-token distributions are far from uniform."""
    config = decoder.Config(**{**SIZES, **overrides})
    key = random.key(seed)
    params = decoder.init(config, key=key, dtype=dtype)

    def noisy(name, leaf):
        noise = random.normal(
            random.fold_in(random.fold_in(key, "noise"), name), tuple(leaf.shape), dtype=torch.float64
        )
        return leaf + (0.3 if leaf.dim() == 1 else 0.5) * noise.to(dtype)

    return config, tree.map_named(noisy, params), decoder.buffers(config, device="cpu", dtype=dtype)


@pytest.fixture(scope="session")
def tiny():
    return build
