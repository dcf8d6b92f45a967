"""``FusedStack`` computes what the layers compute one by one."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from gpu_engine import gpu_model

from transect.checkpoints.load import allocated
from transect.models.context import PagedContext, VarlenContext
from transect.models.decoder import Decoder
from transect.models.fused_stack import FusedStack, Fusions, refusal
from transect.models.weights.adapted import Adapted
from transect.models.weights.dense import DenseStream
from transect.ops.lang.jit import INTERPRETED
from transect.ops.linear.stream_products import ResidualStream
from transect.ops.opset import OPERATORS, resolve_ops, with_dependent_launch
from transect.ops.registry import get
from transect.spec.model import ModelConfig
from transect.spec.shapes import PRESETS

BLOCK = 4
TINY = ModelConfig(
    architecture="llama",
    vocab_size=61,
    dim=32,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=16,
    ffn_dim=48,
    max_position=64,
)
CONFIGS = {
    "llama": TINY,
    "qwen2": dataclasses.replace(
        TINY, architecture="qwen2", qkv_bias=True, sliding_window=5, full_attention_layers=(0,)
    ),
    "qwen3": dataclasses.replace(TINY, architecture="qwen3", qk_norm=True),
    "biased": dataclasses.replace(TINY, qkv_bias=True, o_bias=True, mlp_bias=True),
}


def build(config, ops):
    model = Decoder(config, dtype=torch.float32, ops=ops).requires_grad_(False)
    model.init_weights(0.3, torch.Generator().manual_seed(0))
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.copy_(1 + torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))) / 5)
    return model


def paged(model, lengths, new):
    caches = model.new_kv_cache(40, BLOCK, torch.float32)
    for cache in caches:
        cache.normal_(generator=torch.Generator().manual_seed(1))
    columns = -(-max(lengths) // BLOCK)
    tables = torch.randperm(40, generator=torch.Generator().manual_seed(2))[: len(lengths) * columns]
    starts = torch.tensor([0, *new]).cumsum(0, dtype=torch.int32)
    lengths = torch.tensor(lengths, dtype=torch.int32)
    return PagedContext(*caches, tables.view(-1, columns).to(torch.int32), starts, lengths, model.ops)


def both(model, fusions=None, lengths=(9, 3, 20, 1), new=(1, 3, 7, 1)):
    """(hidden states, caches) layer by layer and fused."""
    found = []
    for stack in (model.run_layers, FusedStack(model, max_positions=64, fusions=fusions)):
        context = paged(model, lengths, new)
        model.stack = stack
        tokens = torch.arange(sum(new)) % 61
        hidden = model(tokens, context.positions(), context)
        found.append((hidden, context.k_cache, context.v_cache))
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_same_as_layer_by_layer(name):
    model = build(CONFIGS[name], resolve_ops("cpu"))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    model.join()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    plain, fused = both(model)
    for one, two in zip(plain, fused, strict=True):
        torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-4)


class TorchStreams:
    """What ``StreamProducts`` computes, by torch; counts its products."""

    def __init__(self, rows):
        self.rows, self.products = rows, 0

    def takes(self, x, sizes):
        assert {gated for _, _, gated in sizes} == {False, True} and len(sizes) == 4
        return len(x) <= self.rows

    def add(self, x, weight, residual, scale, eps):
        self.products += 1
        total = F.linear(x, weight) + residual
        return ResidualStream(total, total * scale, total.square().unflatten(-1, (-1, 16)).sum(-1), eps)

    def linear(self, stream, weight, bias=None):
        y = self.product(stream.scaled, weight)
        if stream.squares is not None:
            squares = stream.squares.sum(-1, keepdim=True) / stream.total.shape[-1]
            y = y * (squares + stream.eps).rsqrt()
        return y if bias is None else y + bias

    def product(self, x, weight):
        self.products += 1
        return F.linear(x, weight)

    def gate_up(self, stream, weight):
        gate, up = self.linear(stream, weight).chunk(2, dim=-1)
        return F.silu(gate) * up


@pytest.mark.parametrize("name", CONFIGS)
def test_norms_in_the_products_change_nothing(name):
    streams = TorchStreams(12)
    ops = dataclasses.replace(resolve_ops("cpu"), stream_products=streams)
    model = build(CONFIGS[name], ops)
    plain, fused = both(model)
    # All four of two layers; a bias after attention leaves all of them ordinary.
    assert streams.products == (0 if name == "biased" else 8)
    torch.testing.assert_close(fused[0], plain[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(fused[1:], plain[1:], rtol=1e-4, atol=1e-4)
    streams.products, streams.rows = 0, 11
    both(model)
    both(model, Fusions(add_norm=False))
    assert streams.products == 0


def test_products_between_two_attentions_go_together_for_one_row(monkeypatch):
    """Where a weight has such a launch: the layers' results are the same, and the last layer ends as ever."""
    calls = []

    def chain(self, after):
        gate_up, down, qkv = after

        def run(x, residual, norms, eps):
            calls.append(len(x))
            first = self.add(x, residual, norms[0], eps[0])
            second = down.add(gate_up.gated(first), first.total, norms[1], eps[1])
            return qkv.linear(second), second.total

        return run

    monkeypatch.setattr(DenseStream, "chain", chain)
    model = build(CONFIGS["qwen2"], dataclasses.replace(resolve_ops("cpu"), stream_products=TorchStreams(12)))
    plain, fused = both(model, lengths=(9,), new=(1,))
    assert calls == [1]
    torch.testing.assert_close(fused, plain, rtol=1e-4, atol=1e-4)
    both(model, lengths=(9, 4), new=(1, 1))
    assert calls == [1]


