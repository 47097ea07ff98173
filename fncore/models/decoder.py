"""One dense decoder for Llama, SmolLM2, Qwen2, Qwen3, Mistral and MiniMind-3: what differs between them is in `Config`.

Axes: B rows, T tokens, V vocabulary, D width, H query heads, K key/value heads, C head width, S cache slots.
"""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch._inductor.config
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from fncore import nn, random, tree

Params = dict[str, Any]
Buffers = dict[str, Any]
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Config:
    """Sizes and switches of a decoder, under the names that Hugging Face gives them."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: nn.Llama3Scaling | None = None
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = True
    qk_norm: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    windows: tuple[int | None, ...] | None = None  # one a layer: how many tokens back it sees, None for all
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )
        if self.windows is not None and len(self.windows) != self.num_hidden_layers:
            raise ValueError(f"windows has {len(self.windows)} entries for {self.num_hidden_layers} layers")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout must be in [0, 1), not {self.dropout}")


class Cache(NamedTuple):
    """Keys and values of the tokens read so far: one `[B, K, S, C]` pair a layer; slot s holds position s."""

    keys: list[Tensor]
    values: list[Tensor]


class Output(NamedTuple):
    hidden: Tensor  # [B, T, D], after the final norm
    cache: Cache | None


class Layout(NamedTuple):
    """Which tokens of a right-padded batch `[B, T]` are worth computing, each once: N of them."""

    places: Tensor  # [B, T], the place among the N of each token's twin; of padding, any place
    rows: Tensor  # [N], the place in the flattened batch of each of the N


def layout(tokens: Tensor, lengths: Tensor, group: Tensor | None = None) -> Layout:
    """Leave out padding, and what a row shares with the first row of its group from the start on: attention is causal,
    so equal beginnings have equal hidden states. A prompt is computed once for all of its completions.

    tokens `[B, T]`, lengths `[B]`, group `[B]`: rows that probably begin alike; that they do is checked.
    """
    rows, columns = torch.arange(len(tokens), device=tokens.device), torch.arange(tokens.shape[1], device=tokens.device)
    real, leader = columns < lengths[:, None], rows
    if group is not None:
        _, inverse = torch.unique(group, return_inverse=True)
        leader = torch.full_like(rows, len(rows)).scatter_reduce(0, inverse, rows, "amin")[inverse]
    alike = (tokens == tokens[leader]) & real & real[leader] & (leader != rows)[:, None]
    shared = alike.int().cumprod(dim=1).bool()
    own = real & ~shared
    own[:1, :1] |= ~own.any()  # a batch of nothing but padding still has a token
    place = (own.flatten().cumsum(0) - 1).view(own.shape)
    return Layout(torch.where(shared, place[leader], place).clamp(min=0), own.flatten().nonzero().squeeze(1))


def shapes(config: Config) -> Params:
    """The parameter tree with a shape in the place of each tensor. Matrices are `[out, in]`."""
    width, query, kv = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
    query, kv = query * config.head_dim, kv * config.head_dim
    attention: Shapes = {"q": (query, width), "k": (kv, width), "v": (kv, width), "o": (width, query)}
    if config.qkv_bias:
        attention |= {"q_bias": (query,), "k_bias": (kv,), "v_bias": (kv,)}
    if config.output_bias:
        attention |= {"o_bias": (width,)}
    if config.qk_norm:
        attention |= {"q_norm": (config.head_dim,), "k_norm": (config.head_dim,)}
    inner = config.intermediate_size
    layer = {
        "attention_norm": (width,),
        "attention": attention,
        "mlp_norm": (width,),
        "mlp": {"gate": (inner, width), "up": (inner, width), "down": (width, inner)},
    }
    top: Shapes = {"embed": (config.vocab_size, width), "norm": (width,)}
    if not config.tie_word_embeddings:
        top["unembed"] = (config.vocab_size, width)
    return {**top, "layers": [layer] * config.num_hidden_layers}


def map_shapes(function: Callable[[str, tuple[int, ...]], Any], config: Config) -> Params:
    """Build a tree of the parameters' structure from `function(path, shape)`."""

    def build(node: Any, path: str) -> Any:
        if isinstance(node, dict):
            return {name: build(child, f"{path}.{name}") for name, child in node.items()}
        if isinstance(node, list):
            return [build(child, f"{path}.{index}") for index, child in enumerate(node)]
        return function(path[1:], node)

    return build(shapes(config), "")


def init(config: Config, *, key: Tensor, dtype: torch.dtype = torch.float32) -> Params:
    """Fresh parameters on the key's device: matrices N(0, 0.02^2), those that write into the residual stream smaller
    by sqrt(2 layers) (GPT-2), norms 1, biases 0. A tied embedding is stored once.
    """
    residual = (2 * config.num_hidden_layers) ** -0.5

    def leaf(path: str, shape: tuple[int, ...]) -> Tensor:
        if len(shape) == 1:
            fill = 1.0 if path.endswith("norm") else 0.0
            return torch.full(shape, fill, dtype=dtype, device=key.device)
        std = 0.02 * (residual if path.endswith((".o", ".down")) else 1.0)
        return random.normal(random.fold_in(key, path), shape).to(dtype) * std

    return map_shapes(leaf, config)


