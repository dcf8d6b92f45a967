"""``int4_portable.cu``: its tilings everywhere, the kernel on a GPU since Ampere."""

from types import SimpleNamespace

import cuda_host
import pytest
import torch
import torch.nn.functional as F
from cuda_kernels import check_int4_product, int4_weight, loaded, miss, product_inputs

from transect.hardware.targets import TARGETS
from transect.ops.linear.few_rows.triton import Counters
from transect.ops.linear.packed.int4 import int4_matmul, int4_portable
from transect.ops.linear.packed.int4.int4_portable import (
    PortableCodes,
    TilesTiling,
    choose_tiles,
    choose_tiling,
    shared_bytes,
    tiles_bytes,
)
from transect.ops.numerics import sample

SMALL = TARGETS["sm_89"].block_bytes


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("m", [1, 8, 9, 16, 40])
def test_a_tiling_covers_the_weight_and_fits(m: int, group: int) -> None:
    for n, k in [(6144, 4096), (28672, 4096), (4096, 14336), (128256, 4096), (48, 128), (5, 1024)]:
        for gated in (False, True) if n % 32 == 0 else (False,):
            tiling = choose_tiling(m, n, k, group, 128, SMALL, gated)
            assert shared_bytes(tiling, m, group) <= SMALL
            assert tiling.columns in int4_portable.COLUMNS and 2 <= tiling.stages <= 4 and tiling.warps in (1, 2, 4, 8)
            row_tiles = -(-m // (8 * tiling.tiles))
            assert tiling.per * (128 // row_tiles) * 16 >= n - tiling.per * 16
            assert not gated or (tiling.per % 2 == tiling.columns % 2 == 0)


@pytest.mark.parametrize("group", [32, 64, 128])
def test_tiles_fit_and_use_most_multiprocessors(group: int) -> None:
    for m in (9, 16, 17, 33, 64, 200, 256):
        for n, k in [(6144, 4096), (28672, 4096), (4096, 14336), (48, 128)]:
            tiling = choose_tiles(m, n, k, group, 132, SMALL)
            blocks = -(-n // 256) * -(-m // (8 * tiling.tiles)) * tiling.split
            assert tiles_bytes(tiling, group) <= SMALL and 1 <= tiling.split <= k // 128
            assert 2 * blocks > 132 or tiling.split == max(1, k // 384)


def test_no_room_is_said() -> None:
    with pytest.raises(ValueError, match="fits 1024 bytes"):
        choose_tiling(1, 4096, 4096, 128, 128, 1024)


def on_host(monkeypatch: pytest.MonkeyPatch) -> PortableCodes:
    """The source on this processor, as if it had three multiprocessors of an Ada card."""
    monkeypatch.setattr(int4_portable, "multiprocessors", lambda device: 3)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
    kernel = object.__new__(PortableCodes)
    kernel._target = TARGETS["sm_89"]
    kernel._counters = Counters()
    kernel._launch = cuda_host.Launcher("int4_portable", "transect_int4_portable", "ppppiiiil" + "iiiii" + "iip")
    kernel._launch_tiles = cuda_host.Launcher(
        "int4_portable", "transect_int4_portable_tiles", "ppppppiiiil" + "iii" + "iip"
    )
    return kernel


@pytest.mark.parametrize(
    ("m", "n", "k", "group"),
    [(1, 37, 640, 128), (8, 96, 256, 64), (11, 112, 384, 32), (20, 288, 384, 128), (40, 32, 256, 128)],
)
def test_products_on_a_processor(monkeypatch: pytest.MonkeyPatch, m: int, n: int, k: int, group: int) -> None:
    """Also with rows and spans that are not there, and with the gate."""
    kernel, weight = on_host(monkeypatch), int4_weight(n, k, group)
    x, bias = sample(m, k).bfloat16(), sample(n, seed=2).bfloat16()
    want = int4_matmul.reference(x.double(), weight, n, bias.double())
    whole = None if m <= int4_portable.ALONE_ROWS else TilesTiling(1, 1, 2)
    kernel._launch.reads((x, weight, bias))
    assert miss(kernel(x, weight, n, bias, tiling=whole), want) < 4e-3
    kernel._launch.reads(())  # parts of sums are in memory of their own
    for seed in (1, 2):
        kernel._launch.draw(seed)
        assert miss(kernel(x, weight, n, bias), want) < 4e-3
    if n % 32 == 0:
        both = int4_matmul.reference(x.double(), weight, n).unflatten(-1, (-1, 2, 16))
        gated = (F.silu(both[:, :, 0]) * both[:, :, 1]).flatten(1)
        assert miss(kernel(x, weight, n, gated=True), gated) < 6e-3


@pytest.fixture
def kernel() -> PortableCodes:
    return loaded(PortableCodes)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("m", "n", "k", "group"),
    [(1, 37, 256, 128), (1, 16, 128, 128), (5, 200, 1024, 64), (8, 520, 4096, 32), (16, 520, 4096, 128),
     (16, 256, 14336, 128), (9, 4096, 14336, 128), (23, 1000, 1024, 64), (16, 28672, 512, 32), (3, 6144, 4096, 64),
     (1, 128256, 1024, 128), (40, 4096, 4096, 128), (64, 28672, 4096, 128), (100, 6144, 1024, 32)],
)  # fmt: skip
def test_error_is_that_of_torch_and_every_run_gives_the_same(
    kernel: PortableCodes, m: int, n: int, k: int, group: int
) -> None:
    check_int4_product(kernel, m, n, k, group, dependent_launch=False, repeats=3)


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 8, 16, 40, 64])
@pytest.mark.parametrize(("n", "k"), [(64, 256), (2816, 1024), (28672, 4096)])
def test_the_gate_in_the_epilogue(kernel: PortableCodes, m: int, n: int, k: int) -> None:
    weight = int4_weight(n, k, 128, "cuda")
    x, *_ = product_inputs(m, n, k)
    both = int4_matmul.reference(x.double(), weight, n).unflatten(-1, (-1, 2, 16))
    want = (F.silu(both[:, :, 0]) * both[:, :, 1]).flatten(1)
    got = kernel(x, weight, n, gated=True)
    assert got.shape == (m, n // 2)
    # Rounding the two factors before they are multiplied, as two kernels do, costs about 3e-3.
    assert (got.double() - want).norm() <= 3e-3 * want.norm()
    assert torch.equal(got, kernel(x, weight, n, gated=True))
