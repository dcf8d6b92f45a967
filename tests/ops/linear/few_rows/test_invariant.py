"""Products of few rows in one order of sums: which tilings keep it, and on a GPU the same bits by all of them."""

from types import SimpleNamespace

import cuda_host
import pytest
import torch

from transect.ops.lang import cuda_build
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
                    assert tiling.ranks in (0, 1) and tiling.clusters <= tiling.tiles(columns)
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
    assert parts == fixed_order.parts_on_hopper(n, k)
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


WAYS = [
    (1, 4, 1, 4, 4, False), (1, 4, 1, 4, 2, False), (1, 4, 1, 6, 2, False), (1, 4, 1, 3, 1, True),
    (1, 4, 1, 7, 1, True), (2, 6, 2, 4, 2, False), (1, 12, 4, 7, 1, True), (2, 4, 2, 4, 4, False),
]  # fmt: skip


@pytest.mark.parametrize(("columns", "stages", "wide", "warps", "parts", "gated"), WAYS)
def test_warps_that_take_parts_and_groups(monkeypatch, columns, stages, wide, warps, parts, gated):
    """``small_matmul.cu`` on this processor (``cuda_host``); groups are not a multiple of those taken at a time."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=0))
    lines = cuda_build.source("small_matmul.cu").read_text().splitlines()
    part = lines.index(f"  TRANSECT_ROWS({columns}, {stages}, {wide})") + 1
    rows: CudaRows = object.__new__(CudaRows)
    rows._dependent = True
    rows._launch = cuda_host.Launcher(
        "small_matmul", "transect_small_matmul", "ppppiiill" + "i" * 7 + "pppppf" + "ip", None,
        "-DTRANSECT_OF=100000", f"-DTRANSECT_PART={part}", "-D__CUDA_ARCH__=900",
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    m, n, k = 5, 208, 64 * parts * 3 * wide
    x, weight = (torch.randn(shape, generator=generator).bfloat16() for shape in ((m, k), (n, k)))
    tiling = CudaTiling(columns, stages, 7, warps, -parts, wide)
    assert tiling.refusal(m, gated) is None
    y = rows(x, weight, tiling=tiling, gated=gated)
    exact = x.double() @ weight.double().T
    if gated:
        gate, up = exact.chunk(2, 1)
        exact = torch.nn.functional.silu(gate) * up
    assert (y.double() - exact).norm() < 0.005 * exact.norm()
