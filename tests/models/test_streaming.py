"""Layers that stream compute what layers compute that are there, whatever kinds of weight they have."""

import dataclasses
import random
from functools import partial

import pytest
import torch

from transect.checkpoints.dummy import dummy_weights
from transect.checkpoints.load import allocated, fill
from transect.costs.memory.streaming import layer_bytes, plan_stream
from transect.costs.storage import Storage
from transect.hardware import direct_file
from transect.models.context import PagedContext
from transect.models.decoder import Decoder
from transect.models.fused_stack import FusedStack, Fusions
from transect.models.weights.dense import Dense
from transect.models.weights.int4_serving import Int4Products, ServingInt4
from transect.models.weights.kinds import kinds_for
from transect.models.weights.weight import Weight
from transect.ops.linear.packed.int4 import int4_matmul
from transect.spec.model import ModelConfig, RopeConfig
from transect.spec.moe import MoEConfig

CONFIG = ModelConfig(
    architecture="llama", vocab_size=61, dim=32, n_layers=5, n_heads=4, n_kv_heads=2, head_dim=16, ffn_dim=48,
    max_position=64, qkv_bias=True, rope=RopeConfig(),
)  # fmt: skip
MOE = dataclasses.replace(CONFIG, moe=MoEConfig(experts=4, per_token=2, expert_dim=16, dense_layers=(0,)))
EVERYTHING = 1000.0
STORAGE = Storage(linear=32, norm=32)


def gated_by_torch(x, weight, outputs):
    gate, up = int4_matmul.reference(x, weight, outputs).unflatten(-1, (-1, 2, 16)).unbind(2)
    return torch.nn.functional.silu(gate.flatten(1)) * up.flatten(1)


class Apart(Weight):
    """A kind that nobody knows: its matrix in two buffers of different types, one of them transposed."""

    def __init__(self, out_features, in_features, bias=False, *, ops=None, device=None, dtype=None):
        super().__init__(out_features, in_features)
        self.register_buffer("high", torch.empty(in_features, out_features, dtype=torch.bfloat16, device=device))
        self.register_buffer("low", torch.empty(out_features, in_features, dtype=torch.float32, device=device))
        self.add_bias(bias, device, dtype)

    def load(self, values, staging):
        self.high.copy_(values.T)
        self.low.copy_(values - self.high.T)

    def forward(self, x_TI):
        out = x_TI @ self.dense().T
        return out if self.bias is None else out + self.bias

    def dense(self):
        return self.high.T.float() + self.low


def made(config=CONFIG, kinds=None, plan=None, *, fused=False, join=True, order=None):
    model = allocated(Decoder(config, "meta", torch.float32, kinds=kinds), "cpu", plan, join=join)
    weights = list(dummy_weights(config, seed=3, dtype=torch.float32))
    if order is not None:
        random.Random(order).shuffle(weights)
    fill(model, (each for each in weights))
    if fused:
        model.stack = FusedStack(model, max_positions=64, fusions=Fusions.all(join))
    return model


@torch.inference_mode()
def hidden(model, new=(1, 3, 7), lengths=(9, 3, 20)):
    caches = model.new_kv_cache(6, 16, torch.float32)
    for cache in caches:
        cache.copy_(torch.randn(cache.shape, generator=torch.Generator().manual_seed(1)))
    tables = torch.arange(6, dtype=torch.int32).view(3, 2)
    starts = torch.tensor([0, *new]).cumsum(0, dtype=torch.int32)
    context = PagedContext(*caches, tables, starts, torch.tensor(lengths, dtype=torch.int32), model.ops)
    positions = context.positions()
    return model(torch.arange(len(positions)), positions, context)


def plans(config=CONFIG, folder=None):
    sizes = layer_bytes(config, STORAGE)
    return plan_stream(sizes, 1e-6, folder), plan_stream(sizes, EVERYTHING, folder)


