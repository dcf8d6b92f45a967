"""Weights in 4 bits on the residual stream: one row by chains of four products, whose source runs on this processor."""

import dataclasses
from functools import partial

import pytest
import torch
from cuda_kernels import chain_source

from transect.engine.executors.gpu.setup import gpu_ops
from transect.models.context import PagedContext
from transect.models.decoder import Decoder
from transect.models.fused_stack import FusedStack
from transect.models.weights import int4_serving, kinds
from transect.models.weights.int4_serving import Int4Products, ServingInt4
from transect.ops.linear.packed.int4 import int4_chain, int4_matmul
from transect.ops.opset import resolve_ops
from transect.spec.model import ModelConfig

SMALL = ModelConfig(
    architecture="llama", vocab_size=61, dim=256, n_layers=3, n_heads=4, n_kv_heads=2, head_dim=64, ffn_dim=384,
    max_position=64, qkv_bias=True,
)  # fmt: skip


@pytest.fixture(autouse=True)
def by_torch(monkeypatch):
    """Products outside of chains are torch's: the interpreter takes seconds."""
    monkeypatch.setattr(int4_serving, "runs_triton", lambda x: False)


class TorchRows:
    """What ``int4_rows.CudaCodes`` computes."""

    def gates(self, m, n, k, group, device):
        return object()

    def beside(self, x, weight, n, norm, bias=None, *, gated=False, dependent_launch=False):
        y = x.float() @ int4_matmul.dense(weight, n, torch.float32).T
        if norm.squares is not None:
            y = y * (norm.squares.sum(-1, keepdim=True) / x.shape[1] + norm.eps).rsqrt()
        if gated:
            gate, up = y.unflatten(1, (-1, 2, 16)).unbind(2)
            return (torch.nn.functional.silu(gate) * up).flatten(1).to(x.dtype), None, None
        if norm.residual is None:
            return (y if bias is None else y + bias).to(x.dtype), None, None
        y = (y + norm.residual).to(x.dtype)
        return y, y * norm.scale, y.float().square().unflatten(-1, (-1, 16)).sum(-1)


def model_with(chain):
    products = dataclasses.replace(Int4Products.on("cpu"), rows=TorchRows(), chain=chain)
    ops = dataclasses.replace(resolve_ops("cpu"), stream_products=object())
    model = Decoder(SMALL, dtype=torch.bfloat16, ops=ops, kinds=lambda name: partial(ServingInt4, products=products))
    model.requires_grad_(False).init_weights(0.05, torch.Generator().manual_seed(0))
    model.join()
    return model


def states(model, stack, rows):
    """Hidden states of a token of each of so many sequences."""
    caches = model.new_kv_cache(20, 4, torch.bfloat16)
    for cache in caches:
        cache.normal_(generator=torch.Generator(cache.device).manual_seed(1))
    numbers = (torch.arange(10 * rows).view(rows, -1), torch.arange(rows + 1), torch.full((rows,), 9))
    tables, starts, ends = (each.to(caches[0].device, torch.int32) for each in numbers)
    context = PagedContext(*caches, tables, starts, ends, model.ops)
    model.stack = stack
    return model(torch.arange(rows, device=tables.device), context.positions(), context).double()


@pytest.mark.parametrize("chained", [True, False])
def test_one_row_goes_through_chains_where_there_is_the_kernel(monkeypatch, chained):
    kernel = chain_source(monkeypatch, int4_chain.Int4Chain)
    calls = []

    def counted(*given, **named):
        calls.append("chain")
        return kernel(*given, **named)

    model = model_with(counted if chained else None)
    fused = FusedStack(model, max_positions=64)
    for rows in (1, 2):
        wanted = states(model, model.run_layers, rows)
        assert (states(model, fused, rows) - wanted).norm() <= 0.015 * wanted.norm()
        assert calls == ["chain"] * 2 * chained  # from layer to layer, and never of two rows


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_gpu_runs_one_row_in_chains(monkeypatch):
    monkeypatch.undo()
    kind = kinds.kinds_for("int4", "cuda", dependent_launch=True)
    model = Decoder(SMALL, "cuda", torch.bfloat16, ops=gpu_ops(torch.device("cuda")), kinds=kind)
    model.requires_grad_(False).init_weights(0.05, torch.Generator("cuda").manual_seed(0))
    fused = FusedStack(model, max_positions=64)
    assert [chain is not None for chain in fused._chains] == [True, True, False]
    x = torch.zeros(1, SMALL.dim, dtype=torch.bfloat16, device="cuda")
    assert fused._on_stream.qkv.takes(x, fused._layers[0].sizes)
    wanted = states(model, model.run_layers, 1)
    for _ in range(4):
        assert (states(model, fused, 1) - wanted).norm() <= 0.02 * wanted.norm()


def test_what_no_chain_takes_has_none(monkeypatch):
    kernel = chain_source(monkeypatch, int4_chain.Int4Chain)
    model = model_with(kernel)
    first, second = model.layers[0], model.layers[1]
    parts = (first.attention.o, first.mlp.gate_up, first.mlp.down, second.attention.qkv)
    o, gate_up, down, qkv = (part.stream_product(model.ops.stream_products) for part in parts)
    assert o.chain((gate_up, down, qkv)) is not None
    assert o.chain((gate_up, down, object())) is None
    assert o.chain((gate_up, qkv, down)) is None
    assert gate_up.chain((gate_up, down, qkv)) is None


def test_the_chain_is_compiled_where_launches_depend_on_each_other(monkeypatch):
    made = []
    monkeypatch.setattr(int4_serving, "runs_triton", lambda x: True)
    monkeypatch.setattr(int4_serving, "has_dependent_launch", lambda device: True)
    monkeypatch.setattr(int4_matmul, "rows_kernel", lambda device: "rows")
    monkeypatch.setattr(int4_chain, "Int4Chain", lambda device: made.append("chain") or "chain")
    kinds.kinds_for("int4", "cpu")
    assert made == []
    kinds.kinds_for("int4", "cpu", dependent_launch=True)
    assert made == ["chain"]
