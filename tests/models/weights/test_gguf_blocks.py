"""Blocks of GGUF files on the residual stream, with torch in the place of the kernel for one row."""

import dataclasses
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from cuda_kernels import chain_source, row_on_host

from transect.models.context import PagedContext
from transect.models.decoder import Decoder
from transect.models.fused_stack import FusedStack
from transect.models.weights import gguf_blocks
from transect.models.weights.gguf_blocks import BlockStream, GGUFBlocks
from transect.models.weights.kinds import kinds_for
from transect.models.weights.weight import Weight
from transect.ops.linear.few_rows.cuda import Beside
from transect.ops.linear.packed.gguf import gguf_chain, gguf_row
from transect.ops.linear.packed.gguf.gguf_matmul import Products
from transect.ops.linear.packed.gguf.gguf_row import values
from transect.ops.opset import resolve_ops
from transect.spec.model import ModelConfig
from transect.spec.numbers.gguf import UNITS
from transect.spec.numbers.layouts import BlockLayout

SMALL = ModelConfig(
    architecture="llama", vocab_size=61, dim=256, n_layers=3, n_heads=4, n_kv_heads=2, head_dim=64, ffn_dim=256,
    max_position=64,
)  # fmt: skip


class TorchProducts:
    """Computes the products of ``GGUFRow`` and ``GGUFChain``, and lists the launches in ``made``."""

    def __init__(self):
        self.made = []

    def __call__(self, x, matrix, bias=None, norm=None, *, gated=False, dependent_launch=False):
        norm = norm or Beside()
        self.made.append("gated" if gated else "add" if norm.residual is not None else len(matrix))
        y = x @ values(matrix, x.dtype).T
        if norm.squares is not None:
            y = y * (norm.squares.sum(-1, keepdim=True) / x.shape[1] + norm.eps).rsqrt()
        if gated:
            return gguf_row.gate_turns(y), None, None
        if norm.residual is None:
            return (y if bias is None else y + bias), None, None
        y = y + norm.residual
        return y, y * norm.scale, y.square().unflatten(-1, (-1, 16)).sum(-1)

    def chain(self, attended, residual, weights, *, dependent_launch):
        self.made.append("chain")
        return gguf_chain.reference(attended, residual, weights)


def block_model(v="Q6_K", up="Q4_K", bias=False, kernels=None, dtype=torch.float32):
    products = Products("cpu", dependent=True)
    stand_in = TorchProducts()
    products.row, products.chain = kernels or (stand_in, stand_in.chain)
    products._triton = False  # matrices are rebuilt by torch: the interpreter takes seconds

    def kinds(name):
        block_type = {"attention.v": v, "mlp.up": up, "mlp.down": "Q6_K"}.get(name, "Q4_K")
        return partial(GGUFBlocks, block_type=block_type, products=products)

    ops = dataclasses.replace(resolve_ops("cpu"), stream_products=object())
    config = dataclasses.replace(SMALL, qkv_bias=bias)
    model = Decoder(config, dtype=dtype, ops=ops, kinds=kinds).requires_grad_(False)
    model.init_weights(0.05, torch.Generator().manual_seed(0))
    return model, stand_in


def both(model, lengths):
    """(hidden states, caches) of a token of each sequence, layer by layer and fused."""
    found = []
    for stack in (model.run_layers, FusedStack(model, max_positions=64)):
        caches = model.new_kv_cache(20, 4, model.layers[0].attention_norm.weight.dtype)
        for cache in caches:
            cache.normal_(generator=torch.Generator().manual_seed(1))
        tables = torch.arange(10 * len(lengths), dtype=torch.int32).view(len(lengths), -1)
        starts, ends = torch.arange(len(lengths) + 1, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32)
        context = PagedContext(*caches, tables, starts, ends, model.ops)
        model.stack = stack
        found.append((model(torch.arange(len(lengths)), context.positions(), context), *caches))
    return found


@pytest.fixture(autouse=True)
def any_dtype(monkeypatch):
    """The kernel takes bfloat16; the stand-in computes in float32, so that results can be compared closely."""
    monkeypatch.setattr(gguf_row, "takes", lambda x, sizes: len(x) == 1)


@pytest.mark.parametrize("bias", [False, True])
def test_one_row_goes_through_chains(bias):
    """The first layer's q, k and v are one launch, of two types; then a chain leads from each layer to the next; then
    comes what is left of the last one."""
    model, chain = block_model(bias=bias)
    model.join()
    plain, _ = both(model, (9,))
    chain.made.clear()
    fused = both(model, (9,))[1]
    assert chain.made[-6:] == [3, "chain", "chain", "add", "gated", 1]
    torch.testing.assert_close(fused, plain, rtol=1e-3, atol=1e-3)


@pytest.mark.prove
def test_chains_by_the_source_itself(monkeypatch):
    """``gguf_row.cu`` and ``gguf_chain.cu`` on this processor, in a model of bfloat16: what GPUs run with
    ``chained_blocks``."""
    chain = chain_source(monkeypatch, gguf_chain.GGUFChain, multiprocessors=5)
    kernels = row_on_host(monkeypatch, multiprocessors=5), chain
    model, _ = block_model(bias=True, kernels=kernels, dtype=torch.bfloat16)
    model.join()
    fused = both(model, (9,))[1]
    for part in model.modules():
        if isinstance(part, GGUFBlocks):
            part._products.row = None
    plain = both(model, (9,))[0]
    for found, wanted in zip(fused, plain, strict=True):
        assert (found.float() - wanted.float()).norm() < 0.01 * wanted.float().norm()


def test_several_rows_do_not():
    model, chain = block_model()
    plain, fused = both(model, (9, 4))
    assert not chain.made
    torch.testing.assert_close(fused, plain, rtol=1e-3, atol=1e-3)


def test_gate_and_up_of_two_types_stay_apart():
    """Their sixteens of rows cannot be in turns: all products of such a model are launches of their own."""
    model, chain = block_model(up="Q6_K")
    plain, fused = both(model, (9,))
    assert chain.made and set(chain.made) == {1}
    torch.testing.assert_close(fused, plain, rtol=1e-3, atol=1e-3)


def test_parts_of_other_kinds_are_no_matrix_for_it():
    model, _ = block_model()
    attention = model.layers[0].attention
    q, v = (part.stream_product(model.ops.stream_products) for part in (attention.q, attention.v))
    stacked = q.stack([v])
    assert isinstance(stacked, BlockStream) and len(stacked._matrix) == 2
    assert q.stack([v, None]) is None and stacked.stack([v, v]) is None
    assert not stacked.biased and stacked.chain([q]) is None


def test_experts_of_whole_sixteens_are_decoded_in_the_grouped_product(monkeypatch):
    layouts = (("mlp.experts_down", BlockLayout(UNITS["Q6_K"])),)
    weight = kinds_for(None, "cpu", layouts=layouts)("mlp.experts_down")(32, 256, ops=None)
    monkeypatch.setattr(gguf_blocks, "runs_triton", lambda x: True)
    monkeypatch.setattr(Weight, "grouped", lambda *given: "rebuilt")
    monkeypatch.setattr(gguf_blocks.grouped_blocks, "triton_grouped_blocks", lambda *given: "decoded")
    x = SimpleNamespace(is_cuda=True)
    assert weight.grouped(x, range(3)) == "decoded" and weight.grouped(x, range(5)) == "rebuilt"


def test_it_is_off_where_it_is_not_asked_for():
    weight = GGUFBlocks(256, 256, block_type="Q4_K", products=Products("cpu", dependent=True))
    assert Products("cpu").chain is None and weight.stream_product(object()) is None
