"""Weights in and out: Hugging Face folders, hub ids and GGUF files to `(Config, Params)`, and back to a folder.

Weights are read from safetensors and GGUF alone; nothing is unpickled and no remote code runs.
"""

import dataclasses
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fncore import nn, tree
from fncore.errors import UserError, shorten
from fncore.folder import whole
from fncore.models import gguf
from fncore.models.decoder import Config, Params, map_shapes

# What each family's config class assumes where config.json is silent; None: follows from the other sizes.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": None, "max_position_embeddings": 2048},
    "mistral": {"num_key_value_heads": 8, "max_position_embeddings": 131_072, "sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32, "max_position_embeddings": 32_768, "sliding_window": 4096},
    "qwen3": {"num_key_value_heads": 32, "max_position_embeddings": 32_768, "sliding_window": 4096, "head_dim": 128},
    "minimind": {
        "num_key_value_heads": 4,
        "max_position_embeddings": 32_768,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
    },
}
# Families to write, the preferred first. `transformers` knows no minimind, which is written as the qwen3 that it is.
WRITTEN = ("llama", "mistral", "qwen2", "qwen3")
# Settings of which the decoder computes one value only; absent or null is that value.
_ONLY = {
    "hidden_act": "silu",
    "mlp_bias": False,
    "use_moe": False,
    "inference_rope_scaling": False,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
}
_TOP_NAMES = {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "unembed": "lm_head.weight"}
_LAYER_NAMES = {
    "attention_norm": "input_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    **{f"attention.{part}": f"self_attn.{part}_proj.weight" for part in "qkvo"},
    **{f"attention.{part}_bias": f"self_attn.{part}_proj.bias" for part in "qkvo"},
    **{f"attention.{part}_norm": f"self_attn.{part}_norm.weight" for part in "qk"},
    **{f"mlp.{part}": f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")},
}
_SIZES = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
    "max_position_embeddings"
).split()
# Beyond these a number is a mistake that would fill the memory before anything else could refuse it.
_MOST = {"max_position_embeddings": 2**24, "num_hidden_layers": 2**12}
_HUB_FILES = ["*.safetensors", "*.json", "tokenizer*", "*.jinja", "vocab.txt", "merges.txt"]
_HUB_COPIES = ["*/*", "consolidated*.safetensors"]  # the same weights in other formats


# --- names and weights ---


def hf_name(path: str) -> str:
    """The Hugging Face key of a parameter's dotted path: `layers.0.mlp.up` is `model.layers.0.mlp.up_proj.weight`."""
    if path in _TOP_NAMES:
        return _TOP_NAMES[path]
    _, index, rest = path.split(".", 2)
    return f"model.layers.{index}.{_LAYER_NAMES[rest]}"


