"""Products of 17 to 256 rows in 8 bits on Hopper: tilings and the sources on a processor; the kernels on a GPU."""

import re
from types import SimpleNamespace

import cuda_host
import pytest
import torch
import torch.nn.functional as F
from cuda_kernels import loaded

from transect.ops.lang import cuda_build
from transect.ops.linear.few_rows.hopper import FLAGS, HopperTiling, candidates
from transect.ops.linear.packed.eight_bit import scaled8_hopper, scaled8_tiles
from transect.ops.linear.packed.eight_bit.scaled8_hopper import (
    BLOCKS,
    COMPILED,
    FP8,
    WHOLE,
    HopperRows8,
    choose_tiling,
    refusal,
)
from transect.ops.linear.packed.eight_bit.scaled8_rounding import BLOCK, rounded, triton_rounded

KINDS = {kind.name: kind for kind in (FP8, WHOLE, BLOCKS)}

SIZES = [(6144, 4096), (4096, 14336), (28672, 4096), (1024, 3072), (48, 64), (16, 16), (1008, 528)]


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_the_source_compiles_the_kernels_that_are_known_here(kind: scaled8_hopper.Kernels8) -> None:
    source = cuda_build.source(f"{kind.source}.cu").read_text()
    listed = re.findall(r"^  TRANSECT_CUT\(([\d, ]+)\)$", source, re.M)
    assert [tuple(int(part) for part in line.split(",")) for line in listed] == list(kind.kernels)
    assert len(set(kind.kernels)) == len(kind.kernels)


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


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("m", [17, 64, 65, 128, 129, 256])
def test_scales_of_blocks_have_a_tiling(m: int, gated: bool) -> None:
    for n, k in ((6144, 4096), (4096, 14336), (28672, 4096), (1024, 3072)):
        tried = candidates(m, n // 2 if gated else n, k // 2, gated=gated, kernels=BLOCKS.kernels)
        pairs = {1} if m <= 64 else {1, 2} if m <= 128 else {2}
        assert {tiling.pair for tiling in tried} == (pairs - {2} if gated else pairs)
        assert not any(tiling.swap for tiling in tried)


def inputs(
    m: int, n: int, k: int, device: str = "cpu", kind: scaled8_hopper.Kernels8 = FP8
) -> tuple[torch.Tensor, ...]:
    """Rows in 8 bits with their scales, codes with theirs, and a bias."""
    generator = torch.Generator(device).manual_seed(m + n + k)
    x, weight, bias = (torch.randn(shape, device=device, generator=generator) for shape in ((m, k), (n, k), n))
    round_rows = triton_rounded if device == "cuda" else rounded
    codes, scale = rounded(weight, kind is not WHOLE)
    if kind is BLOCKS:
        scale = torch.rand(-(-n // BLOCK), -(-k // BLOCK), device=device, generator=generator) / 64 + 1e-3
    return *round_rows(x.bfloat16(), kind is not WHOLE, kind is BLOCKS), codes, scale, bias.bfloat16()


def product(
    a: torch.Tensor, s: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, kind: scaled8_hopper.Kernels8
) -> torch.Tensor:
    """The product in float64, without bias."""
    fp8 = kind is not WHOLE
    own = s.repeat_interleave(BLOCK, 1)[:, : a.shape[1]] if kind is BLOCKS else s[:, None]
    values = (a.view(torch.float8_e4m3fn) if fp8 else a).double() * own.double()
    return values @ scaled8_tiles.dense(codes, scale, fp8, torch.float64).T


def test_what_the_kernels_do_not_take_is_said() -> None:
    a, _, codes, scale, _ = inputs(20, 64, 128)
    assert refusal(a, codes, scale) is None
    assert "blocks" in str(refusal(a, codes, scale[:, None]))
    assert "rows" in str(refusal(a, codes, scale, BLOCKS)) and refusal(a, codes, scale[:, None], BLOCKS) is None
    assert "16" in str(refusal(a, codes[:40], scale[:40]))
    assert "contiguous" in str(refusal(a[::2], codes, scale))
    assert "1 to 256 rows" in str(refusal(a.repeat(13, 1), codes, scale))
    assert "1 to 256 rows" in str(refusal(a[:0], codes, scale))


ON_A_PROCESSOR = [
    ("fp8", (1, 0, 32, 1, 1, 1, 2)),
    ("int8", (1, 0, 32, 1, 1, 1, 2)),
    ("int8", (0, 0, 96, 1, 1, 1, 2)),
    ("fp8 with scales of blocks", (0, 0, 96, 1, 1, 1, 2)),
    ("fp8 with scales of blocks", (0, 0, 64, 1, 1, 1, 2)),
    ("fp8 with scales of blocks", (0, 1, 112, 1, 1, 1, 2)),
    ("fp8 with scales of blocks", (0, 0, 128, 2, 1, 2, 1)),
]


@pytest.mark.prove
@pytest.mark.parametrize(("name", "compiled"), ON_A_PROCESSOR)
def test_the_source_has_the_products_in_any_order_of_threads(
    name: str, compiled: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One kernel of a source on this processor (``cuda_host``): blocks with whole tiles, with even stretches of all
    tiles, ranks of a cluster and of the grid. K ends within a chunk, and the rows within a tile."""
    kind, gated = KINDS[name], bool(compiled[1])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=0))
    lines = cuda_build.source(f"{kind.source}.cu").read_text().splitlines()
    line = lines.index(f"  TRANSECT_CUT({', '.join(map(str, compiled))})") + 1
    kernel: HopperRows8 = object.__new__(HopperRows8)
    kernel.kind, kernel._flags = kind, torch.zeros(FLAGS, dtype=torch.int32)
    kernel._launch = cuda_host.Launcher(
        kind.source, f"transect_{kind.source}", "p" * 8 + "i" * 14 + "p", None,
        "-DTRANSECT_OF=100000", f"-DTRANSECT_PART={line}", "-D__CUDA_ARCH__=900", "-D__CUDA_ARCH_FEAT_SM90_ALL",
    )  # fmt: skip
    m, n, k = (200 if compiled[5] == 2 else 27), 512 if gated else 208, 1104
    a, s, codes, scale, bias = inputs(m, n, k, kind=kind)
    want = product(a, s, codes, scale, kind)
    if gated:
        gate, up = want.chunk(2, 1)
        want = F.silu(gate) * up
    else:
        want = want + bias.double()
    cuts = [(1, 0), (0, 2)] + ([] if gated else [(2, 0), (-2, 0)])
    for ranks, clusters in cuts:
        tiling = HopperTiling(*compiled, ranks, clusters, 4 if compiled[5] == 2 else 3)
        found = []
        for order in range(2):
            kernel._launch.draw(order)
            found.append(kernel(a, s, codes, scale, None if gated else bias, tiling=tiling, gated=gated))
        assert (found[0].double() - want).norm() <= 0.01 * want.norm(), tiling
        assert torch.equal(*found), tiling


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def rows(request: pytest.FixtureRequest) -> HopperRows8:
    return loaded(lambda: HopperRows8(kind=request.param), hopper=True)


@pytest.mark.gpu
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("n", "k"), [(4096, 14336), (1008, 528), (48, 64), (16, 16), (6144, 4096)])
@pytest.mark.parametrize("m", [17, 50, 100, 200, 256])
def test_every_tiling_gives_the_product_and_every_run_the_same(
    rows: HopperRows8, m: int, n: int, k: int, gated: bool
) -> None:
    kind = rows.kind
    if gated and kind is BLOCKS and n % 256:
        n = 1024
    a, s, codes, scale, bias = inputs(m, n, k, "cuda", kind)
    want = product(a, s, codes, scale, kind)
    if gated:
        gate, up = want.chunk(2, 1)
        want, bias = F.silu(gate) * up, None
    else:
        want = want + bias.double()
    tried = candidates(m, n // 2 if gated else n, k // 2, gated=gated, kernels=kind.kernels)
    assert tried or (gated and kind is BLOCKS and m > 128)
    order = scaled8_tiles.Tiles8(unsplit=True).product(a, s, codes, scale, bias, kind is not WHOLE)
    for tiling in tried:
        got = rows(a, s, codes, scale, bias, tiling=tiling, gated=gated)
        assert (got.double() - want).norm() <= 0.01 * want.norm(), tiling
        for dependent in (False, True):
            again = rows(a, s, codes, scale, bias, tiling=tiling, gated=gated, dependent_launch=dependent)
            assert torch.equal(got, again), tiling
        if not gated and not tiling.splits(n):
            assert torch.equal(got, order), tiling


@pytest.mark.gpu
@pytest.mark.parametrize("m", [17, 64, 200, 256])
def test_tiles_leave_it_what_it_is_quicker_for(rows: HopperRows8, m: int) -> None:
    fp8 = rows.kind is not WHOLE
    a, s, codes, scale, bias = inputs(m, 1024, 512, "cuda", rows.kind)
    apart, both = scaled8_tiles.Tiles8(), scaled8_tiles.Tiles8(hopper=rows)
    one, other = (tiles.product(a, s, codes, scale, bias, fp8) for tiles in (apart, both))
    assert (one.double() - other.double()).norm() <= 0.01 * one.double().norm()
    halves = apart.product(a, s, codes, scale, None, fp8).double().chunk(2, 1)
    gated = both.gated(a, s, codes, scale, fp8)
    want = F.silu(halves[0]) * halves[1]
    assert apart.gated(a, s, codes, scale, fp8) is None
    if rows.kind is BLOCKS and m > 128:  # there the gate is another launch
        assert gated is None
        return
    assert gated is not None
    assert (gated.double() - want).norm() <= 0.02 * want.norm()


@pytest.mark.gpu
def test_what_it_does_not_take_raises() -> None:
    rows = loaded(HopperRows8, hopper=True)
    a, s, codes, scale, bias = inputs(40, 64, 64, "cuda")
    with pytest.raises(ValueError, match="rows"):
        rows(a, s, codes, scale, bias, tiling=HopperTiling(1, 0, 32, 1, 1, 1, 2, 1, 0, 2))
    with pytest.raises(ValueError, match="16"):
        rows(a, s, codes[:40], scale[:40])
