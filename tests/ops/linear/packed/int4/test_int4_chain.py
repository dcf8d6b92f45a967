"""Four products of one row in 4 bits in one launch: what it refuses everywhere, its source on a processor, its results
on a GPU."""

import random

import pytest
import torch
from cuda_kernels import chain_source, int4_weight, loaded

from transect.ops.linear.packed.int4 import int4_chain, int4_matmul
from transect.ops.linear.packed.int4.int4_chain import ChainWeights, Int4Chain, Matrix4


def weights_of(d, q, f, n, group=128, device="cpu", bias=False):
    generator = torch.Generator().manual_seed(d + f)

    def matrix(outputs, inputs):
        return Matrix4(int4_weight(outputs, inputs, group, device), outputs)

    def vector(size):
        return (1 + torch.randn(size, generator=generator) / 8).to(device, torch.bfloat16)

    return ChainWeights(
        matrix(d, q), matrix(2 * f, d), matrix(d, f), matrix(n, d), (vector(d), vector(d)), (1e-5, 1e-6),
        vector(n) if bias else None,
    )  # fmt: skip


def row(size, device="cpu", seed=1):
    return torch.randn(1, size, generator=torch.Generator().manual_seed(seed)).to(device, torch.bfloat16)


def check(found, wanted):
    (y, u), (want_y, want_u) = found, wanted
    assert (u.double() - want_u).norm() <= 0.01 * want_u.norm()
    assert (y.double() - want_y).norm() <= 0.015 * want_y.norm()


def test_what_the_kernel_does_not_take_is_said():
    weights = weights_of(128, 256, 384, 48)
    assert int4_chain.refusal(weights) is None
    assert "follow" in int4_chain.refusal(weights._replace(down=weights.o))
    assert "multiples of 16" in int4_chain.refusal(weights._replace(qkv=Matrix4(int4_weight(40, 128, 128), 40)))
    assert "groups of one size" in int4_chain.refusal(weights._replace(o=weights_of(128, 256, 384, 48, 64).o))
    assert "contiguous" in int4_chain.refusal(weights._replace(o=Matrix4(int4_weight(256, 256, 128)[:, ::2], 128)))
    assert "bfloat16" in int4_chain.refusal(weights._replace(bias=torch.ones(48)))


def test_the_reference_is_four_products_and_two_norms():
    weights = weights_of(128, 256, 384, 48, bias=True)
    y, u = int4_chain.reference(row(256).double(), row(128, seed=2).double(), weights)
    dense = [int4_matmul.dense(m.arranged, m.outputs, torch.float64) for m in weights.matrices]

    def normed(t, place):
        return t / (t.square().mean() + weights.eps[place]).sqrt() * weights.norms[place].double()

    t = row(256).double() @ dense[0].T + row(128, seed=2).double()
    h = (normed(t, 0) @ dense[1].T).view(-1, 2, 16)
    want = (h[:, 0] / (1 + (-h[:, 0]).exp()) * h[:, 1]).reshape(1, -1) @ dense[2].T + t
    torch.testing.assert_close(u, want)
    torch.testing.assert_close(y, normed(want, 1) @ dense[3].T + weights.bias.double())


@pytest.mark.parametrize("group", [128, 64, 32])
def test_the_source_has_the_products_of_the_values_in_any_order_of_threads(monkeypatch, group):
    kernel = chain_source(monkeypatch, Int4Chain)
    weights = weights_of(256, 384, 1408, 80, group, bias=group == 128)
    x, residual = row(384), row(256, seed=2)
    x[0, 5], x[0, 200] = 1020, 255 / 64  # all digits set, the largest of their chunks
    wanted = int4_chain.reference(x.double(), residual.double(), weights)
    found = []
    for order, stages in enumerate((4, 2)):
        kernel._launch.draw(order)
        y, u = kernel(x, residual, weights, stages=stages)
        check((y, u), wanted)
        found.append(torch.cat((y, u), 1))
    assert torch.equal(*found)


@pytest.mark.prove
@pytest.mark.parametrize("seed", range(6))
def test_the_source_has_the_values_of_random_sizes(monkeypatch, seed):
    draw = random.Random(seed)
    kernel = chain_source(monkeypatch, Int4Chain, multiprocessors=draw.choice((1, 2, 5, 9)))
    d, q, f = (128 * draw.randint(1, most) for most in (4, 10, 12))
    weights = weights_of(d, q, f, 16 * draw.randint(1, 20), draw.choice((32, 64, 128)), bias=draw.random() < 0.5)
    for turn in range(2):
        kernel._launch.draw(seed * 2 + turn)
        x, residual = row(q, seed=seed + turn), row(d, seed=turn)
        found = kernel(x, residual, weights, stages=draw.randint(2, 4))
        check(found, int4_chain.reference(x.double(), residual.double(), weights))


FAULTS = {
    "all lanes have read the slot": ("__syncwarp();  // all lanes have read the slot", ""),
    "the phase changes": ("slot = 0, parity ^= 1;", "slot = 0;"),
    "x is there": ("if (!lacks_half(v[j])) missing", "missing"),
    "squares are there": ("if (lacks_float(v[e])) return;", ""),
    "launches are counted": ("data.launches[blockIdx.x] = launches + 1;", ";"),
    "the other place is made ready": ("+ other) = 0xFFFFu;", "+ other);"),
    "sums are whole": ("turn ^= 1;\n      __syncthreads();", "turn ^= 1;"),
}
"""What the source relies on, and the source without."""


@pytest.mark.prove
@pytest.mark.parametrize("fault", FAULTS)
def test_what_the_source_relies_on_is_seen_to_be_missing(monkeypatch, fault):
    kernel = chain_source(monkeypatch, Int4Chain, FAULTS[fault])
    weights = weights_of(256, 384, 1408, 240)
    with pytest.raises(AssertionError, match=r"wrong|wait for each other|polls for ever|more arrivals"):
        for seed in range(4):
            kernel._launch.draw(seed)
            x, residual = row(384, seed=seed), row(256, seed=seed + 9)
            want_y, want_u = int4_chain.reference(x.double(), residual.double(), weights)
            y, u = kernel(x, residual, weights, stages=2)
            assert (u.double() - want_u).norm() <= 0.01 * want_u.norm(), "wrong"
            assert (y.double() - want_y).norm() <= 0.015 * want_y.norm(), "wrong"


@pytest.fixture
def chain():
    return loaded(Int4Chain)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(128, 256, 384, 48), (2048, 2048, 8192, 3072), (4096, 4096, 14336, 6144)])
@pytest.mark.parametrize("group", [128, 64, 32])
def test_the_kernel_has_the_products_of_the_values(chain, sizes, group):
    d, q, f, n = sizes
    weights = weights_of(d, q, f, n, group, "cuda", bias=d == 2048)
    x, residual = row(q, "cuda"), row(d, "cuda", 2)
    wanted = int4_chain.reference(x.double(), residual.double(), weights)
    first = None
    for stages in (4, 2, 3):
        for dependent in (False, True):
            y, u = chain(x, residual, weights, dependent_launch=dependent, stages=stages)
            check((y, u), wanted)
            first = first or (y, u)
            assert torch.equal(first[0], y) and torch.equal(first[1], u)  # how far it reads ahead changes no bit
