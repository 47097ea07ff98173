"""GGUF files (llama.cpp's format), read as the content of a config.json and a state dict with Hugging Face's keys."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fncore.errors import UserError

FAMILIES = ("llama", "qwen2", "qwen3")

_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_output": "self_attn.o_proj",
    **{f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"},
    **{f"attn_{part}_norm": f"self_attn.{part}_norm" for part in "qk"},
    **{f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
}


def read(file: Path) -> tuple[dict[str, Any], Iterator[tuple[str, Tensor]]]:
    """The config and the named weights, dequantised as they are taken. Raises `UserError` for what can't be read."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(file)
    except (ValueError, IndexError, OSError) as error:
        raise UserError(f"{file}: not a readable GGUF file ({error})") from error
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("tokenizer.")}
    shapes = {tensor.name: [int(size) for size in reversed(tensor.shape)] for tensor in reader.tensors}
    try:
        raw = _config(fields, shapes)
    except UserError as error:
        raise UserError(f"{file}: {error}") from error
    return raw, _tensors(reader, raw)


def _config(fields: dict[str, Any], shapes: dict[str, list[int]]) -> dict[str, Any]:
    family = fields.get("general.architecture")
    if family not in FAMILIES:
        raise UserError(f"GGUF architecture {family!r} is not supported (supported: {', '.join(FAMILIES)})")
    get = lambda name: fields.get(f"{family}.{name}")
    width, heads, rotated = get("embedding_length"), get("attention.head_count"), get("rope.dimension_count")
    if not isinstance(width, int) or not isinstance(heads, int) or "token_embd.weight" not in shapes:
        raise UserError("lacks embedding_length, one attention.head_count, or token_embd.weight")
    head_dim = get("attention.key_length") or rotated or width // heads
    if rotated not in (None, head_dim):
        raise UserError("partial rotary embeddings are not supported")
    if get("rope.scaling.type") not in (None, "none"):
        raise UserError(f"RoPE scaling {get('rope.scaling.type')!r} is not supported")
    if "rope_freqs.weight" in shapes:
        raise UserError("RoPE scaling by rope_freqs is not supported: load the model's safetensors folder")
    return {
        "model_type": family,
        "vocab_size": shapes["token_embd.weight"][0],
        "hidden_size": width,
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv") or heads,
        "head_dim": head_dim,
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "rope_theta": get("rope.freq_base") or 10_000.0,
        "max_position_embeddings": get("context_length"),
        "tie_word_embeddings": "output.weight" not in shapes,
        "attention_bias": "blk.0.attn_q.bias" in shapes,
    }


def _tensors(reader: Any, raw: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    from gguf import dequantize

    interleaved = {"attn_q": raw["num_attention_heads"], "attn_k": raw["num_key_value_heads"]}
    for tensor in reader.tensors:
        try:
            array = dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise UserError(f"{tensor.name}: quantisation {tensor.tensor_type.name} is not supported") from error
        value = torch.from_numpy(array if array.flags.writeable else array.copy())
        name = _TOP_NAMES.get(tensor.name, tensor.name)
        match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", tensor.name)
        if match and match[2] in _LAYER_NAMES:
            name = f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"
            if raw["model_type"] == "llama" and match[2] in interleaved:
                value = _unpermute(value, interleaved[match[2]])
        yield name, value


def _unpermute(weight: Tensor, heads: int) -> Tensor:
    """llama.cpp rotates neighbouring channels, so its Llama files interleave the two halves of each head."""
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(weight.shape)
