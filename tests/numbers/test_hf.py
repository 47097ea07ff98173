"""Weights in and out, against `transformers` as the reference implementation."""

import dataclasses
import json

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from fncore import random, tree
from fncore.errors import UserError
from fncore.models import decoder, hf
from fncore.nn import Llama3Scaling
from fncore.text.tokenizer import load_tokenizer

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
SLIDING = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
FAMILIES = {
    "llama": ("llama", {}),
    "llama-bias": ("llama", {"attention_bias": True}),
    "llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama3-legacy": ("llama", {"rope_scaling": {k: v for k, v in LLAMA3.items() if k != "rope_theta"}}),
    "smollm2": ("llama", {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72, "rope_theta": 1e5}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": ("qwen2", SLIDING),
    "qwen3": ("qwen3", {"head_dim": 12, "rope_theta": 1e6}),
    "qwen3-bias-window": ("qwen3", {"head_dim": 8, "attention_bias": True, **SLIDING}),
    "mistral": ("mistral", {"sliding_window": 5}),
    "mistral-full": ("mistral", {"sliding_window": None}),
}
SMALL = decoder.Config(61, 32, 48, 2, 4, 2, 8)


def reference(family, extra, tied):
    """A random `transformers` model; biases and norms are random too, since their defaults would hide mistakes."""
    config = transformers.AutoConfig.for_model(family, **SIZES | extra, tie_word_embeddings=tied)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            elif "embed" not in name:
                parameter.mul_(5)  # logits of order 1, attention that is not uniform
    return model


def logits(params, config, tokens):
    buffers = decoder.buffers(config, device="cpu", dtype=params["norm"].dtype)
    return decoder.unembed(params, decoder.apply(params, buffers, tokens, config=config).hidden)


def make(config, dtype=torch.float32, seed=0):
    """Parameters of a config with every leaf random."""
    key = random.key(seed)
    return decoder.map_shapes(lambda path, shape: random.normal(random.fold_in(key, path), shape).to(dtype), config)


def same(left, right):
    pairs = zip(tree.named_leaves(left), tree.named_leaves(right), strict=True)
    return all(a[0] == b[0] and a[1].dtype == b[1].dtype and torch.equal(a[1], b[1]) for a, b in pairs)


@pytest.fixture
def tokens():
    return torch.randint(0, 61, (3, 24), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def folder(tmp_path):
    """A saved model."""
    hf.save(tmp_path / "model", make(SMALL), SMALL)
    return tmp_path / "model"


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_logits_equal_transformers_before_and_after_a_save(name, tied, tokens, tmp_path):
    model = reference(*FAMILIES[name], tied)
    expected = model(tokens).logits
    model.save_pretrained(tmp_path / "theirs")
    config, params = hf.load(tmp_path / "theirs")
    torch.testing.assert_close(logits(params, config, tokens), expected, rtol=1e-5, atol=1e-5)
    assert ("unembed" in params) is not tied

    hf.save(tmp_path / "ours", params, config)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager")
    torch.testing.assert_close(loaded(tokens).logits, expected, rtol=1e-5, atol=1e-5)
    again, params_again = hf.load(tmp_path / "ours")
    assert again == config
    assert same(params_again, params)


@torch.no_grad()
def test_minimind_is_read_as_the_qwen3_that_it_is(tokens, tmp_path):
    model = reference("qwen3", {"head_dim": 8, "rope_theta": 1e6}, True)
    model.save_pretrained(tmp_path)
    raw = {**SIZES, "model_type": "minimind", "hidden_act": "silu", "dropout": 0.0, "use_moe": False}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config, params = hf.load(tmp_path, dropout=0.1)
    assert (config.dropout, config.rope_theta, config.tie_word_embeddings) == (0.1, 1e6, True)
    torch.testing.assert_close(logits(params, config, tokens), model(tokens).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["llama3", "qwen2-window", "qwen3", "mistral"])
@torch.no_grad()
def test_cached_decoding_equals_the_full_forward(name, tokens):
    model = reference(*FAMILIES[name], True)
    config = hf.config_from_hf(model.config.to_dict())
    params = hf.from_state_dict(model.state_dict(), config)
    buffers = decoder.buffers(config, device="cpu")
    expected = decoder.apply(params, buffers, tokens, config=config).hidden
    lengths = torch.tensor([3, 11, 8])  # prompts of different lengths, padded on the right with token 0
    prompts = torch.where(torch.arange(11) < lengths[:, None], tokens[:, :11], 0)
    cache = decoder.empty_cache(config, rows=3, slots=24, dtype=torch.float32, device="cpu")
    prefill = decoder.apply(params, buffers, prompts, config=config, cache=cache)
    for row, length in enumerate(lengths):
        torch.testing.assert_close(prefill.hidden[row, :length], expected[row, :length], rtol=1e-5, atol=1e-5)
    for step in range(13):
        positions = (lengths + step)[:, None]
        output = decoder.apply(
            params, buffers, tokens.gather(1, positions), config=config, positions=positions, cache=cache
        )
        wanted = expected.gather(1, positions[..., None].expand(-1, -1, expected.shape[-1]))
        torch.testing.assert_close(output.hidden, wanted, rtol=1e-5, atol=1e-5)


@st.composite
def configs(draw):
    layers, heads, groups = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    scaling = draw(st.none() | st.builds(Llama3Scaling, st.floats(2, 32), st.just(1.0), st.just(4.0), st.just(8192)))
    window = draw(st.none() | st.integers(1, 4096))
    windows = None if window is None else tuple(draw(st.sampled_from([window, None])) for _ in range(layers))
    return decoder.Config(
        vocab_size=draw(st.integers(1, 1000)),
        hidden_size=draw(st.integers(1, 100)),
        intermediate_size=draw(st.integers(1, 100)),
        num_hidden_layers=layers,
        num_attention_heads=heads * groups,
        num_key_value_heads=heads,
        head_dim=2 * draw(st.integers(1, 64)),
        rms_norm_eps=draw(st.floats(1e-8, 1e-3)),
        rope_theta=draw(st.floats(100, 1e7)),
        rope_scaling=scaling,
        max_position_embeddings=draw(st.integers(1, 10**6)),
        tie_word_embeddings=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
        qkv_bias=draw(st.booleans()),
        output_bias=draw(st.booleans()),
        windows=windows if windows and any(windows) else None,
    )


@settings(max_examples=150, deadline=None)
@given(configs())
def test_a_config_survives_config_json_or_is_refused(config):
    try:
        raw = hf.config_to_hf(config)
    except UserError as error:
        assert any(field.name in str(error) for field in dataclasses.fields(config))  # noqa: PT017
        return
    assert hf.config_from_hf(json.loads(json.dumps(raw))) == config


@settings(max_examples=30, deadline=None)
@given(configs())
def test_transformers_reads_the_same_config(config):
    try:
        raw = hf.config_to_hf(config)
    except UserError:
        return
    theirs = transformers.AutoConfig.for_model(**json.loads(json.dumps(raw)))
    assert hf.config_from_hf(theirs.to_dict()) == config


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_what_a_config_leaves_out_takes_the_defaults_of_transformers(family):
    raw = {key: SIZES[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
    raw |= {"num_attention_heads": 32, "num_hidden_layers": 30}
    theirs = transformers.AutoConfig.for_model(family, **raw).to_dict()
    assert hf.config_from_hf({"model_type": family, **raw}) == hf.config_from_hf(theirs)


def test_older_configs_say_which_layers_slide_by_their_number():
    raw = {"model_type": "qwen2", **SIZES, **SLIDING}
    assert hf.config_from_hf(raw).windows == (None, 5)
    assert hf.config_from_hf({**raw, "use_sliding_window": False}).windows is None
    theirs = transformers.AutoConfig.for_model(**raw).to_dict()
    assert hf.config_from_hf(theirs) == hf.config_from_hf(raw)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "gpt2.*llama, mistral, qwen2, qwen3, minimind"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"rope_scaling": {"type": "yarn", "factor": 16}}, "yarn"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2}}, "dynamic"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2}}, "linear"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2}}, "lacks low_freq_factor, high_freq_factor"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differ by layer"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"model_type": "minimind", "use_moe": True}, "use_moe"),
        ({"model_type": "qwen3", "layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
        ({"model_type": "qwen3", "layer_types": ["sliding_attention"] * 2}, "use_sliding_window"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "32"}, "hidden_size must be a positive integer"),
        ({"num_key_value_heads": 3}, "multiple of num_key_value_heads"),
        ({"model_type": ["llama"]}, "model_type .'llama'"),
        ({"rms_norm_eps": None}, "rms_norm_eps must be a positive number, not None"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps must be a positive number, not 'x'"),
        ({"rope_theta": 10**400}, "rope_theta must be a positive number, not 1000"),
        ({"rope_parameters": {"rope_theta": None}}, "rope_theta must be a positive number"),
        ({"rope_parameters": [1]}, r"rope_parameters must be an object, not \[1\]"),
        ({"rope_scaling": "x"}, "rope_scaling must be an object, not 'x'"),
        ({"rope_scaling": {**LLAMA3, "factor": "x"}}, "factor must be a positive number, not 'x'"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings must be true or false, not 'false'"),
        ({"model_type": "qwen3", "layer_types": 5}, "layer_types must be a list of names, not 5"),
        ({"model_type": "qwen3", "layer_types": [["x"]]}, "layer_types must be a list of names"),
        ({"model_type": "qwen3", **SLIDING, "max_window_layers": "x"}, "max_window_layers must be an integer of 0 or"),
        ({"max_position_embeddings": 10**12}, "max_position_embeddings 1000000000000 .*16777216 at most"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers 1000000000000 .*4096 at most"),
    ],
)
def test_a_config_that_the_decoder_cannot_compute_is_refused(changes, message):
    with pytest.raises(UserError, match=message):
        hf.config_from_hf({"model_type": "llama", **SIZES, **changes})


def test_every_key_that_does_not_fit_is_named():
    state = hf.to_state_dict(make(SMALL), SMALL)
    del state["model.norm.weight"], state["model.layers.1.mlp.up_proj.weight"]
    state["model.layers.2.input_layernorm.weight"] = torch.zeros(32)
    state["model.layers.0.self_attn.k_proj.weight"] = torch.zeros(32, 32)
    state["model.rotary_emb.inv_freq"] = torch.zeros(4)  # harmless, so not listed
    with pytest.raises(UserError) as caught:
        hf.from_state_dict(state, SMALL)
    text = str(caught.value)
    assert "missing: model.norm.weight, model.layers.1.mlp.up_proj.weight;" in text
    assert "unexpected: model.layers.2.input_layernorm.weight;" in text
    assert "model.layers.0.self_attn.k_proj.weight (found [32, 32], expected [16, 32])" in text
    assert "inv_freq" not in text


def test_parameters_that_do_not_fit_are_refused():
    with pytest.raises(UserError, match="missing: unembed"):
        hf.to_state_dict(make(SMALL), dataclasses.replace(SMALL, tie_word_embeddings=False))


def test_a_tied_head_may_be_stored_twice_but_not_differ():
    state = hf.to_state_dict(make(SMALL), SMALL)
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    assert "unembed" not in hf.from_state_dict(state, SMALL)
    state["lm_head.weight"][3, 4] += 1
    with pytest.raises(UserError, match=r"lm_head\.weight differs"):
        hf.from_state_dict(state, SMALL)
    untied = dataclasses.replace(SMALL, tie_word_embeddings=False)
    del state["lm_head.weight"]
    with pytest.raises(UserError, match=r"missing: lm_head\.weight"):
        hf.from_state_dict(state, untied)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_saved_and_loaded_parameters_are_the_same_bits(dtype, tmp_path):
    params = make(SMALL, dtype)
    params["layers"][0]["mlp"]["gate"] = torch.randn(32, 48).to(dtype).T  # strided memory is no obstacle
    hf.save(tmp_path / "model", params, SMALL)
    config, loaded = hf.load(tmp_path / "model", dtype=dtype)
    assert config == SMALL
    assert same(loaded, params)
    assert "unembed" not in loaded
    assert all(leaf.is_contiguous() for leaf in tree.leaves(loaded))
    assert json.loads((tmp_path / "model/config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")


def test_loaded_parameters_outlive_their_file(folder):
    _, params = hf.load(folder)
    kept = tree.copy(params)
    weights = folder / "model.safetensors"
    with weights.open("r+b") as file:  # in place: a mapping would see it
        file.write(b"\xff" * weights.stat().st_size)
    assert same(params, kept)


def test_sharded_weights_are_read_and_a_lost_shard_is_named(tmp_path, tokens):
    model = reference("qwen3", {"head_dim": 8}, False)
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 1
    config, params = hf.load(tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(logits(params, config, tokens), model(tokens).logits, rtol=1e-5, atol=1e-5)
    shards[0].unlink()
    with pytest.raises(UserError, match=shards[0].name):
        hf.load(tmp_path)


def test_an_index_that_names_no_file_is_refused(folder):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"x": 5}}')
    with pytest.raises(UserError, match=r"index\.json: weight_map must give names of files, not 5"):
        hf.load(folder)


def test_pickled_weights_are_not_read(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UserError, match="only pickled weights"):
        hf.load(folder)


def test_unreadable_models_give_one_clear_error(folder, tmp_path, monkeypatch):
    (folder / "model.safetensors").write_bytes(b"\x10")
    with pytest.raises(UserError, match="not a readable safetensors"):
        hf.load(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"no model\.safetensors"):
        hf.load(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(UserError, match="not JSON"):
        hf.load(folder)
    (folder / "config.json").write_text("[" * 100_000)
    with pytest.raises(UserError, match=r"config\.json: not JSON"):
        hf.load(folder)
    (folder / "config.json").unlink()
    with pytest.raises(UserError, match="can't be read"):
        hf.load(folder)
    with pytest.raises(UserError, match="no readable tokenizer"):
        load_tokenizer(str(folder))
    with pytest.raises(UserError, match="no such folder or file"):
        hf.load(str(tmp_path / "nowhere"))
    (tmp_path / "bad.gguf").write_bytes(b"GGUF")
    with pytest.raises(UserError, match="not a readable GGUF"):
        hf.load(str(tmp_path / "bad.gguf"))

    def offline(*_, **__):
        raise ConnectionError("no route to the hub")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(UserError, match=r"no such folder, and the Hugging Face hub failed \(no route"):
        hf.load("someone/some-model")


def test_an_existing_folder_is_replaced_only_on_request_and_never_lost(folder, monkeypatch):
    old, new = make(SMALL), make(SMALL, seed=1)
    with pytest.raises(UserError, match="exists already"):
        hf.save(folder, new, SMALL)
    hf.save(folder, new, SMALL, replace=True)
    assert same(hf.load(folder)[1], new)
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]

    def full(*_, **__):
        raise OSError("no space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(OSError, match="no space"):
        hf.save(folder, old, SMALL, replace=True)
    assert same(hf.load(folder)[1], new)
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_a_replacement_that_fails_half_way_is_undone(folder, monkeypatch):
    kept, rename = hf.load(folder)[1], type(folder).rename

    def fail_into_place(path, target):
        if target == folder and path.name.startswith("."):
            raise OSError("stopped")
        return rename(path, target)

    monkeypatch.setattr(type(folder), "rename", fail_into_place)
    with pytest.raises(OSError, match="stopped"):
        hf.save(folder, make(SMALL, seed=1), SMALL, replace=True)
    assert same(hf.load(folder)[1], kept)
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_a_folder_without_a_model_is_not_replaced(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match="holds no model"):
        hf.save(tmp_path, make(SMALL), SMALL, replace=True)


def test_the_tokenizer_its_template_and_its_special_tokens_are_saved(tmp_path):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    vocabulary = {"<pad>": 0, "<eos>": 1, "a": 2}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(vocabulary, unk_token="<pad>")), eos_token="<eos>", pad_token="<pad>"
    )
    tokenizer.chat_template = "{{ messages[0].content }}"
    hf.save(tmp_path / "m", make(SMALL), SMALL, tokenizer=tokenizer, generation={"temperature": 0.5}, card="# Card\n")
    generation = json.loads((tmp_path / "m/generation_config.json").read_text())
    assert generation == {"eos_token_id": 1, "pad_token_id": 0, "temperature": 0.5}
    raw = json.loads((tmp_path / "m/config.json").read_text())
    assert (raw["eos_token_id"], raw["pad_token_id"], raw["bos_token_id"]) == (1, 0, None)
    assert (tmp_path / "m/README.md").read_text() == "# Card\n"
    loaded = load_tokenizer(str(tmp_path / "m"))
    assert loaded.get_vocab() == vocabulary
    assert loaded.chat_template == tokenizer.chat_template


def write_gguf(path, config, state, family):
    """A GGUF file as llama.cpp's converter lays it out."""
    import gguf

    writer = gguf.GGUFWriter(path, family)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[family.upper()], config.num_hidden_layers)
    for key, tensor in state.items():
        name, kind = key.rsplit(".", 1)
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-1])
        if family == "llama" and heads:
            tensor = torch.stack(tensor.unflatten(0, (heads, 2, -1)).unbind(1), dim=2).reshape(tensor.shape)
        writer.add_tensor(f"{names.get_name(name)}.{kind}", tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("family", "extra"), [("llama", {}), ("llama", {"qkv_bias": True, "output_bias": True}),
                          ("qwen2", {"qkv_bias": True}), ("qwen3", {"qk_norm": True})]
)  # fmt: skip
def test_a_gguf_file_gives_the_weights_that_it_was_made_of(family, extra, tied, tmp_path):
    config = dataclasses.replace(SMALL, rms_norm_eps=2.0**-20, tie_word_embeddings=tied, **extra)
    params = make(config)
    write_gguf(tmp_path / "model.gguf", config, hf.to_state_dict(params, config), family)
    loaded, weights = hf.load(str(tmp_path / "model.gguf"))
    assert loaded == config
    assert same(weights, params)
