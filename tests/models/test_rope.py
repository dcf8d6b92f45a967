"""Frequencies and angles against transformers, with the numbers of released models."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from transect.models.rope import Rope, frequencies
from transect.spec.hf import from_hf
from transect.spec.model import RopeConfig

LLAMA31 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
RELEASED = {
    "llama2": {"rope_type": "default", "rope_theta": 10000.0},
    "smollm2": {"rope_type": "default", "rope_theta": 100000.0},
    "llama3.1": LLAMA31,
    "llama3.2": LLAMA31 | {"factor": 32.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "qwen2.5-yarn": {
        "rope_type": "yarn",
        "rope_theta": 1000000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
    },
    "yarn-mscale": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 0.8,
    },
    "yarn-untruncated": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
}


@pytest.mark.parametrize("name", RELEASED)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_against_transformers(name: str, head_dim: int) -> None:
    theirs = transformers.LlamaConfig(
        head_dim=head_dim, max_position_embeddings=131072, rope_parameters=dict(RELEASED[name])
    )
    rotary = LlamaRotaryEmbedding(theirs)
    config = from_hf(theirs.to_dict())
    torch.testing.assert_close(frequencies(config.rope, head_dim), rotary.inv_freq, rtol=3e-7, atol=0)
    positions = torch.tensor([0, 1, 7, 1000, 8191])
    cos, sin = Rope(config.rope, head_dim).cos_sin(positions)
    want_cos, want_sin = rotary(torch.zeros(1), positions[None])
    # A last-bit difference of a frequency shows in the angle times the position.
    for got, want in ((cos, want_cos), (sin, want_sin)):
        torch.testing.assert_close(got, want[0, :, : head_dim // 2], rtol=0, atol=3e-3)
        torch.testing.assert_close(got[:3], want[0, :3, : head_dim // 2], rtol=0, atol=3e-6)


def test_factors_divide_each_frequency() -> None:
    plain = frequencies(RopeConfig(), 8)
    scaled = frequencies(RopeConfig(scaling="factors", frequency_factors=(1.0, 2.0, 4.0, 8.0)), 8)
    torch.testing.assert_close(scaled, plain / torch.tensor([1.0, 2.0, 4.0, 8.0]))


def test_angles_stay_float32_when_the_model_is_cast() -> None:
    rope = Rope(RopeConfig(), 8)
    cos, sin = rope.cos_sin(torch.arange(3))
    assert cos.dtype == sin.dtype == torch.float32
    torch.testing.assert_close(cos.square() + sin.square(), torch.ones(3, 4))
