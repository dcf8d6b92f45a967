"""Products of few rows in one order of sums: which tilings keep it, and on a GPU the same bits by all of them."""

import pytest
import torch

from transect.ops.linear import fixed_order
from transect.ops.linear.few_rows import invariant
from transect.ops.linear.few_rows.cuda import CudaRows, CudaTiling
from transect.ops.linear.few_rows.hopper import HopperRows

SIZES = [(6144, 4096), (4096, 14336), (3584, 18944), (128256, 4096), (1024, 3072)]


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("n", "k"), SIZES)
def test_there_is_a_tiling_for_any_number_of_rows_and_all_keep_the_order(n, k, gated):
    columns = n // 2 if gated else n
    for m in (1, 7, 16, 33, 64, 100, 128, 200, 256):
        for parts in (1,) if gated else (1, 2, 4):
            found = list(invariant.candidates(m, n, k, parts, gated=gated))
            assert invariant.tiling_of(m, n, k, parts, gated, torch.device("cpu")) in found
            for tiling in found:
                if isinstance(tiling, CudaTiling):
                    assert tiling.ranks == -parts and tiling.refusal(m, gated) is None
                    continue
                assert tiling.refusal(m, columns, k, kernels=invariant.KERNELS) is None
                if parts == 1:
                    assert not tiling.splits(columns)
                else:
                    assert abs(tiling.ranks) == parts or (tiling.ranks == 1 and tiling.ordered)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize(("n", "k"), SIZES)
def test_bits_are_the_same_by_every_tiling(n, k):
    generator = torch.Generator("cuda").manual_seed(0)
    x, weight, bias = (
        torch.randn(shape, device="cuda", generator=generator).bfloat16() for shape in ((300, k), (n, k), (n,))
    )
    parts = fixed_order.parts_of(x, n)
    assert parts == (1 if n > fixed_order.NARROW else 4 if k >= fixed_order.LONG else 2)
    kernels, own = (CudaRows(), HopperRows()), invariant.InvariantRows()
    exact = x.double() @ weight.double().T + bias.double()
    whole, gated = own.linear(x, weight, bias), own.gated(x, weight)
    assert (whole.double() - exact).norm() < 0.005 * exact.norm()
    for m in (1, 16, 17, 33, 64, 96, 128, 200, 256):
        assert torch.equal(own.linear(x[:m], weight, bias), whole[:m]), m
        assert torch.equal(fixed_order.product(x[:m], weight, bias), whole[:m]), m
        assert torch.equal(own.gated(x[:m], weight), gated[:m]), m
        assert torch.equal(fixed_order.gated(x[:m], weight), gated[:m]), m
        for tiling in invariant.candidates(m, n, k, parts):
            assert torch.equal(invariant.run(*kernels, x[:m], weight, bias, tiling, parts), whole[:m]), (m, tiling)
        for tiling in invariant.candidates(m, n, k, gated=True):
            y = invariant.run(*kernels, x[:m], weight, None, tiling, 1, gated=True)
            assert torch.equal(y, gated[:m]), (m, tiling)