def from_state_dict(state: Mapping[str, Tensor], config: Config) -> Params:
    """The parameter tree of a Hugging Face state dict. The tensors are shared with `state`, not copied.

    Of a tied model, `lm_head.weight` may be absent, or present and equal to the embedding; rotary tables are
    ignored. Raises `UserError` with every missing, unexpected and misshapen key.
    """
    state = {name: tensor for name, tensor in state.items() if not name.endswith("rotary_emb.inv_freq")}
    if config.tie_word_embeddings and "lm_head.weight" in state:
        head = state.pop("lm_head.weight")
        embed = state.get("model.embed_tokens.weight", head)
        if head.shape != embed.shape or not torch.equal(head, embed.to(head.dtype)):
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
    if not isinstance(family, str) or family not in FAMILIES:
        raise UserError(f"config.json: model_type {family!r} is not supported (supported: {', '.join(FAMILIES)})")
    raw = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "rope_theta": 10_000.0, **FAMILIES[family], **raw}
    for key, only in _ONLY.items():
        _refuse(raw, key, only)
    heads = _integer(raw, "num_attention_heads")
    defaults = {"num_key_value_heads": heads, "head_dim": _integer(raw, "hidden_size") // heads}
    sizes = {name: _integer(raw, name, defaults.get(name)) for name in _SIZES}
    for key, most in _MOST.items():
        if sizes[key] > most:
            raise UserError(f"config.json: {key} {sizes[key]} is not supported ({most} at most)")
    theta, scaling = _rope(raw)
    bias = family in ("llama", "qwen3") and _switch(raw, "attention_bias")
    try:
        return Config(
            **sizes,
            rms_norm_eps=float(_number(raw, "rms_norm_eps")),
            rope_theta=theta,
            rope_scaling=scaling,
            tie_word_embeddings=_switch(raw, "tie_word_embeddings"),
            qk_norm=family in ("qwen3", "minimind"),
            qkv_bias=family == "qwen2" or bias,
            output_bias=bias,
            windows=_windows(raw, sizes["num_hidden_layers"]),
        )
    except ValueError as error:
        raise UserError(f"config.json: {error}") from error


def _refuse(raw: Mapping[str, Any], key: str, only: Any) -> None:
    value = raw.get(key)
    if value is not None and value != only:
        hint = f"only {only!r} is" if only is not None else "quantised weights are not"
        raise UserError(f"config.json: {key} {value!r} is not supported ({hint})")


def _integer(raw: Mapping[str, Any], key: str, default: int | None = None, *, least: int = 1) -> int:
    value = raw.get(key)
    value = default if value is None else value
    if value is None:
        raise UserError(f"config.json: {key} is missing")
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        kind = "a positive integer" if least == 1 else f"an integer of {least} or more"
        raise UserError(f"config.json: {key} must be {kind}, not {shorten(value)}")
    return value


def _number(raw: Mapping[str, Any], key: str) -> Any:
    value = raw[key]
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= sys.float_info.max:
        raise UserError(f"config.json: {key} must be a positive number, not {shorten(value)}")
    return value


def _switch(raw: Mapping[str, Any], key: str) -> bool:
    value = raw.get(key)
    if value not in (None, False, True):
        raise UserError(f"config.json: {key} must be true or false, not {shorten(value)}")
    return bool(value)


def _rope(raw: Mapping[str, Any]) -> tuple[float, nn.Llama3Scaling | None]:
    key = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    rope = raw.get(key) or {}
    if not isinstance(rope, dict):
        raise UserError(f"config.json: {key} must be an object, not {shorten(rope)}")
    if any(isinstance(value, dict) for value in rope.values()):
        raise UserError("config.json: RoPE parameters that differ by layer type are not supported")
    _refuse(rope, "partial_rotary_factor", 1.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    theta = float(_number({"rope_theta": raw["rope_theta"], **rope}, "rope_theta"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise UserError(f"config.json: RoPE scaling {kind!r} is not supported (supported: default, llama3)")
    rope = {"original_max_position_embeddings": raw["max_position_embeddings"], **rope}
    fields = [field.name for field in dataclasses.fields(nn.Llama3Scaling)]
    if missing := [field for field in fields if rope.get(field) is None]:
        raise UserError(f"config.json: llama3 RoPE scaling lacks {', '.join(missing)}")
    return theta, nn.Llama3Scaling(**{field: _number(rope, field) for field in fields})


def _windows(raw: Mapping[str, Any], layers: int) -> tuple[int | None, ...] | None:
    family, size = raw["model_type"], raw.get("sliding_window")
    if family == "mistral":
        return None if size is None else (_integer(raw, "sliding_window"),) * layers
    if family not in ("qwen2", "qwen3"):
        return None
    used = _switch(raw, "use_sliding_window") and size is not None
    kinds = raw.get("layer_types")
    if kinds is None:
        first = _integer(raw, "max_window_layers", 28, least=0) if used else layers
        kinds = ["sliding_attention" if index >= first else "full_attention" for index in range(layers)]
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        raise UserError(f"config.json: layer_types must be a list of names, not {shorten(kinds)}")
    if unknown := sorted(set(kinds) - {"full_attention", "sliding_attention"}):
        raise UserError(f"config.json: layer type {unknown[0]!r} is not supported (full_attention, sliding_attention)")
    if "sliding_attention" not in kinds:
        return None
    if not used:
        raise UserError("config.json: layer_types has sliding_attention, but use_sliding_window or its size is not set")
    window = _integer(raw, "sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def config_to_hf(config: Config, *, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """The content of config.json, as the family that computes the same function. Undone by `config_from_hf`, but for
    `dropout`, which such a file has no place for.

    Raises `UserError` where no family has this mix of biases, norms and windows.
    """
    windows = config.windows if any(config.windows or ()) else None
    config = dataclasses.replace(config, dropout=0.0, windows=windows)
    divides = config.hidden_size % config.num_attention_heads == 0
    for family in WRITTEN:
        raw = _raw(config, family, str(dtype).removeprefix("torch."))
        if config_from_hf(raw) == config and (divides or family != "llama"):  # transformers checks it of Llama alone
            return raw
    raise UserError(
        f"no Hugging Face family has qk_norm={config.qk_norm}, qkv_bias={config.qkv_bias}, "
        f"output_bias={config.output_bias}, windows={windows}, and num_attention_heads that "
        f"{'divide' if divides else 'do not divide'} hidden_size, together"
    )


def _raw(config: Config, family: str, dtype: str) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default"}
    if config.rope_scaling is not None:
        rope = {"rope_type": "llama3", **dataclasses.asdict(config.rope_scaling)}
    windows = config.windows or (None,) * config.num_hidden_layers
    window = next(filter(None, windows), None)
    kinds = ["full_attention" if size is None else "sliding_attention" for size in windows]
    sliding: dict[str, Any] = {}
    if family == "mistral":
        sliding = {"sliding_window": window}
    elif family != "llama":
        first = config.num_hidden_layers if window is None else kinds.index("sliding_attention")
        sliding = {"use_sliding_window": window is not None, "sliding_window": window}
        sliding |= {"max_window_layers": first, "layer_types": kinds}
    return {
        "model_type": family,
        "architectures": [f"{family.capitalize()}ForCausalLM"],
        "dtype": dtype,
        "torch_dtype": dtype,  # transformers 4 and the servers built on it know the older spellings only
        **{name: getattr(config, name) for name in (*_SIZES, "rms_norm_eps", "tie_word_embeddings")},
        "hidden_act": "silu",
        "rope_parameters": {"rope_theta": config.rope_theta, **rope},
        "rope_theta": config.rope_theta,
        "rope_scaling": None if config.rope_scaling is None else rope,
        **({"attention_bias": config.qkv_bias} if family in ("llama", "qwen3") else {}),
        **({"mlp_bias": False} if family == "llama" else {}),
        **sliding,
    }


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
        return Path(snapshot_download(model, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_COPIES))
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
        raw, tensors = read_json(path / "config.json"), _read_safetensors(path)
    else:
        raw, tensors = gguf.read(path)
    try:
        config = config_from_hf(raw)
        state = {name: tensor.to(device, dtype, copy=mapped).contiguous() for name, tensor in tensors}
        params = from_state_dict(state, config)
    except UserError as error:
        raise UserError(f"{model}: {error}") from error
    return dataclasses.replace(config, dropout=dropout), params


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises `UserError`, with the file's path, where there is none."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{file}: can't be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file}: not JSON ({error})") from error
    if not isinstance(content, dict):
        raise UserError(f"{file}: expected a JSON object, not {shorten(content)}")
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
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise UserError(f"{index}: no weight_map")
        if odd := [name for name in weight_map.values() if not isinstance(name, str)]:
            raise UserError(f"{index}: weight_map must give names of files, not {shorten(odd[0])}")
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
    generation_config.json, the tokenizer's files, and `card` as README.md.

    `generation` adds to, or overrides, what the tokenizer states (`eos_token_id`, `bos_token_id`, `pad_token_id`).
    The folder appears whole or not at all. An existing model is replaced only with `replace=True`, and removed once the
    new one stands. Raises `UserError` for a folder that is taken, a config that fits no family, and parameters that
    don't fit the config.
    """
    from safetensors.torch import save_file

    place = Path(folder).expanduser().resolve()
    _check_place(place, replace)
    state = {name: leaf.detach().cpu().contiguous() for name, leaf in to_state_dict(params, config).items()}
    dtype = reduce(torch.promote_types, (leaf.dtype for leaf in state.values()))
    special = {name: getattr(tokenizer, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    generation = {name: value for name, value in {**special, **(generation or {})}.items() if value is not None}
    raw = config_to_hf(config, dtype=dtype) | {name: generation.get(name) for name in special}
    with whole(place) as draft:
        if tokenizer is not None:
            tokenizer.save_pretrained(draft)
        save_file(state, draft / "model.safetensors", metadata={"format": "pt"})
        _write_json(draft / "config.json", raw)
        (draft / "model.safetensors").chmod((draft / "config.json").stat().st_mode)  # safetensors makes it private
        _write_json(draft / "generation_config.json", generation)
        if card is not None:
            (draft / "README.md").write_text(card, encoding="utf-8")


def _check_place(place: Path, replace: bool) -> None:
    if place.exists() and not place.is_dir():
        raise UserError(f"{place}: exists and is not a folder")
    if place.exists() and any(place.iterdir()):
        if not replace:
            raise UserError(f"{place}: exists already (replace=True replaces it)")
        if not (place / "config.json").is_file():
            raise UserError(f"{place}: not replaced, since it holds no model (no config.json)")


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
