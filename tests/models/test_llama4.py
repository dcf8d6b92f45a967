"""Llama 4's checkpoints: parts of them, settings that cannot be, what its chunks and floors cost."""

import json

import pytest
import torch
from tiny_checkpoints import make_model

from transect.checkpoints.hf import stored_hf
from transect.costs.model import Row, least_attention
from transect.costs.storage import Storage
from transect.costs.training import TrainingFlops
from transect.spec.hf import from_hf, from_hf_directory


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama4")
    changes = {"num_hidden_layers": 3, "attention_chunk_size": 4, "floor_scale": 3}
    make_model("llama4_text", **changes).save_pretrained(path)
    return path


def test_parts_are_read_as_parts_of_the_whole(folder):
    config = from_hf_directory(folder)
    for name, stored in stored_hf(folder, config):
        if len(stored.shape) == 2 and name.startswith("layers."):
            rows, columns = slice(stored.shape[0] // 4, stored.shape[0] // 2), slice(8, 24)
            assert torch.equal(stored.read(rows, columns), stored.read()[rows, columns]), name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["full_attention"] * 3}, "chunked_attention for the layers that rotate"),
        ({"moe_layers": "all"}, "'moe_layers' in config.json must be a list"),
        ({"attention_chunk_size": 0}, "attention_chunk must be greater than 0"),
        ({"floor_scale": 0}, "floor of the attention temperature"),
    ],
)
def test_what_cannot_be(folder, changes, message):
    values = json.loads((folder / "config.json").read_text()) | changes
    with pytest.raises(ValueError, match=message):
        from_hf(values)


@pytest.mark.parametrize(("new", "length"), [(11, 11), (1, 8), (1, 9), (6, 23), (30, 200)])
def test_a_floor_counts_what_chunks_leave_visible(folder, new, length):
    """Layers 0 and 2 rotate and see their own chunk of 4 positions, layer 1 sees all."""
    config = from_hf_directory(folder)
    rows, storage = [Row(new, length)], Storage()
    seen = [[{k for k in range(p + 1) if k // 4 == p // 4} for p in range(length - new, length)] for _ in range(2)]
    seen.insert(1, [set(range(p + 1)) for p in range(length - new, length)])
    pairs = sum(len(keys) for layer in seen for keys in layer)
    keys = sum(len(set.union(*layer)) for layer in seen)
    least = least_attention(config, rows, storage)
    assert least.flops == 4 * pairs * config.q_dim
    assert least.bytes_read == 2 * keys * config.kv_dim * storage.kv / 8
    whole = TrainingFlops(config, frozen=False)([length], 0)
    pairs = 2 * sum(p % 4 + 1 for p in range(length)) + length * (length + 1) // 2
    assert whole - length * TrainingFlops(config, frozen=False)([1], 0) == pytest.approx(
        3.5 * 4 * config.q_dim * (pairs - 3 * length)
    )
