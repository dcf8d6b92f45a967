"""Configurations from and to config.json, and from GGUF metadata."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import transformers

from transect.spec.gguf import from_gguf
from transect.spec.hf import from_hf, from_hf_directory, to_hf
from transect.spec.model import ModelConfig, RopeConfig

LLAMA = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": True,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
}
LLAMA_32_1B = ModelConfig(
    architecture="llama",
    vocab_size=128256,
    dim=2048,
    n_layers=16,
    n_heads=32,
    n_kv_heads=8,
    head_dim=64,
    ffn_dim=8192,
    max_position=131072,
    norm_eps=1e-5,
    tied_embeddings=True,
    rope=RopeConfig(500000.0, "llama3", 32.0, 8192),
    bos_token_id=128000,
    eos_token_ids=(128001, 128008, 128009),
)
QWEN = LLAMA | {"model_type": "qwen2", "rope_scaling": None, "eos_token_id": 7}
SMOLLM2 = ModelConfig(
    architecture="llama",
    vocab_size=49152,
    dim=576,
    n_layers=30,
    n_heads=9,
    n_kv_heads=3,
    head_dim=64,
    ffn_dim=1536,
    max_position=8192,
    norm_eps=1e-5,
    tied_embeddings=True,
    rope=RopeConfig(100000.0),
    bos_token_id=1,
    eos_token_ids=(2,),
)


def hf(**changes: Any) -> ModelConfig:
    return from_hf(LLAMA | changes)


def test_llama() -> None:
    assert hf() == LLAMA_32_1B


def test_new_spelling_of_rope() -> None:
    values = {key: value for key, value in LLAMA.items() if key not in ("rope_theta", "rope_scaling")}
    values["rope_parameters"] = {"rope_theta": 500000.0, **LLAMA["rope_scaling"]}
    assert from_hf(values) == LLAMA_32_1B


def test_generation_config_adds_end_tokens() -> None:
    config = from_hf(QWEN, {"eos_token_id": [9, 7]})
    assert config.eos_token_ids == (7, 9)


def test_yarn() -> None:
    """Qwen2.5's way to 128k: the file keeps the old length, the model takes four times that."""
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    config = from_hf(QWEN | {"rope_scaling": scaling, "max_position_embeddings": 32768})
    assert config.max_position == 131072
    assert config.rope.attention_factor == pytest.approx(0.1 * math.log(4) + 1)
    assert config.rope.scaling == "yarn" and config.rope.original_max_position == 32768


def test_windows() -> None:
    mistral = LLAMA | {"model_type": "mistral", "rope_scaling": None, "sliding_window": 4096}
    assert [from_hf(mistral).layer_window(layer) for layer in (0, 15)] == [4096, 4096]
    assert from_hf(mistral | {"sliding_window": None}).layer_window(0) is None
    assert from_hf({key: mistral[key] for key in mistral if key != "sliding_window"}).layer_window(0) == 4096
    assert from_hf(QWEN | {"sliding_window": 4096}).layer_window(15) is None
    on = QWEN | {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 2}
    assert [from_hf(on).layer_window(layer) for layer in (0, 1, 2, 15)] == [None, None, 64, 64]
    kinds = ["sliding_attention", "full_attention"] * 8
    assert from_hf(on | {"layer_types": kinds}).full_attention_layers == tuple(range(1, 16, 2))


@pytest.mark.parametrize("name", ["mistral", "ministral"])
def test_a_mistrals_layers_may_take_turns(name: str) -> None:
    """Ministral 8B lists them; transformers knows it by that list, or by a name of its own."""
    kinds = ["full_attention", "sliding_attention", "sliding_attention", "sliding_attention"] * 4
    values = LLAMA | {"model_type": name, "rope_scaling": None, "sliding_window": 32768, "layer_types": kinds}
    config = from_hf(values)
    assert (config.architecture, config.full_attention_layers) == ("mistral", (0, 4, 8, 12))
    assert from_hf(values | {"layer_types": None}).full_attention_layers == ()
    with pytest.raises(ValueError, match="each of the 16 layers"):
        from_hf(values | {"layer_types": kinds[1:]})


def test_smollm3_slides_where_it_does_not_rotate() -> None:
    """If its file does not list the layers that do."""
    values = LLAMA | {"model_type": "smollm3", "rope_scaling": None, "sliding_window": 64, "use_sliding_window": True}
    config = from_hf(values)
    assert config.no_rope_layers == (3, 7, 11, 15)
    assert [layer for layer in range(16) if config.layer_window(layer) == 64] == [3, 7, 11, 15]


