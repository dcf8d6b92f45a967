"""Llama 4's checkpoints: read and written in its own layout of rows, experts and settings."""

import json

import pytest
import torch
import transformers

from transect.checkpoints.hf import stored_hf
from transect.checkpoints.hf_out import save_hf
from transect.checkpoints.load import load_model
from transect.checkpoints.resolve import resolve
from transect.costs.model import Row, least_attention
from transect.costs.storage import Storage
from transect.costs.training import TrainingFlops
from transect.models.context import VarlenContext
from transect.spec.hf import from_hf, from_hf_directory, to_hf

TOKENS = [5, 9, 77, 42, 13, 8, 31, 60, 2, 2, 19]
SETTINGS = {
    "vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "intermediate_size_mlp": 40, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128,
    "num_local_experts": 4, "num_experts_per_tok": 2, "moe_layers": [0, 2], "no_rope_layers": [1, 0, 1],
    "attention_chunk_size": 4, "floor_scale": 3, "attn_scale": 0.5, "pad_token_id": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def theirs():
    """Two experts for each token, so that rows are weighed pair by pair."""
    model = transformers.Llama4ForCausalLM(transformers.Llama4TextConfig(**SETTINGS)).float().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.2 * noise if weight.ndim == 1 else 0.3 * noise)
    return model


@pytest.fixture(scope="module")
def folder(theirs, tmp_path_factory):
    path = tmp_path_factory.mktemp("llama4")
    theirs.save_pretrained(path)
    return path


def test_a_checkpoint_is_loaded(theirs, folder):
    model = load_model(resolve(str(folder)), dtype="float32", native=False)
    context = VarlenContext(torch.tensor([0, len(TOKENS)], dtype=torch.int32), model.ops)
    with torch.no_grad():
        ours = model.logits(model(torch.tensor(TOKENS), context.positions(), context))
        want = theirs(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(ours, want, atol=1e-4, rtol=1e-4)


def test_what_is_written_is_what_was_read(theirs, folder, tmp_path):
    config = from_hf_directory(folder)
    state = {name: stored.read() for name, stored in stored_hf(folder, config)}
    save_hf(state, config, tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for name, value in theirs.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    assert from_hf(to_hf(config)) == config


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
