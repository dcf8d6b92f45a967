"""Four products of one row in one launch: what it refuses everywhere, its results on a GPU."""

import pytest
import torch
from cuda_kernels import chain_source, loaded

from transect.ops.linear.packed.eight_bit import scaled8_chain, scaled8_rounding, scaled8_tiles
from transect.ops.linear.packed.eight_bit.scaled8_chain import ChainWeights, Matrix8

FORMATS = {"fp8": (True, False), "int8": (False, False), "blocks": (True, True)}


def weights_of(d, q, f, n, device="cpu", bias=False, form="fp8"):
    generator = torch.Generator().manual_seed(d + f)
    fp8, blocks = FORMATS[form]

    def matrix(outputs, inputs):
        codes, scale = scaled8_rounding.rounded(torch.randn(outputs, inputs, generator=generator) / inputs**0.5, fp8)
        if blocks:
            scale = torch.rand(outputs // 128, inputs // 128, generator=generator) * 2 * scale.mean()
        return Matrix8(codes.to(device), scale.to(device), fp8)

    def vector(size):
        return (1 + torch.randn(size, generator=generator) / 8).to(device, torch.bfloat16)

    return ChainWeights(
        matrix(d, q), matrix(2 * f, d), matrix(d, f), matrix(n, d), (vector(d), vector(d)), (1e-5, 1e-6),
        vector(n) if bias else None,
    )  # fmt: skip


def row(size, device="cpu", seed=1):
    return torch.randn(1, size, generator=torch.Generator().manual_seed(seed)).to(device, torch.bfloat16)


def test_what_the_kernel_does_not_take_is_said():
    weights = weights_of(128, 256, 384, 128)
    assert scaled8_chain.refusal(weights) is None
    assert "follow" in scaled8_chain.refusal(weights._replace(down=weights.o))
    assert "multiples of 128" in scaled8_chain.refusal(weights_of(128, 128, 128, 64))
    assert scaled8_chain.refusal(weights_of(128, 256, 384, 128, form="blocks")) is None
    assert "one kind" in scaled8_chain.refusal(weights._replace(o=weights.o._replace(scale=torch.ones(1, 2))))
    assert "one kind" in scaled8_chain.refusal(weights._replace(down=weights.down._replace(fp8=False)))
    assert "scales must be" in scaled8_chain.refusal(weights._replace(o=weights.o._replace(scale=torch.ones(1, 1))))
    assert "contiguous" in scaled8_chain.refusal(
        weights._replace(o=Matrix8(weights.o.codes.T.contiguous().T, weights.o.scale))
    )
    assert "bfloat16" in scaled8_chain.refusal(weights._replace(bias=torch.ones(128)))


def test_the_reference_is_four_products_and_two_norms():
    weights = weights_of(128, 256, 384, 128, bias=True)
    y, u = scaled8_chain.reference(row(256).double(), row(128, seed=2).double(), weights)
    dense = [scaled8_tiles.dense(m.codes, m.scale, True, torch.float64) for m in weights.matrices]

    def normed(t, place):
        return t / (t.square().mean() + weights.eps[place]).sqrt() * weights.norms[place].double()

    t = row(256).double() @ dense[0].T + row(128, seed=2).double()
    h = normed(t, 0) @ dense[1].T
    gate, up = h[:, :384], h[:, 384:]
    want = (gate / (1 + (-gate).exp()) * up) @ dense[2].T + t
    torch.testing.assert_close(u, want)
    torch.testing.assert_close(y, normed(want, 1) @ dense[3].T + weights.bias.double())


@pytest.fixture
def chain():
    return loaded(scaled8_chain.CudaChain)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(128, 256, 384, 128), (2048, 2048, 8192, 3072), (4096, 4096, 14336, 6144)])
@pytest.mark.parametrize("form", FORMATS)
def test_the_kernel_has_the_products_of_the_values(chain, sizes, form):
    d, q, f, n = sizes
    weights = weights_of(d, q, f, n, "cuda", bias=d == 2048, form=form)
    x, residual = row(q, "cuda"), row(d, "cuda", 2)
    want_y, want_u = scaled8_chain.reference(x.double(), residual.double(), weights)
    first = None
    for dependent in (False, True) * 2:
        y, u = chain(x, residual, weights, dependent_launch=dependent)
        assert (u.double() - want_u).norm() <= 0.01 * want_u.norm()
        assert (y.double() - want_y).norm() <= 0.015 * want_y.norm()
        first = first or (y, u)
        assert torch.equal(first[0], y) and torch.equal(first[1], u)


@pytest.mark.parametrize("form", FORMATS)
def test_the_source_has_the_products_of_the_values_in_any_order_of_threads(monkeypatch, form):
    kernel = chain_source(monkeypatch, scaled8_chain.CudaChain)
    weights = weights_of(128, 256, 2304, 256, bias=True, form=form)  # a warp has two chunks of 2304
    x, residual = row(256), row(128, seed=2)
    want_y, want_u = scaled8_chain.reference(x.double(), residual.double(), weights)
    found = []
    for order in range(2):
        kernel._launch.draw(order)
        y, u = kernel(x, residual, weights)
        assert (u.double() - want_u).norm() <= 0.01 * want_u.norm()
        assert (y.double() - want_y).norm() <= 0.015 * want_y.norm()
        found.append(torch.cat((y, u), 1))
    assert torch.equal(*found)