def test_the_first_files_of_llama4_tune_with_a_number() -> None:
    values = LLAMA | {"model_type": "llama4_text", "intermediate_size_mlp": 64, "rope_scaling": None}
    assert from_hf(values | {"attn_temperature_tuning": 4}).attention_temperature == (0.1, 8192)
    assert from_hf(values | {"attn_temperature_tuning": False}).attention_temperature is None
    with pytest.raises(ValueError, match="must be true or false, not 3"):
        from_hf(values | {"attn_temperature_tuning": 3})


def test_gpt_oss_without_rope_parameters() -> None:
    """transformers then takes those of the released models, also where the old key is null."""
    gpt_oss = {name: value for name, value in LLAMA.items() if name != "rope_scaling"} | {"model_type": "gpt_oss"}
    assert from_hf(gpt_oss).rope.scaling == "yarn"
    assert from_hf(gpt_oss | {"rope_scaling": None}).rope == from_hf(gpt_oss).rope


def test_biases_and_norms_by_family() -> None:
    qwen3 = from_hf(LLAMA | {"model_type": "qwen3", "rope_scaling": None})
    assert qwen3.qk_norm and not qwen3.qkv_bias and qwen3.head_dim == 128
    qwen2 = from_hf(QWEN)
    assert qwen2.qkv_bias and not qwen2.o_bias and not qwen2.qk_norm
    llama = hf(attention_bias=True, mlp_bias=True)
    assert llama.qkv_bias and llama.o_bias and llama.mlp_bias


def test_gpt2_with_defaults() -> None:
    config = from_hf({"model_type": "gpt2", "vocab_size": 50257, "n_ctx": 1024, "eos_token_id": 50256})
    assert (config.dim, config.ffn_dim, config.n_layers, config.n_kv_heads) == (768, 3072, 12, 12)
    assert (config.norm, config.activation, config.position) == ("layernorm", "gelu_tanh", "learned")
    assert config.tied_embeddings and config.qkv_bias and config.mlp_bias and config.bos_token_id is None


def written() -> dict[str, ModelConfig]:
    """Configurations of every family with its particulars."""
    yarn = RopeConfig(1e6, "yarn", 4.0, 32768, attention_factor=1.2, beta_fast=16.0, truncate=False)
    gpt2 = from_hf({"model_type": "gpt2", "vocab_size": 500, "n_inner": 100})
    return {
        "llama3.2": LLAMA_32_1B,
        "smollm2": SMOLLM2,
        "llama-linear": dataclasses.replace(SMOLLM2, rope=RopeConfig(1e4, "linear", 2.0), head_dim=32),
        "llama-bias": dataclasses.replace(SMOLLM2, qkv_bias=True, o_bias=True, mlp_bias=True, bos_token_id=None),
        "mistral": dataclasses.replace(SMOLLM2, architecture="mistral", sliding_window=100),
        "mistral-no-window": dataclasses.replace(SMOLLM2, architecture="mistral"),
        "mistral-in-turn": dataclasses.replace(
            SMOLLM2, architecture="mistral", sliding_window=100, full_attention_layers=(0, 4)
        ),
        "qwen2": dataclasses.replace(SMOLLM2, architecture="qwen2", qkv_bias=True, rope=yarn, max_position=131072),
        "qwen3": dataclasses.replace(
            SMOLLM2, architecture="qwen3", qk_norm=True, sliding_window=8, full_attention_layers=(0, 5)
        ),
        "gpt2": gpt2,
        "gpt2-exact": dataclasses.replace(gpt2, activation="gelu", tied_embeddings=False, eos_token_ids=(3, 4)),
    }


@pytest.mark.parametrize("name", written())
def test_round_trip(name: str) -> None:
    """Through our own reader, and through transformers' reading and rewriting."""
    config = written()[name]
    values = json.loads(json.dumps(to_hf(config)))
    assert from_hf(values) == config
    theirs = transformers.CONFIG_MAPPING[config.architecture].from_dict(values)
    assert from_hf(theirs.to_dict()) == config


