"""Shapes without weights: resolved from a config.json alone or by name, and filled with random numbers."""

import json

import pytest
import torch

from transect.checkpoints.load import load_model, stored_weights
from transect.checkpoints.resolve import resolve
from transect.models.stored import read_all
from transect.ops.shapes import MODELS
from transect.spec.shapes import LLAMA_70B, PRESETS
from transect.spec.weights import parameter_count, weight_shapes

SMALL = {
    "model_type": "qwen3",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
}


@pytest.fixture
def shape(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    return resolve(str(tmp_path), load_format="dummy")


def test_a_config_json_is_enough(shape):
    assert shape.kind == "shape" and shape.config.dim == 64
    weights = dict(read_all(stored_weights(shape)))
    assert {name: tuple(weight.shape) for name, weight in weights.items()} == weight_shapes(shape.config)
    assert weights["layers.0.mlp.up.weight"].float().std() == pytest.approx(0.02, rel=0.1)
    assert torch.all(weights["norm.weight"] == 1)
    assert not torch.equal(weights["layers.0.mlp.up.weight"], weights["layers.1.mlp.up.weight"])


def test_the_seed_decides_the_weights(shape):
    def up(seed):
        return load_model(shape, native=False, dtype="float32", seed=seed).layers[1].mlp.up.weight

    assert torch.equal(up(3), up(3)) and not torch.equal(up(3), up(4))


@pytest.mark.parametrize("native", [None, False])
def test_both_ways_to_compute_take_them(shape, native):
    model = load_model(shape, native=native, threads=1)
    assert torch.isfinite(model.logits(torch.randn(2, 64, dtype=model.norm.weight.dtype))).all()


def test_presets_have_the_published_sizes():
    assert set(PRESETS) == {*(each.name for each in (*MODELS, LLAMA_70B)), "qwen3-30b-a3b", "llama-3.2-3b"}
    billions = {name: parameter_count(config) / 1e9 for name, config in PRESETS.items()}
    expected = {
        "llama-3.1-8b": 8.030,
        "llama-3.2-1b": 1.236,
        "llama-3.2-3b": 3.213,
        "qwen3-0.6b": 0.596,
        "qwen3-8b": 8.191,
        "llama-3.3-70b": 70.554,
        "qwen3-30b-a3b": 30.532,
    }
    assert billions == pytest.approx(expected, abs=0.001)
    assert resolve("qwen3-8b", load_format="dummy").config == PRESETS["qwen3-8b"]


def test_what_cannot_be_resolved_says_what_to_give(tmp_path):
    with pytest.raises(ValueError, match=r"directory with a config\.json, or one of llama-3\.1-8b"):
        resolve(str(tmp_path), load_format="dummy")
    with pytest.raises(ValueError, match="load_format dummy"):
        resolve("qwen3-0.6b")