def buffers(config: Config, *, device: torch.device | str, dtype: torch.dtype = torch.float32) -> Buffers:
    """RoPE tables `[max_position_embeddings, C / 2]`: what follows from the config alone. Rebuilt, never sent."""
    frequencies = nn.rope_frequencies(config.head_dim, theta=config.rope_theta, scaling=config.rope_scaling)
    angles = torch.outer(torch.arange(config.max_position_embeddings, dtype=torch.float64), frequencies)
    return {"rope": {"cos": angles.cos().to(device, nn.wide(dtype)), "sin": angles.sin().to(device, nn.wide(dtype))}}


def cast(params: Params, dtype: torch.dtype) -> Params:
    """Parameters in the compute dtype. Norm weights stay as they are: they are used in float32 anyway."""
    return tree.map_named(lambda name, leaf: leaf if name.endswith("norm") else leaf.to(dtype), params)


def empty_cache(config: Config, *, rows: int, slots: int, dtype: torch.dtype, device: torch.device | str) -> Cache:
    shape = (rows, config.num_key_value_heads, slots, config.head_dim)
    make = lambda: [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_hidden_layers)]
    return Cache(make(), make())


def widen_cache(cache: Cache, *, group: int, slots: int) -> Cache:
    """A cache of `group` copies of each row, with room for `slots` positions."""

    def widen(part: Tensor) -> Tensor:
        rows, heads, used, width = part.shape
        out = part.new_zeros(rows * group, heads, slots, width)
        out[:, :, :used] = part.repeat_interleave(group, dim=0)
        return out

    return Cache(*([widen(part) for part in parts] for parts in cache))


def block(
    layer: Params,
    x: Tensor,
    rope: tuple[Tensor, Tensor],
    mask: Tensor | None,
    cache: tuple[Tensor, Tensor, Tensor] | None,
    keys: tuple[Tensor, Tensor] | None,
    layout: Layout | None,
    *,
    config: Config,
    kernel: nn.Kernel | None = None,
) -> Tensor:
    """One layer: `x + attention(norm(x))`, then `x + mlp(norm(x))`. x `[B, T, D]`.

    cache: (keys `[B, K, S, C]`, values, positions `[B, T]`): the new keys and values are written at the positions, in
    place, and attention runs over the slots. keys: dropout keys `[B, T, 2]` of the two branches. layout: x is
    `[1, N, D]`, and only attention sees rows.
    """
    p = layer["attention"]
    y = nn.rms_norm(x, layer["attention_norm"], eps=config.rms_norm_eps)
    q, k, v = (
        rearrange(F.linear(y, p[name], p.get(f"{name}_bias")), "b t (h c) -> b t h c", c=config.head_dim)
        for name in ("q", "k", "v")
    )
    if config.qk_norm:
        q = nn.rms_norm(q, p["q_norm"], eps=config.rms_norm_eps)
        k = nn.rms_norm(k, p["k_norm"], eps=config.rms_norm_eps)
    q, k = nn.rope(q, *rope), nn.rope(k, *rope)
    if layout is not None:
        q, k, v = (F.embedding(layout.places, z[0].flatten(1)).unflatten(-1, z.shape[2:]) for z in (q, k, v))
    if cache is None:
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    else:
        cached_keys, cached_values, positions = cache
        rows = torch.arange(x.shape[0], device=x.device)[:, None]
        cached_keys[rows, :, positions] = k
        cached_values[rows, :, positions] = v
        k, v = cached_keys, cached_values
    y = rearrange(nn.attention(q, k, v, mask=mask, kernel=kernel), "b t h c -> b t (h c)")
    if layout is not None:
        y = y.flatten(0, 1).index_select(0, layout.rows)[None]
    y = F.linear(y, p["o"], p.get("o_bias"))
    x = x + (y if keys is None else nn.dropout(y, keys[0], rate=config.dropout))
    y = nn.swiglu(nn.rms_norm(x, layer["mlp_norm"], eps=config.rms_norm_eps), **layer["mlp"])
    return x + (y if keys is None else nn.dropout(y, keys[1], rate=config.dropout))


def compiled_block() -> Callable[..., Tensor]:
    """`block` through `torch.compile`: compiled once, used by every layer. Raises `ValueError` without a C++ compiler.

    Inductor keeps intermediate results of fused bfloat16 operations in float32, and fuses otherwise with gradients than
    without; old and new log-probabilities would then differ before any update. So it is told to round as eager does.
    """
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")
    if compiler is None and not torch.cuda.is_available():
        raise ValueError("--compile needs a C++ compiler (g++ or clang++), and none was found")
    torch._inductor.config.emulate_precision_casts = True
    return torch.compile(block, dynamic=True)


