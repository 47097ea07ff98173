"""Weights in and out: Hugging Face folders, hub ids and GGUF files to `(Config, Params)`, and back to a folder.

Weights are read from safetensors and GGUF alone; nothing is unpickled and no remote code runs.
"""

import contextlib
import ctypes
import dataclasses
import json
import math
import os
import re
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fncore import nn, tree
from fncore.errors import UserError
from fncore.models.decoder import Config, Params, map_shapes

# What each family's config class assumes where config.json is silent; None: follows from the other sizes.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": None, "max_position_embeddings": 2048},
    "mistral": {"num_key_value_heads": 8, "max_position_embeddings": 131_072, "sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32, "max_position_embeddings": 32_768, "sliding_window": 4096},
    "qwen3": {
        "num_key_value_heads": 32,
        "max_position_embeddings": 32_768,
        "sliding_window": 4096,
        "head_dim": 128,
    },
    "minimind": {
        "num_key_value_heads": 4,
        "max_position_embeddings": 32_768,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
    },
}
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
SUPPORTED = ", ".join(FAMILIES)

_TOP_NAMES = {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "unembed": "lm_head.weight"}
_LAYER_NAMES = {
    "attention_norm": "input_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    **{f"attention.{part}": f"self_attn.{part}_proj.weight" for part in "qkvo"},
    **{f"attention.{part}_bias": f"self_attn.{part}_proj.bias" for part in "qkvo"},
    **{f"attention.{part}_norm": f"self_attn.{part}_norm.weight" for part in "qk"},
    **{f"mlp.{part}": f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")},
}
_GGUF_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_GGUF_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_output": "self_attn.o_proj",
    **{f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"},
    **{f"attn_{part}_norm": f"self_attn.{part}_norm" for part in "qk"},
    **{f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
}
_HUB_FILES = ["*.safetensors", "*.json", "tokenizer*", "*.jinja", "vocab.txt", "merges.txt"]


# --- names and weights ---


def hf_name(path: str) -> str:
    """The Hugging Face key of a parameter's dotted path: `layers.0.mlp.up` is `model.layers.0.mlp.up_proj.weight`."""
    if path in _TOP_NAMES:
        return _TOP_NAMES[path]
    _, index, rest = path.split(".", 2)
    return f"model.layers.{index}.{_LAYER_NAMES[rest]}"


def from_state_dict(state: Mapping[str, Tensor], config: Config) -> Params:
    """The parameter tree of a Hugging Face state dict. The tensors are shared with `state`, not copied.

    Of a tied model, `lm_head.weight` may be absent, or present with the bits of the embedding; rotary tables are
    ignored. Raises `UserError` with every missing, unexpected and misshapen key.
    """
    state = {name: tensor for name, tensor in state.items() if not name.endswith("rotary_emb.inv_freq")}
    if config.tie_word_embeddings and "lm_head.weight" in state:
        head, embed = state.pop("lm_head.weight"), state.get("model.embed_tokens.weight")
        if embed is not None and not _same_bits(head, embed):
            raise UserError(
                "tie_word_embeddings is true, but lm_head.weight differs from model.embed_tokens.weight: "
                "set it to false to keep both"
            )
    expected = {hf_name(path): shape for path, shape in _shapes(config).items()}
    _check_keys({name: tuple(tensor.shape) for name, tensor in state.items()}, expected, "the weights")
    return map_shapes(lambda path, _: state[hf_name(path)], config)


def to_state_dict(params: Params, config: Config) -> dict[str, Tensor]:
    """Parameters under their Hugging Face keys, sharing the tensors; a tied embedding stands once, with no lm_head.

    Raises `UserError` with every path that the config lacks, needs, or gives another shape.
    """
    leaves = dict(tree.named_leaves(params))
    _check_keys({path: tuple(leaf.shape) for path, leaf in leaves.items()}, _shapes(config), "the parameters")
    return {hf_name(path): leaf for path, leaf in leaves.items()}


def _shapes(config: Config) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    map_shapes(found.setdefault, config)
    return found


def _same_bits(left: Tensor, right: Tensor) -> bool:
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


def _check_keys(found: dict[str, tuple[int, ...]], expected: dict[str, tuple[int, ...]], what: str) -> None:
    problems = {
        "missing": [key for key in expected if key not in found],
        "unexpected": [key for key in found if key not in expected],
        "wrong shape": [
            f"{key} (found {list(found[key])}, expected {list(shape)})"
            for key, shape in expected.items()
            if key in found and found[key] != shape
        ],
    }
    if any(problems.values()):
        listed = "; ".join(f"{kind}: {', '.join(keys)}" for kind, keys in problems.items() if keys)
        raise UserError(f"{what} don't fit the config: {listed}")


# --- config.json ---


def config_from_hf(raw: Mapping[str, Any]) -> Config:
    """The `Config` of a config.json's content, of model type llama, mistral, qwen2, qwen3 or minimind (dense).

    What is absent takes the default of the family's class in `transformers`. RoPE is read from `rope_parameters`
    (transformers 5) or from `rope_theta` and `rope_scaling`. Raises `UserError` for what the decoder can't compute.
    """
    family = raw.get("model_type")
    if family not in FAMILIES:
        raise UserError(f"config.json: model_type {family!r} is not supported (supported: {SUPPORTED})")
    raw = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "rope_theta": 10_000.0, **FAMILIES[family], **raw}
    _refuse(raw, "hidden_act", "silu")
    _refuse(raw, "mlp_bias", False)
    _refuse(raw, "use_moe", False)
    _refuse(raw, "inference_rope_scaling", False)
    _refuse(raw, "partial_rotary_factor", 1.0)
    _refuse(raw, "quantization_config", None)
    heads, layers = _integer(raw, "num_attention_heads"), _integer(raw, "num_hidden_layers")
    theta, scaling = _rope(raw)
    bias = family in ("llama", "qwen3") and bool(raw.get("attention_bias"))
    try:
        return Config(
            vocab_size=_integer(raw, "vocab_size"),
            hidden_size=_integer(raw, "hidden_size"),
            intermediate_size=_integer(raw, "intermediate_size"),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=_integer(raw, "num_key_value_heads", heads),
            head_dim=_integer(raw, "head_dim", _integer(raw, "hidden_size") // heads),
            rms_norm_eps=float(raw["rms_norm_eps"]),
            rope_theta=theta,
            rope_scaling=scaling,
            max_position_embeddings=_integer(raw, "max_position_embeddings"),
            tie_word_embeddings=bool(raw["tie_word_embeddings"]),
            qk_norm=family in ("qwen3", "minimind"),
            qkv_bias=family == "qwen2" or bias,
            output_bias=bias,
            windows=_windows(raw, layers),
        )
    except ValueError as error:
        raise UserError(f"config.json: {error}") from error


def _refuse(raw: Mapping[str, Any], key: str, only: Any) -> None:
    value = raw.get(key)
    if value is not None and value != only:
        hint = f"only {only!r} is" if only is not None else "quantised weights are not"
        raise UserError(f"config.json: {key} {value!r} is not supported ({hint})")


def _integer(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = raw.get(key)
    value = default if value is None else value
    if value is None:
        raise UserError(f"config.json: {key} is missing")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(f"config.json: {key} must be a positive integer, not {value!r}")
    return value


def _rope(raw: Mapping[str, Any]) -> tuple[float, nn.Llama3Scaling | None]:
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if any(isinstance(value, dict) for value in rope.values()):
        raise UserError("config.json: RoPE parameters that differ by layer type are not supported")
    _refuse(rope, "partial_rotary_factor", 1.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    theta = float(rope.get("rope_theta", raw["rope_theta"]))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise UserError(f"config.json: RoPE scaling {kind!r} is not supported (supported: default, llama3)")
    rope = {"original_max_position_embeddings": raw["max_position_embeddings"], **rope}
    fields = [field.name for field in dataclasses.fields(nn.Llama3Scaling)]
    if missing := [field for field in fields if rope.get(field) is None]:
        raise UserError(f"config.json: llama3 RoPE scaling lacks {', '.join(missing)}")
    return theta, nn.Llama3Scaling(**{field: rope[field] for field in fields})


def _windows(raw: Mapping[str, Any], layers: int) -> tuple[int | None, ...] | None:
    family, size = raw["model_type"], raw.get("sliding_window")
    if family == "mistral":
        return None if size is None else (_integer(raw, "sliding_window"),) * layers
    if family not in ("qwen2", "qwen3"):
        return None
    used = bool(raw.get("use_sliding_window")) and size is not None
    kinds = raw.get("layer_types")
    if kinds is None:
        first = raw.get("max_window_layers", 28) if used else layers
        kinds = ["sliding_attention" if index >= first else "full_attention" for index in range(layers)]
    if unknown := sorted(set(kinds) - {"full_attention", "sliding_attention"}):
        raise UserError(f"config.json: layer type {unknown[0]!r} is not supported (full_attention, sliding_attention)")
    if "sliding_attention" not in kinds:
        return None
    if not used:
        raise UserError("config.json: layer_types has sliding_attention, but use_sliding_window or its size is not set")
    window = _integer(raw, "sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def config_to_hf(
    config: Config,
    *,
    dtype: torch.dtype = torch.float32,
    eos_token_id: int | list[int] | None = None,
    bos_token_id: int | None = None,
    pad_token_id: int | None = None,
) -> dict[str, Any]:
    """The content of config.json, as the family that computes the same function. Undone by `config_from_hf`, but for
    `dropout`, which such a file has no place for.

    Raises `UserError` naming the field that no family has.
    """
    family = _family(config)
    name = str(dtype).removeprefix("torch.")
    rope: dict[str, Any] = {"rope_type": "default"}
    if config.rope_scaling is not None:
        rope = {"rope_type": "llama3", **dataclasses.asdict(config.rope_scaling)}
    raw: dict[str, Any] = {
        "model_type": family,
        "architectures": [ARCHITECTURES[family]],
        "dtype": name,
        "torch_dtype": name,  # transformers 4 and the servers built on it know the older spellings only
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_parameters": {"rope_theta": config.rope_theta, **rope},
        "rope_theta": config.rope_theta,
        "rope_scaling": None if config.rope_scaling is None else rope,
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": bos_token_id,
        "eos_token_id": eos_token_id,
        "pad_token_id": pad_token_id,
    }
    if family in ("llama", "qwen3"):
        raw["attention_bias"] = config.qkv_bias
    if family == "llama":
        raw["mlp_bias"] = False
    sizes = _window_sizes(config)
    if family == "mistral":
        raw["sliding_window"] = next(iter(sizes), None)
    elif family != "llama":
        windows = config.windows or (None,) * config.num_hidden_layers
        kinds = ["full_attention" if window is None else "sliding_attention" for window in windows]
        raw["use_sliding_window"] = bool(sizes)
        raw["sliding_window"] = next(iter(sizes), None)
        raw["max_window_layers"] = kinds.index("sliding_attention") if sizes else config.num_hidden_layers
        raw["layer_types"] = kinds
    return raw


def _window_sizes(config: Config) -> set[int]:
    return {window for window in config.windows or () if window is not None}


def _family(config: Config) -> str:
    sizes = _window_sizes(config)
    if len(sizes) > 1:
        raise UserError(f"windows of different sizes {sorted(sizes)} fit no Hugging Face family")
    if config.qk_norm:
        if config.qkv_bias != config.output_bias:
            raise UserError("qk_norm with only one of qkv_bias and output_bias fits no Hugging Face family")
        return "qwen3"
    if config.qkv_bias and not config.output_bias:
        return "qwen2"
    if config.output_bias:
        if not config.qkv_bias:
            raise UserError("output_bias without qkv_bias fits no Hugging Face family")
        if sizes:
            raise UserError("windows together with output_bias, without qk_norm, fit no Hugging Face family")
    elif sizes:
        if None in (config.windows or ()):
            raise UserError("windows on some layers only, without qk_norm or qkv_bias, fit no Hugging Face family")
        return "mistral"
    if config.hidden_size % config.num_attention_heads == 0:
        return "llama"
    if config.output_bias:
        raise UserError("output_bias with a hidden_size that num_attention_heads does not divide fits no family")
    return "mistral"  # the same function as Llama, but without the check that heads divide the width


# --- reading ---


def resolve(model: str) -> Path:
    """The folder or `.gguf` file that `model` names; a hub id is downloaded first (weights, configs, tokenizer).

    Raises `UserError` where there is neither.
    """
    path = Path(model).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    if path.is_file():
        raise UserError(f"{model}: neither a model folder nor a .gguf file")
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", model) or path.suffix == ".gguf":
        raise UserError(f"{model}: no such folder or file")
    from huggingface_hub import snapshot_download

    try:
        # Folders inside a repository hold the same weights in other formats.
        return Path(
            snapshot_download(model, allow_patterns=_HUB_FILES, ignore_patterns=["*/*", "consolidated*.safetensors"])
        )
    except Exception as error:  # the hub's client lets errors of several HTTP libraries through
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"{model}: no such folder, and the Hugging Face hub failed ({reason})") from error


def load(
    model: str, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", dropout: float = 0.0
) -> tuple[Config, Params]:
    """A model's config and parameters, from a Hugging Face folder, a hub id or a `.gguf` file.

    The parameters are contiguous copies in `dtype` on `device`; nothing of the file stays mapped. `dropout` goes into
    the config, since model files don't state one. Raises `UserError` for what can't be found, read or computed.
    """
    path = resolve(str(model))
    mapped = path.is_dir()  # safetensors' tensors lie in the file itself; dequantised ones are new
    tensors: Iterable[tuple[str, Tensor]]
    if mapped:
        raw, tensors = _read_json(path / "config.json"), _read_safetensors(path)
    else:
        raw, tensors = _read_gguf(path)
    try:
        config = config_from_hf(raw)
        state = {name: tensor.to(device, dtype, copy=mapped).contiguous() for name, tensor in tensors}
        params = from_state_dict(state, config)
    except UserError as error:
        raise UserError(f"{model}: {error}") from error
    return dataclasses.replace(config, dropout=dropout), params


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{file}: can't be read ({error.strerror})") from error
    except ValueError as error:
        raise UserError(f"{file}: not JSON ({error})") from error
    if not isinstance(content, dict):
        raise UserError(f"{file}: expected a JSON object")
    return content


def _read_safetensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    from safetensors import SafetensorError, safe_open

    for file in _weight_files(folder):
        try:
            with safe_open(file, framework="pt") as weights:
                for name in weights.keys():  # noqa: SIM118 - not a mapping
                    yield name, weights.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise UserError(f"{file.name}: not a readable safetensors file ({error})") from error


def _weight_files(folder: Path) -> list[Path]:
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if index.is_file():
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise UserError(f"{index}: no weight_map")
        names = sorted(set(weight_map.values()))
        if missing := [name for name in names if Path(name).name != name or not (folder / name).is_file()]:
            raise UserError(f"files named in {index.name} are missing: {', '.join(missing)}")
        return [folder / name for name in names]
    if any(folder.glob("*.bin")) or any(folder.glob("*.pth")):
        raise UserError(
            "no model.safetensors, only pickled weights, which are not read because unpickling runs code: "
            "convert them to safetensors first (transformers' save_pretrained writes it)"
        )
    raise UserError("no model.safetensors and no model.safetensors.index.json in the folder")


def _read_gguf(file: Path) -> tuple[dict[str, Any], Iterator[tuple[str, Tensor]]]:
    """A GGUF file as the content of a config.json and a state dict with Hugging Face's keys."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(file)
    except (ValueError, IndexError, OSError) as error:
        raise UserError(f"{file}: not a readable GGUF file ({error})") from error

    def field(name: str) -> Any:
        found = reader.get_field(name)
        return None if found is None else found.contents()

    family = field("general.architecture")
    if family not in ("llama", "qwen2", "qwen3"):
        raise UserError(f"{file}: GGUF architecture {family!r} is not supported (supported: llama, qwen2, qwen3)")
    get = lambda name: field(f"{family}.{name}")
    shape = {tensor.name: [int(size) for size in reversed(tensor.shape)] for tensor in reader.tensors}
    width, heads = get("embedding_length"), get("attention.head_count")
    if not isinstance(width, int) or not isinstance(heads, int) or "token_embd.weight" not in shape:
        raise UserError(f"{file}: lacks embedding_length, one attention.head_count, or token_embd.weight")
    head_dim = get("attention.key_length") or get("rope.dimension_count") or width // heads
    if get("rope.dimension_count") not in (None, head_dim):
        raise UserError(f"{file}: partial rotary embeddings are not supported")
    if get("rope.scaling.type") not in (None, "none"):
        raise UserError(f"{file}: RoPE scaling {get('rope.scaling.type')!r} is not supported")
    if "rope_freqs.weight" in shape:
        raise UserError(f"{file}: RoPE scaling by rope_freqs is not supported: load the model's safetensors folder")
    raw = {
        "model_type": family,
        "vocab_size": shape["token_embd.weight"][0],
        "hidden_size": width,
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv"),
        "head_dim": head_dim,
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "rope_theta": get("rope.freq_base") or 10_000.0,
        "max_position_embeddings": get("context_length"),
        "tie_word_embeddings": "output.weight" not in shape,
        "attention_bias": "blk.0.attn_q.bias" in shape,
    }
    return raw, _gguf_tensors(reader, family, raw)


def _gguf_tensors(reader: Any, family: str, raw: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    from gguf import dequantize

    for tensor in reader.tensors:
        name = _GGUF_TOP_NAMES.get(tensor.name, tensor.name)
        if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", tensor.name):
            index, part, kind = match.groups()
            if part in _GGUF_LAYER_NAMES:
                name = f"model.layers.{index}.{_GGUF_LAYER_NAMES[part]}.{kind}"
        try:
            array = dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise UserError(f"{tensor.name}: quantisation {tensor.tensor_type.name} is not supported") from error
        value = torch.from_numpy(array if array.flags.writeable else array.copy())
        if family == "llama" and ".self_attn.q_proj." in name:
            value = _unpermute(value, raw["num_attention_heads"])
        elif family == "llama" and ".self_attn.k_proj." in name:
            value = _unpermute(value, raw["num_key_value_heads"] or raw["num_attention_heads"])
        yield name, value


def _unpermute(weight: Tensor, heads: int) -> Tensor:
    """llama.cpp rotates neighbouring channels, so its Llama files interleave the two halves of each head."""
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(weight.shape)


# --- writing ---


def save(
    folder: str | os.PathLike[str],
    params: Params,
    config: Config,
    *,
    tokenizer: Any = None,
    generation: dict[str, Any] | None = None,
    card: str | None = None,
    replace: bool = False,
) -> None:
    """Write a folder that `transformers` loads: config.json, model.safetensors (the parameters' own dtypes),
    generation_config.json, the tokenizer's files and README.md.

    `generation` adds to, or overrides, what the tokenizer states (`eos_token_id`, `bos_token_id`, `pad_token_id`).
    The folder appears whole or not at all: it is written beside its place, synced and renamed. An existing model is
    replaced only with `replace=True`, and removed once the new one stands. Raises `UserError` for a folder that is
    taken, a config that fits no family, and parameters that don't fit the config.
    """
    from safetensors.torch import save_file

    place = Path(folder).expanduser().resolve()
    _check_place(place, replace)
    state = {name: leaf.detach().cpu().contiguous() for name, leaf in to_state_dict(params, config).items()}
    dtype = state["model.embed_tokens.weight"].dtype
    for leaf in state.values():
        dtype = torch.promote_types(dtype, leaf.dtype)
    special = {name: getattr(tokenizer, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    generation = {name: value for name, value in {**special, **(generation or {})}.items() if value is not None}
    raw = config_to_hf(config, dtype=dtype, **{name: generation.get(name) for name in special})

    place.parent.mkdir(parents=True, exist_ok=True)
    draft = place.with_name(f".{place.name}.{uuid.uuid4().hex}")
    draft.mkdir()
    try:
        if tokenizer is not None:
            tokenizer.save_pretrained(draft)
        save_file(state, draft / "model.safetensors", metadata={"format": "pt"})
        _write_json(draft / "config.json", raw)
        (draft / "model.safetensors").chmod((draft / "config.json").stat().st_mode)  # safetensors makes it private
        _write_json(draft / "generation_config.json", generation)
        (draft / "README.md").write_text(_card(config, raw) if card is None else card, encoding="utf-8")
        for path in (*draft.rglob("*"), draft):
            _sync(path)
        _put(draft, place)
    finally:
        # After a swap this is the folder that was replaced; after a failure, what was written so far.
        shutil.rmtree(draft, ignore_errors=True)


def _check_place(place: Path, replace: bool) -> None:
    if not place.exists():
        return
    if not place.is_dir():
        raise UserError(f"{place}: exists and is not a folder")
    if any(place.iterdir()):
        if not replace:
            raise UserError(f"{place}: exists already (replace=True replaces it)")
        if not (place / "config.json").is_file():
            raise UserError(f"{place}: not replaced, since it holds no model (no config.json)")


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _card(config: Config, raw: Mapping[str, Any]) -> str:
    count = sum(math.prod(shape) for shape in _shapes(config).values())
    return (
        "---\nlibrary_name: transformers\npipeline_tag: text-generation\n---\n\n"
        f"# A {raw['model_type']} language model\n\n"
        f"{count:,} parameters, {config.num_hidden_layers} layers of width {config.hidden_size}, "
        f"vocabulary {config.vocab_size:,}, {raw['dtype']}. Trained with fncore.\n"
    )


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _put(draft: Path, place: Path) -> None:
    """Move `draft` to `place`; what stood there ends up at `draft`."""
    if not place.exists():
        draft.rename(place)
    elif not _exchange(draft, place):
        old = draft.with_name(f"{place.name}.old-{draft.name[-8:]}")  # visible, so that a crash here loses nothing
        place.rename(old)
        try:
            draft.rename(place)
        except OSError:
            old.rename(place)
            raise
        old.rename(draft)
    with contextlib.suppress(OSError):  # some file systems can't sync a folder
        _sync(place.parent)


def _exchange(left: Path, right: Path) -> bool:
    """Swap two paths in one step where the system can (Linux `renameat2`), so that no moment has neither."""
    try:
        swap = ctypes.CDLL(None).renameat2
    except (OSError, AttributeError, TypeError):
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return swap(here, os.fsencode(left), here, os.fsencode(right), exchange) == 0
