"""``load_on_device`` gives what ``load_model`` gives, with joined weights (on the CPU, where it needs no staging)."""

import dataclasses

import pytest
import torch
from tiny_checkpoints import FAMILIES, make_model, write_gguf

from transect.checkpoints.load import load_model, load_on_device
from transect.checkpoints.resolve import resolve
from transect.models.context import VarlenContext
from transect.models.fused_stack import FusedStack
from transect.ops.opset import resolve_ops

CPU = torch.device("cpu")


def same(source):
    ours = load_on_device(source, device=CPU, dtype=torch.float32, ops=resolve_ops("cpu"), max_positions=64)
    theirs = load_model(source, dtype="float32", native=False)
    assert set(ours.state_dict()) == set(theirs.state_dict())
    for name, weight in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], weight), name
    context = VarlenContext(torch.tensor([0, 9], dtype=torch.int32))
    tokens = torch.arange(3, 12)
    hidden = [model(tokens, context.positions(), context) for model in (ours, theirs)]
    torch.testing.assert_close(hidden[0], hidden[1], rtol=1e-4, atol=1e-4)
    return ours


@pytest.mark.parametrize("family", FAMILIES)
def test_safetensors(family, tmp_path):
    make_model(family).save_pretrained(tmp_path)
    model = same(resolve(str(tmp_path)))
    assert isinstance(model.stack, FusedStack) == (family != "gpt2")


def test_gguf_is_dequantized(tmp_path):
    path = tmp_path / "tiny.gguf"
    write_gguf(path, make_model("llama"), "Q8_0")
    same(resolve(str(path)))


def test_random_weights_of_a_seed():
    source = resolve("qwen3-0.6b", load_format="dummy")
    shape = type(source)(source.kind, source.path, _small(source.config), source.name)
    models = [
        load_on_device(shape, device=CPU, dtype=torch.bfloat16, ops=resolve_ops("cpu"), max_positions=64, seed=seed)
        for seed in (1, 1, 2)
    ]
    first, again, other = (model.layers[0].mlp.up.weight for model in models)
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert models[0].head.weight is models[0].embed.weight


def _small(config):
    return dataclasses.replace(
        config, n_layers=1, vocab_size=64, dim=64, ffn_dim=96, n_heads=4, n_kv_heads=2, head_dim=16
    )
