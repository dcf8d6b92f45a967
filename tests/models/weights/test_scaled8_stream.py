"""A layer's products in 8 bits on the residual stream, for more rows than norms can be part of products."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from cuda_kernels import loaded

from transect.checkpoints.dummy import dummy_weights
from transect.checkpoints.load import allocated, fill
from transect.engine.executors.gpu.setup import gpu_ops
from transect.models.context import PagedContext, Wanted
from transect.models.decoder import Decoder
from transect.models.fused_stack import FusedStack
from transect.models.weights.dense import Dense
from transect.models.weights.scaled8 import Products8, Scaled8, Stream8
from transect.ops.attention.paged.batch import PagedBatch
from transect.ops.linear.packed.eight_bit import scaled8_hopper, scaled8_rounding, scaled8_rows, scaled8_tiles
from transect.ops.norm import rms_norm
from transect.ops.opset import resolve_ops
from transect.spec.model import ModelConfig

FORMATS = {"fp8": (True, False), "int8": (False, False), "blocks": (True, True)}
D, FFN = (128, 256) if torch.cuda.is_available() else (32, 48)


def layer(name, products, device):
    """The weights of o, gate over up, down, and q, k, v."""
    made = []
    for seed, (outputs, inputs) in enumerate(((D, D), (2 * FFN, D), (D, FFN), (D + 16, D))):
        generator = torch.Generator().manual_seed(seed)
        fp8, blocks = FORMATS[name]
        weight = Scaled8(
            outputs, inputs, fp8=fp8, blocks=blocks, products=products, device=device, dtype=torch.bfloat16
        )
        values = torch.randn(outputs, inputs, generator=generator) / inputs**0.5
        codes, scale = scaled8_rounding.rounded(values, fp8)
        if blocks:
            scale = torch.rand(-(-outputs // 128), -(-inputs // 128), generator=generator) / 64 + 1e-3
        weight.codes.copy_(codes)
        weight.scale.copy_(scale)
        made.append(weight)
    return made


def rows(m, k, device, seed=1):
    return torch.randn(m, k, generator=torch.Generator().manual_seed(seed)).to(device, torch.bfloat16)


def compare(weights, m, device):
    o, gate_up, down, qkv = weights
    x, residual = rows(m, D, device), rows(m, D, device, 2)
    norms = [rows(1, D, device, seed)[0] + 1 for seed in (3, 4)]
    streams = [Stream8(weight._products.few, weight._products.many, weight) for weight in weights]
    sizes = [(*weight.shape, weight is gate_up) for weight in weights]
    assert streams[3].takes(x, sizes) and not streams[3].takes(x.float(), sizes)
    first = streams[0].add(x, residual, norms[0], 1e-5)
    second = streams[2].add(streams[1].gated(first), first.total, norms[1], 1e-5)
    found = second.total, streams[3].linear(second), streams[2].plain(streams[1].gated(first))

    total = o(x) + residual
    gate, up = gate_up(rms_norm.reference(total, norms[0], 1e-5)).float().chunk(2, 1)
    ended = down((F.silu(gate) * up).bfloat16())
    last = total + ended
    want = last, qkv(rms_norm.reference(last, norms[1], 1e-5)), ended
    for one, two in zip(found, want, strict=True):
        assert (one.float() - two.float()).norm() <= 0.05 * two.float().norm()


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU with its own kernels, below")
def test_norm_and_gate_round_for_the_next_product():
    """In the interpreter, which cuts fp8 off; the kernels of few rows are never asked."""
    compare(layer("int8", Products8(object(), scaled8_tiles.Tiles8()), "cpu"), 17, "cpu")


def step(model, tokens, wanted):
    """The hidden states of ``tokens`` tokens, of which some are wanted, and the cache."""
    device = model.norm.weight.device
    caches = model.new_kv_cache(tokens, 16, torch.bfloat16)
    for cache in caches:
        cache.zero_()
    rows = tokens - 2  # the first has three tokens

    def ints(numbers):
        return torch.tensor(list(numbers), dtype=torch.int32, device=device)

    tables, lengths = ints(range(rows))[:, None], ints([3] + [1] * (rows - 1))
    some = PagedBatch(tables[-wanted:], ints(range(wanted + 1)), lengths[-wanted:], 16)
    last = Wanted(ints(range(tokens - wanted, tokens)), some)
    context = PagedContext(*caches, tables, ints([0, *range(3, tokens + 1)]), lengths, model.ops, wanted=last)
    with torch.no_grad():
        return model(torch.arange(tokens, device=device) % 61, context.positions(), context), *context.k_cache


def compare_steps(model, monkeypatch, stream, tokens, wanted):
    found = []
    for made in (stream, lambda weight, products: None):
        monkeypatch.setattr(Scaled8, "stream_product", made)
        model.stack = FusedStack(model, max_positions=64)
        assert (model.stack._on_stream is None) == (made is not stream)
        found.append(step(model, tokens, wanted))
    for one, two in zip(*found, strict=True):
        assert (one.float() - two.float()).norm() <= 0.05 * two.float().norm()


def model_in_int8(config, ops, products, device):
    int8 = partial(Scaled8, fp8=False, products=products)
    kinds = lambda name: Dense if name == "head" else int8  # noqa: E731
    model = allocated(Decoder(config, "meta", torch.bfloat16, ops=ops, kinds=kinds), device)
    return fill(model, dummy_weights(config, device=device)).requires_grad_(False)


TINY = ModelConfig("llama", 61, 32, 2, 2, 1, 16, 48, 64)


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU with its own kernels, below")
def test_a_step_of_prompts_on_the_stream(monkeypatch):
    ops = replace(resolve_ops("cpu"), stream_products=object())
    model = model_in_int8(TINY, ops, Products8(object(), scaled8_tiles.Tiles8()), "cpu")
    compare_steps(model, monkeypatch, lambda w, _: Stream8(w._products.few, w._products.many, w), 19, 17)


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "wanted"), [(40, 1), (300, 200)])
def test_a_step_of_prompts_on_a_gpu(monkeypatch, tokens, wanted):
    few = loaded(scaled8_rows.CudaRows8)
    ops = gpu_ops(torch.device("cuda"))
    config = replace(TINY, dim=1024, n_heads=8, n_kv_heads=2, head_dim=128, ffn_dim=2048)
    model = model_in_int8(config, ops, Products8(few, scaled8_tiles.Tiles8(dependent_launch=True), True), "cuda")
    compare_steps(model, monkeypatch, Scaled8.stream_product, tokens, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("m", [17, 64, 256])
@pytest.mark.parametrize("by_hopper", [False, True])
def test_on_a_gpu(name, m, by_hopper):
    few = loaded(scaled8_rows.CudaRows8)
    fp8, blocks = FORMATS[name]
    kind = scaled8_hopper.kind_of(fp8, blocks)
    hopper = loaded(lambda: scaled8_hopper.HopperRows8(kind=kind)) if by_hopper else None
    many = scaled8_tiles.Tiles8(dependent_launch=True, hopper=hopper)
    compare(layer(name, Products8(few, many, True), "cuda"), m, "cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU with its own kernels, above")
def test_a_gate_within_the_product_leaves_its_rows_to_the_next_product(monkeypatch):
    """The kernels of few rows, which would take them sixteen at a time, are never asked."""
    many = scaled8_tiles.Tiles8()
    monkeypatch.setattr(many, "gated", lambda a, s, codes, scale, fp8: torch.ones(len(a), FFN, dtype=torch.bfloat16))
    o, gate_up, down, _ = layer("fp8", Products8(object(), many), "cpu")
    first, second, third = (Stream8(weight._products.few, many, weight) for weight in (o, gate_up, down))
    stream = first.add(rows(17, D, "cpu"), rows(17, D, "cpu", 2), rows(1, D, "cpu", 3)[0], 1e-5)
    want = down(torch.ones(17, FFN, dtype=torch.bfloat16))
    assert torch.equal(third.plain(second.gated(stream)), want)


def test_products_of_several_kinds_are_not_on_one_stream():
    kinds = [layer(name, Products8(object(), scaled8_tiles.Tiles8(), True), "meta")[0] for name in FORMATS]
    assert len({weight.stream_product(object()).leaves for weight in kinds}) == 3
    stream = layer("fp8", Products8(object(), None, True), "meta")[0].stream_product(object())
    x = torch.empty(17, 128, dtype=torch.bfloat16, device="meta")
    assert stream.takes(x[:16], []) and not stream.takes(x, [])
