"""Products of 17 to 256 rows in fp8 on Hopper: tilings everywhere, the kernels on a GPU."""

import re

import pytest
import torch
import torch.nn.functional as F
from cuda_kernels import loaded

from transect.ops.lang import cuda_build
from transect.ops.linear.few_rows.hopper import FLAGS, HopperTiling, candidates
from transect.ops.linear.packed.eight_bit import scaled8_hopper, scaled8_tiles
from transect.ops.linear.packed.eight_bit.scaled8_hopper import COMPILED, choose_tiling, refusal
from transect.ops.linear.packed.eight_bit.scaled8_rounding import rounded, triton_rounded

SIZES = [(6144, 4096), (4096, 14336), (28672, 4096), (1024, 3072), (48, 64), (16, 16), (1008, 528)]


def test_the_source_compiles_the_kernels_that_are_known_here() -> None:
    source = cuda_build.source("scaled8_hopper.cu").read_text()
    listed = re.findall(r"^  TRANSECT_CUT\(([\d, ]+)\)$", source, re.M)
    assert [tuple(int(part) for part in line.split(",")) for line in listed] == list(COMPILED)
    assert len(set(COMPILED)) == len(COMPILED)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("n", "k"), SIZES)
@pytest.mark.parametrize("m", [17, 32, 33, 64, 100, 160, 200, 224, 225, 256])
def test_every_size_has_a_tiling_that_takes_it(m: int, n: int, k: int, gated: bool) -> None:
    tiling = choose_tiling(m, n, k, gated, 132)
    if tiling is None:
        assert m > 224 and not gated and n <= 4224 and k < 8192
        return
    columns = n // 2 if gated else n
    assert tiling.refusal(m, columns, k // 2, kernels=COMPILED) is None and bool(tiling.gated) == gated
    assert not tiling.parts(columns) or tiling.grid(columns) <= FLAGS


def inputs(m: int, n: int, k: int, device: str = "cpu") -> tuple[torch.Tensor, ...]:
    """Rows in fp8 with their scales, codes with theirs, and a bias."""
    generator = torch.Generator(device).manual_seed(m + n + k)
    x, weight, bias = (torch.randn(shape, device=device, generator=generator) for shape in ((m, k), (n, k), n))
    rows = triton_rounded(x.bfloat16(), True) if device == "cuda" else rounded(x, True)
    return *rows, *rounded(weight, True), bias.bfloat16()


def test_what_the_kernels_do_not_take_is_said() -> None:
    a, _, codes, scale, _ = inputs(20, 64, 128)
    assert refusal(a, codes, scale) is None
    assert "blocks" in str(refusal(a, codes, scale[:, None]))
    assert "16" in str(refusal(a, codes[:40], scale[:40]))
    assert "contiguous" in str(refusal(a[::2], codes, scale))
    assert "1 to 256 rows" in str(refusal(a.repeat(13, 1), codes, scale))
    assert "1 to 256 rows" in str(refusal(a[:0], codes, scale))


@pytest.fixture
def rows() -> scaled8_hopper.HopperRows8:
    return loaded(scaled8_hopper.HopperRows8, hopper=True)


@pytest.mark.gpu
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("n", "k"), [(4096, 14336), (1008, 528), (48, 64), (16, 16), (6144, 4096)])
@pytest.mark.parametrize("m", [17, 32, 50, 64, 100, 137, 200, 224, 256])
def test_every_tiling_gives_the_product_and_every_run_the_same(
    rows: scaled8_hopper.HopperRows8, m: int, n: int, k: int, gated: bool
) -> None:
    a, s, codes, scale, bias = inputs(m, n, k, "cuda")
    values = a.view(torch.float8_e4m3fn).double() * s.double()[:, None]
    want = values @ scaled8_tiles.dense(codes, scale, True, torch.float64).T
    if gated:
        gate, up = want.chunk(2, 1)
        want, bias = F.silu(gate) * up, None
    else:
        want = want + bias.double()
    tried = candidates(m, n // 2 if gated else n, k // 2, gated=gated, kernels=COMPILED)
    assert tried
    for tiling in tried:
        got = rows(a, s, codes, scale, bias, tiling=tiling, gated=gated)
        assert (got.double() - want).norm() <= 0.01 * want.norm(), tiling
        for dependent in (False, True):
            again = rows(a, s, codes, scale, bias, tiling=tiling, gated=gated, dependent_launch=dependent)
            assert torch.equal(got, again), tiling


@pytest.mark.gpu
@pytest.mark.parametrize("m", [17, 64, 200, 256])
def test_tiles_leave_it_what_it_is_quicker_for(rows: scaled8_hopper.HopperRows8, m: int) -> None:
    a, s, codes, scale, bias = inputs(m, 1024, 512, "cuda")
    apart, both = scaled8_tiles.Tiles8(), scaled8_tiles.Tiles8(hopper=rows)
    one, other = (tiles.product(a, s, codes, scale, bias) for tiles in (apart, both))
    assert (one.double() - other.double()).norm() <= 0.01 * one.double().norm()
    halves = apart.product(a, s, codes, scale).double().chunk(2, 1)
    gated = both.gated(a, s, codes, scale)
    want = F.silu(halves[0]) * halves[1]
    assert apart.gated(a, s, codes, scale) is None and gated is not None
    assert (gated.double() - want).norm() <= 0.02 * want.norm()


@pytest.mark.gpu
def test_what_it_does_not_take_raises(rows: scaled8_hopper.HopperRows8) -> None:
    a, s, codes, scale, bias = inputs(40, 64, 64, "cuda")
    with pytest.raises(ValueError, match="rows"):
        rows(a, s, codes, scale, bias, tiling=HopperTiling(1, 0, 32, 1, 1, 1, 2, 1, 0, 2))
    with pytest.raises(ValueError, match="16"):
        rows(a, s, codes[:40], scale[:40])