def test_what_config_json_cannot_say() -> None:
    with pytest.raises(ValueError, match="cannot express this model's o_bias"):
        to_hf(dataclasses.replace(SMOLLM2, qkv_bias=True))
    with pytest.raises(ValueError, match="frequency factors cannot be written"):
        rope = RopeConfig(scaling="factors", frequency_factors=(1.0,) * 32)
        to_hf(dataclasses.replace(SMOLLM2, rope=rope))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "'mamba' is not supported; supported are: dots1, gemma2, .*llama, .*smollm3"),
        ({"model_type": None}, "has no 'model_type'"),
        ({"hidden_size": None}, "has no 'hidden_size'"),
        ({"hidden_size": "many"}, "'hidden_size' in config.json must be a whole number, not 'many'"),
        ({"vocab_size": 0}, "vocab_size must be a whole number greater than 0, not 0"),
        ({"num_key_value_heads": 5}, r"n_heads \(32\) must be a multiple of n_kv_heads \(5\)"),
        ({"num_attention_heads": 30}, "does not divide into 30 heads"),
        ({"head_dim": 63, "rope_scaling": None}, "head_dim must be even"),
        ({"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
        ({"rms_norm_eps": -1.0}, "norm_eps must be a number greater than 0"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope scaling 'longrope' is not supported"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope parameters of config.json has no 'factor'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.0}}, "rope factor must be a number greater than 0"),
        ({"rope_scaling": "linear"}, "'rope_scaling' in config.json must be an object or null"),
        ({"rope_scaling": LLAMA["rope_scaling"] | {"low_freq_factor": 4.0}}, "low_freq_factor < high_freq_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config of method None"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 3}}, "gptq with 3 bits"),
        ({"eos_token_id": "</s>"}, "'eos_token_id' in config.json must be a token id or a list of them"),
        ({"attention_bias": 1}, "'attention_bias' in config.json must be true or false"),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window must be greater than 0"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "layer_types": ["full_attention"]},
            "each of the 16 layers",
        ),
        ({"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=true"),
        ({"model_type": "gemma2", "query_pre_attn_scalar": 0}, "must be a whole number from 1"),
        (
            {"model_type": "gemma3_text", "rope_parameters": {"sliding_attention": {"rope_type": "linear"}}},
            "rope scaling 'linear' of layers that slide is not supported",
        ),
    ],
)
def test_errors(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hf(**changes)


def test_directory(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no config\.json: give a directory in Hugging Face layout"):
        from_hf_directory(tmp_path)
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match="is not valid JSON"):
        from_hf_directory(tmp_path)
    (tmp_path / "config.json").write_text("[]", encoding="utf-8")
    with pytest.raises(ValueError, match="must hold a JSON object"):
        from_hf_directory(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    assert from_hf_directory(tmp_path) == LLAMA_32_1B
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 5}', encoding="utf-8")
    assert from_hf_directory(tmp_path).eos_token_ids == (*LLAMA_32_1B.eos_token_ids, 5)


def test_needs_no_torch() -> None:
    program = "import sys, transect.spec.hf, transect.spec.gguf; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


SMOLLM2_GGUF = {
    "general.architecture": "llama",
    "llama.block_count": 30,
    "llama.context_length": 8192,
    "llama.embedding_length": 576,
    "llama.feed_forward_length": 1536,
    "llama.attention.head_count": 9,
    "llama.attention.head_count_kv": 3,
    "llama.rope.freq_base": 100000.0,
    "llama.attention.layer_norm_rms_epsilon": 9.999999747378752e-06,
    "llama.rope.dimension_count": 64,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}
"""What the metadata of the built-in model's file says."""


def tensors(*names: str, vocabulary: int = 49152) -> dict[str, Any]:
    shapes: dict[str, Any] = {name: SimpleNamespace(shape=(1,)) for name in names}
    return shapes | {"token_embd.weight": SimpleNamespace(shape=(vocabulary, 576))}


def rename(architecture: str, **more: Any) -> dict[str, Any]:
    values = {key.replace("llama.", f"{architecture}."): value for key, value in SMOLLM2_GGUF.items()}
    return values | {"general.architecture": architecture} | more


def test_gguf_smollm2() -> None:
    assert from_gguf(SMOLLM2_GGUF, tensors()) == SMOLLM2


def test_gguf_reads_presence_of_tensors() -> None:
    qwen2 = from_gguf(rename("qwen2"), tensors("blk.0.attn_q.bias", "output.weight"))
    assert qwen2 == dataclasses.replace(SMOLLM2, architecture="qwen2", qkv_bias=True, tied_embeddings=False)
    more = {"qwen3.attention.key_length": 64, "qwen3.attention.value_length": 64}
    qwen3 = from_gguf(rename("qwen3", **more), tensors("blk.0.attn_q_norm.weight"))
    assert qwen3 == dataclasses.replace(SMOLLM2, architecture="qwen3", qk_norm=True)


def test_gguf_gpt2() -> None:
    values = {
        "general.architecture": "gpt2",
        "gpt2.block_count": 12,
        "gpt2.context_length": 1024,
        "gpt2.embedding_length": 768,
        "gpt2.feed_forward_length": 3072,
        "gpt2.attention.head_count": 12,
        "gpt2.attention.layer_norm_epsilon": 9.999999747378752e-06,
        "tokenizer.ggml.bos_token_id": 50256,
        "tokenizer.ggml.eos_token_id": 50256,
    }
    names = ("blk.0.attn_qkv.bias", "blk.0.attn_output.bias", "blk.0.ffn_down.bias")
    hf = {"model_type": "gpt2", "vocab_size": 50257, "bos_token_id": 50256, "eos_token_id": 50256}
    assert from_gguf(values, tensors(*names, vocabulary=50257)) == from_hf(hf)


def test_gguf_rope_scalings() -> None:
    linear = SMOLLM2_GGUF | {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    assert from_gguf(linear, tensors()).rope == RopeConfig(100000.0, "linear", 4.0)
    old = SMOLLM2_GGUF | {"llama.rope.scale_linear": 4.0}
    assert from_gguf(old, tensors()).rope == RopeConfig(100000.0, "linear", 4.0)
    alone = SMOLLM2_GGUF | {"llama.rope.scaling.factor": 4.0}
    assert from_gguf(alone, tensors()).rope == RopeConfig(100000.0, "linear", 4.0)
    assert from_gguf(alone | {"llama.rope.scaling.type": "none"}, tensors()).rope == RopeConfig(100000.0)
    yarn = SMOLLM2_GGUF | {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 2048,
    }
    factor = pytest.approx(0.1 * math.log(4) + 1)
    rope = from_gguf(yarn, tensors()).rope
    assert (rope.scaling, rope.factor, rope.original_max_position, rope.attention_factor) == ("yarn", 4.0, 2048, factor)
    with pytest.raises(ValueError, match="rope scaling 'longrope'"):
        from_gguf(SMOLLM2_GGUF | {"llama.rope.scaling.type": "longrope"}, tensors())


def test_gguf_llama3_factors() -> None:
    """The table of divisors that Llama 3.1 files hold is read back as the numbers it was made from."""
    from transect.models.rope import frequencies

    for factor in (8.0, 32.0):
        rope = RopeConfig(500000.0, "llama3", factor, 8192)
        table = (frequencies(RopeConfig(500000.0), 64) / frequencies(rope, 64)).numpy()
        values = SMOLLM2_GGUF | {"llama.rope.freq_base": 500000.0}
        holder = SimpleNamespace(shape=(32,), dequantize=lambda table=table: table)
        assert from_gguf(values, tensors() | {"rope_freqs.weight": holder}).rope == rope
    odd = np.linspace(1, 3, 32, dtype=np.float32)
    holder = SimpleNamespace(shape=(32,), dequantize=lambda: odd)
    rope = from_gguf(SMOLLM2_GGUF, tensors() | {"rope_freqs.weight": holder}).rope
    assert rope.scaling == "factors" and rope.frequency_factors == pytest.approx(tuple(odd))


def test_gguf_mistral_is_stored_as_llama() -> None:
    config = from_gguf(SMOLLM2_GGUF | {"llama.attention.sliding_window": 4096}, tensors())
    assert (config.architecture, config.sliding_window) == ("mistral", 4096)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": "mamba"}, "architecture 'mamba' is not supported"),
        ({"llama.block_count": None}, r"no 'llama\.block_count'"),
        ({"llama.block_count": "30"}, r"'llama\.block_count' in the GGUF metadata must be a whole number"),
        ({"llama.block_count": 1.5}, "must be a whole number"),
        ({"llama.attention.head_count_kv": [3, 3]}, "must be a whole number"),
        ({"llama.attention.head_count": 0}, "head_count' in the GGUF metadata must be greater than 0, not 0"),
        ({"llama.expert_count": 8}, "1 tensors, too few for 30 layers"),
        ({"llama.block_count": 5000}, "block_count' in the GGUF metadata must be at most 4096"),
        ({"llama.rope.dimension_count": 32}, "rotate only part of a head"),
        ({"llama.attention.value_length": 32}, "key and value heads differ"),
    ],
)
def test_gguf_errors(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_gguf(SMOLLM2_GGUF | changes, tensors())


def test_gguf_without_embedding() -> None:
    with pytest.raises(ValueError, match=r"no tensor 'token_embd\.weight'"):
        from_gguf(SMOLLM2_GGUF, {})