def apply(
    params: Params,
    buffers: Buffers,
    tokens: Tensor,
    *,
    config: Config,
    positions: Tensor | None = None,
    segments: Tensor | None = None,
    cache: Cache | None = None,
    key: Tensor | None = None,
    layout: Layout | None = None,
    kernel: nn.Kernel | None = None,
    block: Callable[..., Tensor] = block,
) -> Output:
    """Hidden states of `tokens` `[B, T]`, in the dtype of the parameters.

    positions `[B, T]`: default 0..T-1. segments `[B, T]`: tokens attend within their own segment only, which serves
    packed documents and padding on any side; padding on the right needs none, since attention is causal.
    key `[B, 2]`: one dropout key a row; without it, or with dropout 0, the function is deterministic.
    cache: the tokens are read after those in the cache. The cache is donated: its tensors are written in place.
    layout: compute these tokens alone; without dropout, segments or cache. What comes out at padding means nothing.
    block: the layer function, for a compiled one.
    """
    if positions is None:
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
    places = positions
    if layout is not None:
        tokens, places = (z.flatten().index_select(0, layout.rows)[None] for z in (tokens, positions))
    x = F.embedding(tokens, params["embed"])
    rope = buffers["rope"]["cos"][places].to(x.dtype), buffers["rope"]["sin"][places].to(x.dtype)
    token_keys = None
    if key is not None and config.dropout > 0.0:
        token_keys = random.fold_in(key[:, None], positions)  # [B, T, 2]
        x = nn.dropout(x, random.fold_in(token_keys, "embed"), rate=config.dropout)
    masks: dict[int | None, Tensor | None] = {}
    for index, layer in enumerate(params["layers"]):
        window = None if config.windows is None else config.windows[index]
        if window not in masks:
            masks[window] = _mask(positions, segments, None if cache is None else cache.keys[0].shape[2], window)
        keys = None
        if token_keys is not None:
            keys = random.fold_in(token_keys, 2 * index), random.fold_in(token_keys, 2 * index + 1)
        slots = None if cache is None else (cache.keys[index], cache.values[index], positions)
        x = block(layer, x, rope, masks[window], slots, keys, layout, config=config, kernel=kernel)
    hidden = nn.rms_norm(x, params["norm"], eps=config.rms_norm_eps)
    return Output(hidden if layout is None else F.embedding(layout.places, hidden[0]), cache)


def _mask(positions: Tensor, segments: Tensor | None, slots: int | None, window: int | None) -> Tensor | None:
    """Which keys each query may see, `[B, T, S]`; None means plainly causal."""
    if slots is not None:
        key_positions = torch.arange(slots, device=positions.device).expand(positions.shape[0], slots)
        mask = key_positions[:, None, :] <= positions[:, :, None]
    elif segments is None and window is None:
        return None
    else:
        key_positions = positions
        length = positions.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool, device=positions.device).tril()[None]
    if segments is not None:
        mask = mask & (segments[:, :, None] == segments[:, None, :])
    if window is not None:
        mask = mask & (positions[:, :, None] - key_positions[:, None, :] < window)
    return mask.expand(positions.shape[0], -1, -1)


def forward(
    params: Params,
    buffers: Buffers,
    batch: dict[str, Tensor],
    *,
    config: Config,
    dtype: torch.dtype,
    key: Tensor | None = None,
    block: Callable[..., Tensor] = block,
) -> tuple[Tensor, Tensor]:
    """What scoring needs: hidden states `[B, T, D]` of `batch["tokens"]`, and the unembedding `[V, D]`, in `dtype`.

    "positions" and "segments" of the batch are used where it has them. Where it has "lengths" instead, rows are padded
    on the right, and without dropout padding is left out and shared beginnings within a "group" are computed once.
    """
    params = cast(params, dtype)
    dense = (
        "lengths" not in batch or "segments" in batch or "positions" in batch or (key is not None and config.dropout)
    )
    output = apply(
        params,
        buffers,
        batch["tokens"],
        config=config,
        positions=batch.get("positions"),
        segments=batch.get("segments"),
        layout=None if dense else layout(batch["tokens"], batch["lengths"], batch.get("group")),
        key=key,
        block=block,
    )
    return output.hidden, unembedding(params)


def unembedding(params: Params) -> Tensor:
    """The output matrix `[V, D]`: the embedding itself where tied."""
    return params["unembed"] if "unembed" in params else params["embed"]


def unembed(params: Params, hidden: Tensor) -> Tensor:
    """Logits `[..., V]` of hidden states, in their dtype."""
    return F.linear(hidden, unembedding(params))
