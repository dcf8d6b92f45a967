"""The kernels of a mixture of experts on a GPU: at real sizes, in graphs that are replayed with other routings."""

import dataclasses

import pytest
import torch
from gpu_engine import TINY, gpu_model

from transect.engine.executors.gpu.setup import gpu_ops
from transect.models.decoder import Decoder
from transect.models.moe import MoE
from transect.ops.moe import (
    combining,
    gating,
    grouped_blocks,
    grouped_gate_up,
    grouped_scaled8,
    ordering,
    router,
    routing,
)
from transect.ops.moe.triton import triton_grouped_gate_up, triton_grouped_linear
from transect.ops.opset import resolve_ops
from transect.spec.moe import MoEConfig
from transect.spec.numbers.gguf import UNITS
from transect.spec.shapes import PRESETS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
QWEN = dataclasses.replace(PRESETS["qwen3-30b-a3b"], n_layers=1, vocab_size=64)


def drawn(*shape, seed=0, dtype=torch.bfloat16, scale=1.0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return scale * torch.randn(*shape, generator=generator, device="cuda", dtype=dtype)


@pytest.mark.parametrize("tokens", [1, 3, 16, 64, 256, 1000, 4096])
def test_routing_is_that_of_the_reference(tokens):
    """128 experts, 8 a token: choices, weights, places; nothing of it is rounded."""
    logits = drawn(tokens, 128, seed=tokens, dtype=torch.float32)
    weights, experts = gating.triton_gating(logits, None, 8)
    want_weights, want_experts = gating.reference(logits, None, 8)
    assert torch.equal(experts, want_experts)
    torch.testing.assert_close(weights, want_weights, rtol=1e-5, atol=1e-6)
    for found, want in zip(ordering.triton_order(experts, 128), ordering.reference(experts, 128), strict=True):
        assert torch.equal(found, want)


@pytest.mark.parametrize("tokens", [1, 2, 7, 16, 33, 64, 65, 1000])
@pytest.mark.parametrize(("first", "held"), [(0, None), (0, 64), (64, 64), (96, 32)])
def test_routing_in_one_launch(tokens, first, held):
    """Also where other ranks have the rest of the experts."""
    logits = drawn(tokens, 128, seed=tokens, dtype=torch.float32)
    found = routing.triton_route(logits, None, 8, first, held)
    want = routing.reference(logits, None, 8, first, held)
    torch.testing.assert_close(found[0], want[0], rtol=1e-5, atol=1e-6)
    assert all(torch.equal(a, b) for a, b in zip(found[1:], want[1:], strict=True))


@pytest.mark.parametrize("tokens", [1, 16, 65, 256, 3000])
def test_scores_are_in_float32(tokens):
    """The exact products of bfloat16 tokens and weights, added up in float32. A tensor core adds 16 of them at a time
    to a sum that it cuts off, not rounds: by up to a unit in the last place of the largest sum each time."""
    x, weight, bias = drawn(tokens, 2048), drawn(128, 2048, seed=1), drawn(128, seed=2)
    want = x.double() @ weight.double().T + bias.double()
    unit = 2.0 ** (want.abs().max().log2().floor().item() - 23)
    assert (router.triton_router(x, weight, bias) - want).abs().max() < 2048 / 16 * unit


@pytest.mark.parametrize("tokens", [1, 2, 16, 63, 256, 2048])
@pytest.mark.parametrize("skewed", [False, True])
def test_products_at_the_sizes_of_a_model(tokens, skewed):
    """Against float64, within what torch's own products of these rows in bfloat16 miss."""
    experts = torch.arange(8, device="cuda", dtype=torch.int32).repeat(tokens, 1)  # all go to the same eight
    if not skewed:
        experts = ordering.draw(tokens, 8, 128, tokens, "cuda")
    order, places, starts = ordering.triton_order(experts, 128)
    x, weight = drawn(tokens, 2048), drawn(128 * 768, 2048, seed=1, scale=0.02)
    down = drawn(128 * 2048, 768, seed=2, scale=0.02)
    inner = triton_grouped_linear(x, weight, starts, order)
    apart = x[torch.arange(tokens, device="cuda").repeat_interleave(8)][order.long()]
    for e in experts.unique().tolist():
        own = slice(int(starts[e]), int(starts[e + 1]))
        want = apart[own].double() @ weight[e * 768 : (e + 1) * 768].double().T
        assert (inner[own] - want).abs().max() <= 2 * (want.bfloat16() - want).abs().max() + 1e-3
    up = drawn(128 * 768, 2048, seed=4, scale=0.02)
    both = triton_grouped_gate_up(x, weight, up, starts, order)
    for e in experts.unique().tolist():
        own, rows = slice(int(starts[e]), int(starts[e + 1])), slice(e * 768, (e + 1) * 768)
        g, u = (apart[own].double() @ each[rows].double().T for each in (weight, up))
        want = g * g.sigmoid() * u
        assert (both[own] - want).abs().max() <= 2 * (want.bfloat16() - want).abs().max() + 1e-3
    y = triton_grouped_linear(inner, down, starts)
    for e in experts.unique().tolist()[:5]:
        own = slice(int(starts[e]), int(starts[e + 1]))
        want = inner[own].double() @ down[e * 2048 : (e + 1) * 2048].double().T
        assert (y[own] - want).abs().max() <= 2 * (want.bfloat16() - want).abs().max() + 1e-3
    weights = drawn(tokens, 8, seed=3, dtype=torch.float32).abs()
    out = combining.triton_combine(y, places, weights)
    torch.testing.assert_close(out, combining.reference(y, places, weights), rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("tokens", [1, 16, 64, 300])
@torch.inference_mode()
def test_a_layer_in_a_graph_follows_its_input(tokens):
    """Nothing of the routing is read by the host: a replay with other inputs is what runs without a graph."""
    moe = MoE(QWEN, QWEN.moe, gpu_ops(torch.device("cuda")), device="cuda", dtype=torch.bfloat16)
    for index, weight in enumerate(moe.parameters()):
        weight.copy_(drawn(*weight.shape, seed=index, scale=0.05))
    x = drawn(tokens, QWEN.dim)
    moe(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = moe(x)
    for seed in (5, 6):
        x.copy_(drawn(tokens, QWEN.dim, seed=seed))
        graph.replay()
        got = out.clone()
        assert torch.equal(got, moe(x)) and got.isfinite().all()


@torch.inference_mode()
def test_a_layer_is_the_layer_on_the_cpu():
    """float32: router, products and sum of a layer with shared experts and a sigmoid router."""
    config = dataclasses.replace(
        TINY, architecture="dots1", moe=MoEConfig(8, 3, 48, score="sigmoid", score_bias=True, scale=2.0, shared_dim=32)
    )
    cpu = MoE(config, config.moe, resolve_ops("cpu"), dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    for weight in (*cpu.parameters(), *cpu.buffers()):
        weight.copy_(0.3 * torch.randn(weight.shape, generator=generator))
    gpu = MoE(config, config.moe, gpu_ops(torch.device("cuda")), device="cuda", dtype=torch.float32)
    gpu.load_state_dict(cpu.state_dict())
    for tokens in (1, 5, 40):
        x = torch.randn(tokens, config.dim, generator=generator)
        torch.testing.assert_close(gpu(x.cuda()).cpu(), cpu(x), rtol=1e-4, atol=1e-4)


def test_gradients_are_those_of_the_reference():
    """float32 through router, products and sum, as training runs them."""
    config = dataclasses.replace(TINY, architecture="qwen3_moe", moe=MoEConfig(8, 2, 48))
    found = []
    for device, ops in (
        ("cpu", resolve_ops("cpu", differentiable=True)),
        ("cuda", resolve_ops("cuda", ("triton", "torch"), differentiable=True)),
    ):
        moe = MoE(config, config.moe, ops, dtype=torch.float32)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for weight in moe.parameters():
                weight.copy_(0.3 * torch.randn(weight.shape, generator=generator))
        moe.to(device)
        x = torch.randn(37, config.dim, generator=generator).to(device).requires_grad_()
        moe(x).square().sum().backward()
        found.append([x.grad.cpu(), *(weight.grad.cpu() for weight in moe.parameters())])
    for mine, want in zip(*found, strict=True):
        torch.testing.assert_close(mine, want, rtol=1e-3, atol=1e-3 * float(want.abs().max()))


def test_gradients_in_bfloat16_at_the_sizes_of_a_model():
    """Gate and up of experts with many rows, some and none: errors are those of rounding to bfloat16."""
    experts, dim, width, tokens, k = 6, 512, 384, 700, 2
    generator = torch.Generator().manual_seed(0)
    chosen = torch.tensor([[0, 1]] * 600 + [[0, 3]] * 97 + [[4, 3]] * 3, dtype=torch.int32)
    order, _, starts = ordering.reference(chosen, experts)
    x, g = torch.randn(tokens, dim, generator=generator), torch.randn(tokens * k, width, generator=generator)
    weights = [0.05 * torch.randn(experts * width, dim, generator=generator) for _ in range(2)]
    rounded = [t.bfloat16() for t in (x, *weights, g)]
    wide = [t.cuda().double().requires_grad_() for t in rounded]
    narrow = [t.cuda().requires_grad_() for t in rounded]
    grouped_gate_up.reference(*wide[:3], starts.cuda(), order.cuda()).backward(wide[3].detach())
    grouped_gate_up.with_gradient(*narrow[:3], starts.cuda(), order.cuda()).backward(narrow[3].detach())
    for mine, want in zip(narrow[:3], wide[:3], strict=True):
        assert (mine.grad.double() - want.grad).norm() < 8e-3 * want.grad.norm()
    assert not narrow[1].grad.unflatten(0, (experts, -1))[[2, 5]].any()


@torch.inference_mode()
def test_a_whole_model_draws_the_tokens_of_the_cpu():
    """Through the executor, with graphs and a step ahead."""
    import random

    from gpu_engine import BLOCK, VOCAB, runner_for, scheduler_config
    from runner_fuzz import assert_same, random_arrivals, run_workload

    from transect.engine.executors.runner import Runner

    config = dataclasses.replace(TINY, architecture="qwen3_moe", moe=MoEConfig(8, 2, 48))
    cpu = Decoder(config, dtype=torch.float32, ops=resolve_ops("cpu", batch_invariant=True)).requires_grad_(False)
    cpu.init_weights(0.3, torch.Generator().manual_seed(0))
    gpu = gpu_model(config, torch.float32, state=cpu.state_dict())
    rng = random.Random(1)
    limits = scheduler_config(rng)
    arrivals = random_arrivals(rng, VOCAB, 10)
    caches = cpu.new_kv_cache(limits.num_blocks, BLOCK, torch.float32)
    expected, _ = run_workload(Runner(cpu, *caches), limits, arrivals, lag=0)
    found, _ = run_workload(runner_for(gpu, limits, graphs=True), limits, arrivals, lag=1)
    assert_same(expected, found, arrivals)


@pytest.mark.parametrize("tokens", [1, 64, 1000])
@pytest.mark.parametrize("name", [*UNITS, "int4", "int432"])
def test_experts_in_blocks(name, tokens):
    """Tiles that end within an expert's outputs, inputs that end within a unit; the same in a graph."""
    inputs = 1408 if name.startswith("int4") else 1440
    shared = grouped_blocks._inputs(name, tokens, 16, 4, 144, inputs, "cuda")
    x, bias = drawn(tokens, inputs), drawn(16 * 144, seed=1)
    wanted = grouped_blocks.reference(x.double(), **shared, bias=bias.double())
    check_in_a_graph(lambda: grouped_blocks.triton_grouped_blocks(x, **shared, bias=bias), wanted)


@pytest.mark.parametrize("tokens", [1, 64, 1000])
@pytest.mark.parametrize(("fp8", "blocked"), [(True, False), (True, True), (False, False)])
def test_experts_of_8_bits(fp8, blocked, tokens):
    shared = grouped_scaled8._inputs(tokens, 16, 4, 256 if blocked else 144, 1440, fp8, blocked, "cuda")
    x, bias = drawn(tokens, 1440), drawn(len(shared["codes"]), seed=1)
    wanted = grouped_scaled8.reference(x.double(), **shared, bias=bias.double())
    check_in_a_graph(lambda: grouped_scaled8.triton_grouped_scaled8(x, **shared, bias=bias), wanted)


def check_in_a_graph(call, wanted):
    found = call()
    assert (found.double() - wanted).norm() < 5e-3 * wanted.norm()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = call()
    graph.replay()
    assert torch.equal(again, found)