@pytest.mark.parametrize("product", ["o", "down"])
def test_an_adapter_in_one_layer_leaves_all_products_apart(product):
    streams = TorchStreams(12)
    model = build(TINY, dataclasses.replace(resolve_ops("cpu"), stream_products=streams))
    held = model.layers[1].attention if product == "o" else model.layers[1].mlp
    base = getattr(held, product)
    adapted = Adapted(base, 2, 4.0, seed=0).requires_grad_(False)
    torch.nn.init.normal_(adapted.b, generator=torch.Generator().manual_seed(3))
    setattr(held, product, adapted)
    plain, fused = both(model)
    assert streams.products == 0
    torch.testing.assert_close(fused[0], plain[0], rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "rows"),
    [("qwen3-0.6b", 1), ("llama-3.1-8b", 1), *(("qwen3-0.6b", rows) for rows in (40, 64, 96, 100, 230, 256))],
)
def test_on_an_h200_with_norms_in_the_products_or_apart(name, rows):
    if not torch.cuda.is_available() or "H200" not in torch.cuda.get_device_name():
        pytest.skip("needs an H200: norms are in the products where that was measured")
    config = dataclasses.replace(PRESETS[name], n_layers=2, vocab_size=64, max_position=256)
    model = gpu_model(config, torch.bfloat16, std=0.02)
    products, found = model.ops.stream_products, []
    tokens = torch.arange(rows, device="cuda") % 64
    tables = torch.randperm(3 * rows, generator=torch.Generator().manual_seed(2)).view(rows, 3).tolist()
    for streams in (products, None):
        model.ops = dataclasses.replace(model.ops, stream_products=streams)
        model.stack = FusedStack(model, max_positions=256)
        caches = model.new_kv_cache(3 * rows, 16, torch.bfloat16)
        for cache in caches:
            cache.normal_(generator=torch.Generator("cuda").manual_seed(1))
        numbers = [tables, list(range(rows + 1)), [33 + row % 15 for row in range(rows)]]
        context = PagedContext(
            *caches, *(torch.tensor(n, dtype=torch.int32, device="cuda") for n in numbers), model.ops
        )
        hidden = model(tokens, context.positions(), context)
        found.append((hidden.double(), *(cache.double() for cache in context.k_cache)))
    assert products.takes(hidden, model.stack._layers[0].sizes)
    for one, two in zip(*found, strict=True):
        assert (one - two).norm() <= 0.03 * two.norm()


@pytest.mark.parametrize("switched_off", [field.name for field in dataclasses.fields(Fusions)])
def test_each_fusion_can_be_off(switched_off):
    model = build(CONFIGS["qwen3"], resolve_ops("cpu"))
    plain, fused = both(model, Fusions(**{switched_off: False}))
    torch.testing.assert_close(fused[0], plain[0], rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(
    not INTERPRETED, reason="Triton's interpreter is chosen before its import, on machines without a GPU"
)
@pytest.mark.parametrize("new", [(1, 1, 1, 1), (1, 3, 7, 1)], ids=["decode", "ragged"])
def test_triton_kernels(new):
    kernels = {name: get(name).implementations.get("triton") for name in OPERATORS}
    loaded = {name: kernel.load() for name, kernel in kernels.items() if kernel is not None}
    assert {"linear", "gate_up", "add_rms_norm", "rotary_kv_write", "paged_attention"} <= set(loaded)
    ops = with_dependent_launch(dataclasses.replace(resolve_ops("cpu"), **loaded), False)
    model = build(CONFIGS["qwen3"], ops)
    plain, fused = both(model, new=new)
    model = build(CONFIGS["qwen3"], resolve_ops("cpu"))
    for reference, one, two in zip(both(model, new=new)[0], plain, fused, strict=True):
        torch.testing.assert_close(one, reference, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(two, reference, rtol=1e-3, atol=1e-3)


def test_memory_of_a_model_without_any():
    model = allocated(Decoder(TINY, "meta", torch.float32), "cpu")
    layer = model.layers[1]
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert layer.attention.k.weight.data_ptr() == layer.attention.q.weight.data_ptr() + layer.attention.q.weight.nbytes
    assert set(model.state_dict()) == set(build(TINY, resolve_ops("cpu")).state_dict())
    tied = allocated(Decoder(dataclasses.replace(TINY, tied_embeddings=True), "meta", torch.float32), "cpu")
    assert tied.head.weight is tied.embed.weight and not tied.head.weight.is_meta


def test_other_contexts_and_models():
    model = build(TINY, resolve_ops("cpu"))
    context = VarlenContext(torch.tensor([0, 5, 8], dtype=torch.int32), model.ops)
    plain = model(torch.arange(8), context.positions(), context)
    model.stack = FusedStack(model, max_positions=64)
    assert torch.equal(model(torch.arange(8), context.positions(), context), plain)
    gpt2 = dataclasses.replace(TINY, architecture="gpt2", norm="layernorm", gated_mlp=False, activation="gelu_tanh")
    assert refusal(TINY) is None and "RMSNorm" in str(refusal(gpt2))
