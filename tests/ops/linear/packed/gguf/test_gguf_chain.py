"""Four products of one row with blocks of GGUF files in one launch: what is refused everywhere, the source on a
processor, results on a GPU."""

import random

import pytest
import torch
from cuda_kernels import chain_source, loaded, miss

from transect.ops.linear.few_rows.cuda import SHARED
from transect.ops.linear.packed.gguf import gguf_chain
from transect.ops.linear.packed.gguf.gguf_chain import ChainWeights, GGUFChain, fitting
from transect.ops.linear.packed.gguf.gguf_matmul import drawn
from transect.ops.linear.packed.gguf.gguf_row import SPAN, BlockPart, values
from transect.spec.numbers.gguf import UNITS


def matrix(*parts, k, device="cpu"):
    return tuple(
        BlockPart(drawn(name, outputs, k, device, seed), name, outputs) for seed, (name, outputs) in enumerate(parts)
    )


def row(size, device="cpu", seed=1):
    return torch.randn(1, size, generator=torch.Generator().manual_seed(seed)).to(device, torch.bfloat16)


def weights_of(d, q, f, n, types, device="cpu", bias=False):
    def vector(size):
        return 1 + row(size, device, size)[0] / 8

    v = n // 4
    o, gate_up, down, qk, own_v = types
    return ChainWeights(
        matrix((o, d), k=q, device=device), matrix((gate_up, 2 * f), k=d, device=device),
        matrix((down, d), k=f, device=device), matrix((qk, n - v), (own_v, v), k=d, device=device),
        (vector(d), vector(d)), (1e-5, 1e-6), vector(n) if bias else None,
    )  # fmt: skip


TYPES = ("Q4_K", "Q4_K", "Q6_K", "Q4_K", "Q6_K")
OTHERS = ("Q8_0", "Q5_K", "Q4_0", "Q2_K", "Q3_K")


def test_what_the_kernel_does_not_take_is_said():
    weights = weights_of(256, 512, 256, 64, TYPES)
    assert gguf_chain.chain_refusal(weights) is None
    assert "follow" in gguf_chain.chain_refusal(weights._replace(down=weights.o))
    assert "bfloat16" in gguf_chain.chain_refusal(weights._replace(bias=torch.ones(64)))
    two = weights._replace(gate_up=matrix(("Q4_K", 256), ("Q6_K", 256), k=256))
    assert "one part" in gguf_chain.chain_refusal(two)


@pytest.mark.parametrize("name", UNITS)
def test_stages_fit(name):
    unit = UNITS[name].unit
    for k in (256, 4096, 14336, 28672):
        part = BlockPart(torch.empty(1, k // 256, unit, device="meta"), name, 16)
        stages, steps = fitting(((part,),) * 4), -(-k // 4096)
        taken = 1024 + 16 * (stages * unit + steps * SPAN + 12 * 8 + 64) + 4096
        assert taken <= SHARED and 2 <= stages <= 5


def test_the_reference_is_four_products_and_two_norms():
    weights = weights_of(256, 512, 256, 64, TYPES, bias=True)
    a, r = row(512).double(), row(256, seed=2).double()
    y, u = gguf_chain.reference(a, r, weights)
    o, gate_up, down, qkv = (values(each, torch.float64) for each in weights.matrices)

    def normed(t, place):
        return t / (t.square().mean() + weights.eps[place]).sqrt() * weights.norms[place].double()

    t = a @ o.T + r
    h = (normed(t, 0) @ gate_up.T).view(-1, 2, 16)
    want = (h[:, 0] / (1 + (-h[:, 0]).exp()) * h[:, 1]).reshape(1, -1) @ down.T + t
    torch.testing.assert_close(u, want)
    torch.testing.assert_close(y, normed(want, 1) @ qkv.T + weights.bias.double())


@pytest.fixture(scope="module")
def chain():
    return loaded(GGUFChain)


@pytest.mark.gpu
@pytest.mark.parametrize("types", [TYPES, OTHERS])
@pytest.mark.parametrize("sizes", [(256, 512, 256, 64), (2048, 2048, 8192, 3072), (4096, 4096, 14336, 6144)])
def test_four_products_have_the_values(chain, types, sizes):
    d, q, f, n = sizes
    weights = weights_of(d, q, f, n, types, "cuda", bias=d == 2048)
    x, residual = row(q, "cuda"), row(d, "cuda", 2)
    want_y, want_u = gguf_chain.reference(x.double(), residual.double(), weights)
    first = None
    for stages in (5, 3, 2):
        for dependent in (False, True):
            y, u = chain(x, residual, weights, dependent_launch=dependent, stages=stages)
            assert miss(u, want_u) < 0.01
            assert miss(y, want_y) < 0.015
            first = first or (y, u)
            assert torch.equal(first[0], y) and torch.equal(first[1], u)  # how far it reads ahead changes no bit


def on_host(monkeypatch, instead=None, multiprocessors=3):
    return chain_source(monkeypatch, GGUFChain, instead, multiprocessors)


def check(found, weights, x, residual):
    want_y, want_u = gguf_chain.reference(x.double(), residual.double(), weights)
    assert miss(found[1], want_u) < 0.01, "wrong"
    assert miss(found[0], want_y) < 0.015, "wrong"


@pytest.mark.parametrize("types", [TYPES, pytest.param(OTHERS, marks=pytest.mark.prove)])
def test_the_source_has_the_values_in_any_order_of_threads(monkeypatch, types):
    kernel = on_host(monkeypatch)
    weights = weights_of(256, 512, 768, 320, types, bias=types is TYPES)
    x, residual = row(512), row(256, seed=2)
    found = []
    for order, stages in enumerate((5, 2)):
        kernel._launch.draw(order)
        y, u = kernel(x, residual, weights, stages=stages)
        check((y, u), weights, x, residual)
        found.append(torch.cat((y, u), 1))
    assert torch.equal(*found)


@pytest.mark.prove
@pytest.mark.parametrize("seed", range(6))
def test_the_source_has_the_values_of_random_sizes(monkeypatch, seed):
    draw = random.Random(seed)
    kernel = on_host(monkeypatch, multiprocessors=draw.choice((1, 2, 5, 9)))
    d, q, f = (256 * draw.randint(1, most) for most in (3, 20, 40))
    types = [draw.choice(list(UNITS)) for _ in range(5)]
    weights = weights_of(d, q, f, 64 * draw.randint(1, 6), types, bias=draw.random() < 0.5)
    for turn in range(2):
        kernel._launch.draw(seed * 2 + turn)
        x, residual = row(q, seed=seed + turn), row(d, seed=turn)
        check(kernel(x, residual, weights, stages=draw.randint(2, 4)), weights, x, residual)


@pytest.mark.prove
def test_the_other_lanes_must_have_left_their_numbers(monkeypatch):
    """What ``chain.cuh`` relies on, test_int4_chain.py takes away."""
    kernel = on_host(monkeypatch, ("      __syncwarp();\n      uint32_t words", "      uint32_t words"))
    weights, x, residual = weights_of(256, 512, 768, 320, TYPES), row(512), row(256, seed=2)
    with pytest.raises(AssertionError, match="wrong"):
        for seed in range(4):
            kernel._launch.draw(seed)
            check(kernel(x, residual, weights), weights, x, residual)