BY_TORCH = Int4Products(int4_matmul.reference, gated_by_torch)
"""The kernels take seconds in the interpreter."""
KINDS = {
    "dense": None,
    "int4": lambda name: Dense if name == "head" else partial(ServingInt4, products=BY_TORCH),
    "fp8": kinds_for("fp8", "cpu"),
    "int8": kinds_for("int8", "cpu"),
    "unknown": lambda name: Apart,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fused", [False, True])
def test_every_kind_of_weight_streams(kind, fused, tmp_path):
    expected = hidden(made(kinds=KINDS[kind], fused=fused))
    for plan in (*plans(), *plans(folder=str(tmp_path))):
        model = made(kinds=KINDS[kind], plan=plan, fused=fused)
        for _ in range(3):
            assert torch.equal(hidden(model), expected)
    assert not list(tmp_path.iterdir())  # the file has no name, and goes with the process


@pytest.mark.parametrize("kind", ["dense", "int4"])
def test_without_fusions_nothing_is_joined(kind):
    expected = hidden(made(kinds=KINDS[kind], fused=True, join=False))
    assert torch.equal(hidden(made(kinds=KINDS[kind], plan=plans()[1], fused=True, join=False)), expected)


@pytest.mark.parametrize("fused", [False, True])
def test_layers_of_different_sizes(fused, tmp_path):
    """One is dense, the others have experts."""
    expected = hidden(made(MOE, fused=fused))
    for plan in (*plans(MOE), *plans(MOE, str(tmp_path))):
        model = made(MOE, plan=plan, fused=fused)
        assert all(torch.equal(hidden(model), expected) for _ in range(2))


@pytest.mark.parametrize("order", range(3))
def test_files_may_have_weights_in_any_order(order):
    assert torch.equal(hidden(made(plan=plans()[1], order=order)), hidden(made()))


@pytest.mark.parametrize("where", ["host", "file"])
def test_a_step_that_failed_harms_no_other(where, tmp_path):
    expected = hidden(made())
    for plan in plans(folder=None if where == "host" else str(tmp_path)):
        model = made(plan=plan)
        for layer in (0, 2, 4):

            def fail(*_):
                raise RuntimeError("no memory")

            handle = model.layers[layer].register_forward_pre_hook(fail)
            with pytest.raises(RuntimeError, match="no memory"):
                hidden(model)
            handle.remove()
            assert torch.equal(hidden(model), expected)


def test_pieces_are_read_in_parts(monkeypatch, tmp_path):
    monkeypatch.setattr(direct_file, "PART_BYTES", 4096)
    expected = hidden(made())
    model = made(plan=plans(folder=str(tmp_path))[1])
    assert all(torch.equal(hidden(model), expected) for _ in range(3))


def test_what_is_on_the_device():
    whole = made()
    sizes = layer_bytes(CONFIG, STORAGE)
    for plan in plans():
        model = made(plan=plan)
        assert model.nbytes == whole.nbytes == whole.device_nbytes
        rounding = 2 * 4096
        assert 0 <= model.device_nbytes - (whole.nbytes - plan.bytes + plan.slots) <= rounding
        weights = [weight for name, weight in model.weights() if name.startswith("layers.")]
        assert sum(weight.nbytes for weight in weights) <= sum(sizes)


def test_plans_stream_no_more_layers_than_asked_for():
    sizes = [100.0] * 64
    gib = 2**30
    plan = plan_stream(sizes, 1000 / gib)
    assert len(plan.layers) == 12 and plan.saved == 1000 and plan.slots == 200 and plan.bytes == 1200
    assert plan.layers[0] == 0 and max(b - a for a, b in zip(plan.layers, plan.layers[1:], strict=False)) == 6
    assert len(plan_stream(sizes, 901 / gib).layers) == 12  # an even number: the link need not wait between steps
    assert plan_stream(sizes, EVERYTHING).layers == tuple(range(64))
    assert plan_stream([100.0] * 61, EVERYTHING).layers == tuple(range(61))
    assert plan_stream(sizes, 1.0, "/nvme").seconds(6400) == 1.0


def test_a_model_of_few_layers_is_refused():
    with pytest.raises(ValueError, match=r"2 slots.*has 2: leave it out"):
        plan_stream([1.0, 1.0], 1.0)


def test_layers_count_their_matrices_alone():
    sizes = layer_bytes(MOE, STORAGE)
    dense = 4 * (32 * 64 + 2 * 32 * 32 + 32 * 64 + 64 + 64 + 3 * 32 * 48)
    experts = 4 * (32 * 64 + 2 * 32 * 32 + 32 * 64 + 64 + 64 + 3 * 32 * 16 * 4)
    assert sizes == [dense, *[experts] * 4]
