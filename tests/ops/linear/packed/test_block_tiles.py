"""Tiles of packed weights for many rows on Hopper: the products, how they are cut, and the source on a processor."""

import itertools
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import cuda_host
import pytest
import torch
from cuda_kernels import int4_weight, loaded, miss

from transect.ops.lang import cuda_build
from transect.ops.linear.packed import block_tiles
from transect.ops.linear.packed.gguf import gguf_tiles
from transect.ops.linear.packed.gguf.gguf_matmul import drawn, reference
from transect.ops.linear.packed.gguf.gguf_tiles import GGUFTiles
from transect.ops.linear.packed.int4 import int4_matmul, int4_tiles
from transect.ops.linear.packed.int4.int4_packing import GROUPS
from transect.ops.linear.packed.int4.int4_tiles import Int4Tiles
from transect.ops.numerics import sample
from transect.spec.numbers.gguf import UNITS

INT4 = {"Int4": 128, "Int4_64": 64, "Int4_32": 32}
"""Names of the source, and their groups."""


@pytest.fixture(scope="module")
def tiles() -> GGUFTiles:
    return loaded(GGUFTiles)


@pytest.fixture(scope="module")
def int4() -> Int4Tiles:
    return loaded(Int4Tiles)


@pytest.mark.gpu
@pytest.mark.parametrize("name", UNITS)
@pytest.mark.parametrize(("n", "k"), [(48, 512), (4096, 4096), (40, 1280), (1000, 14336)])
def test_many_rows_on_hopper(tiles: GGUFTiles, name: str, n: int, k: int) -> None:
    """Every cut, also where tiles follow one another; the same bits in every run."""
    torch.manual_seed(0)  # of one row with 40 outputs the error varies with what is drawn
    arranged = drawn(name, n, k, "cuda")
    bias = torch.randn(n, device="cuda").to(torch.bfloat16)
    for m in (1, 17, 33, 64, 100, 130, 256, 300):
        x = torch.randn(m, k, device="cuda").to(torch.bfloat16)
        wanted = reference(x.double(), arranged, name, n, bias.double())
        found = tiles(x, arranged, name, n, bias)
        assert miss(found, wanted) < 5e-3, m
        assert torch.equal(tiles(x, arranged, name, n, bias, dependent_launch=True), found)
    for tiling in tilings(UNITS[name].unit, m, n, k):
        assert miss(tiles(x, arranged, name, n, bias, tiling=tiling), wanted) < 5e-3, tiling


def tilings(unit: int, m: int, n: int, k: int) -> Iterator[block_tiles.BlockTiling]:
    """All that an H200 can do."""
    for cut, together in itertools.product(block_tiles.CUTS, (False, True)):
        tiling = block_tiles.tiling_of(cut, unit, m, n, k, 132, together)
        assert tiling is not None
        yield tiling


@pytest.mark.gpu
@pytest.mark.parametrize("group", [128, 64, 32])
@pytest.mark.parametrize(("n", "k"), [(48, 512), (4096, 4096), (40, 1408), (1000, 14336)])
def test_4_bits_in_groups_on_hopper(int4: Int4Tiles, n: int, k: int, group: int) -> None:
    weight = int4_weight(n, k, group, "cuda")
    bias = torch.randn(n, device="cuda").to(torch.bfloat16)
    for m in (1, 17, 64, 130, 300):
        x = torch.randn(m, k, device="cuda").to(torch.bfloat16)
        wanted = int4_matmul.reference(x.double(), weight, n, bias.double())
        found = int4(x, weight, n, bias)
        assert miss(found, wanted) < 5e-3, m
        assert torch.equal(int4(x, weight, n, bias, dependent_launch=True), found)
    for tiling in tilings(int4_tiles.unit_of(group), m, n, k):
        assert miss(int4(x, weight, n, bias, tiling=tiling), wanted) < 5e-3, tiling


@pytest.mark.gpu
def test_gates_on_hopper(tiles: GGUFTiles, int4: Int4Tiles) -> None:
    n, k = 2080, 2048
    for m in (9, 64, 200):
        x = torch.randn(m, k, device="cuda").to(torch.bfloat16)
        arranged, weight = drawn("Q4_K", n, k, "cuda"), int4_weight(n, k, 128, "cuda")
        wanted = gate(reference(x.double(), arranged, "Q4_K", n))
        assert miss(tiles(x, arranged, "Q4_K", n, gated=True, dependent_launch=True), wanted) < 6e-3
        wanted = gate(int4_matmul.reference(x.double(), weight, n))
        assert miss(int4(x, weight, n, gated=True, dependent_launch=True), wanted) < 6e-3


def gate(both: torch.Tensor) -> torch.Tensor:
    """The gated product of sixteens that are gate and up in turn."""
    turns = both.unflatten(-1, (-1, 2, 16))
    return torch.nn.functional.silu(turns[:, :, 0].flatten(1)) * turns[:, :, 1].flatten(1)


def test_4_bits_are_taken_as_int4_packing_arranges_them() -> None:
    x = torch.zeros(3, 384, dtype=torch.bfloat16)
    for group in GROUPS:
        weight = int4_weight(48, 384, group)
        assert int4_tiles.refusal(x, weight, 48) is None
        assert int4_tiles.unit_of(group) == 2 * 4 * weight.shape[2]
    assert "int4_packing" in str(int4_tiles.refusal(x, weight, 64))
    assert "multiple of 8" in str(int4_tiles.refusal(x, int4_weight(36, 384, 64), 36))
    assert "multiple of 32" in str(int4_tiles.refusal(x, weight, 48, gated=True))
    assert "no bias" in str(int4_tiles.refusal(x, int4_weight(64, 384, 64), 64, x.new_zeros(64), gated=True))


@pytest.mark.parametrize("name", UNITS)
def test_tiles_of_many_rows_fit(name: str) -> None:
    for m in (17, 33, 64, 128, 256, 512):
        tiling = block_tiles.choose_tiling(UNITS[name].unit, m, 4096, 4096, 132)
        assert tiling.resident * (tiling.shared(UNITS[name].unit) + 1024 + 512 + tiling.groups * 512) <= 228 * 1024
        assert 2 <= tiling.x_stages <= block_tiles.MOST_STAGES and tiling.blocks <= min(132 * tiling.resident, 4096)
        assert tiling.rows >= min(m, 128)
    assert block_tiles.choose_tiling(UNITS[name].unit, 64, 48, 512, 132).blocks == 2
    x, arranged = torch.zeros(3, 512, dtype=torch.bfloat16), drawn(name, 36, 512)
    assert "multiple of 8" in str(gguf_tiles.refusal(x, arranged, name, 36))


@pytest.mark.parametrize(("source", "names"), [("gguf_tiles", tuple(UNITS)), ("int4_tiles", tuple(INT4))])
def test_the_sources_have_every_cut_of_every_type(source: str, names: tuple[str, ...]) -> None:
    text = cuda_build.source(f"{source}.cu").read_text()
    started = re.findall(r"^  TRANSECT_CUT\(k(\w+), (\d+), (\d), (\d)\)$", text, re.M)
    assert started == [(name, *map(str, cut)) for name in names for cut in block_tiles.CUTS]
    (most,) = re.findall(r"kMostBlocks = (\d+);", cuda_build.source("block_tiles.cuh").read_text())
    assert int(most) == block_tiles.MOST_BLOCKS


@pytest.mark.prove
@pytest.mark.parametrize(("name", "cut"), [
    ("Q4_K", (16, 2, 2)), ("Q6_K", (64, 2, 2)), ("Int4", (32, 2, 2)), ("Int4_64", (16, 2, 2)), ("Int4_32", (16, 2, 2)),
    ("Q4_K", (256, 2, 1)),
])  # fmt: skip
def test_the_source_of_tiles_has_the_values_in_any_order_of_threads(
    name: str, cut: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One kernel of ``block_tiles.cuh`` on this processor (``cuda_host``), of blocks that share tiles."""
    source = "int4_tiles" if name in INT4 else "gguf_tiles"
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=0))
    lines = cuda_build.source(f"{source}.cu").read_text().splitlines()
    line = lines.index(f"  TRANSECT_CUT(k{name}, {cut[0]}, {cut[1]}, {cut[2]})") + 1
    kernel: Any = object.__new__(Int4Tiles if name in INT4 else GGUFTiles)
    kernel._launch = cuda_host.Launcher(
        source, f"transect_{source}", block_tiles.SIGNATURE, None,
        "-DTRANSECT_OF=100000", f"-DTRANSECT_PART={line}", "-D__CUDA_ARCH__=900", "-D__CUDA_ARCH_FEAT_SM90_ALL",
    )  # fmt: skip
    kernel._flags = torch.zeros(2 * block_tiles.MOST_BLOCKS, dtype=torch.int32)
    for m, n, k, teams in ((cut[0] + 3, 160, 1024, 5), (5, 264, 1288, 4)):
        k = k // 128 * 128 if name in INT4 else k
        x, bias = sample(m, k + 8).bfloat16()[:, :k], sample(n).bfloat16()
        if name in INT4:
            arguments: Any = (int4_weight(n, k, INT4[name]), n)
            wanted = int4_matmul.reference(x.double(), *arguments, bias.double())
        else:
            arguments = (drawn(name, n, k), name, n)
            wanted = reference(x.double(), *arguments, bias.double())
        for together in (False, True):
            blocks = 2 * teams if cut[0] == 256 else teams
            tiling = block_tiles.BlockTiling(*cut, blocks, 2, 4, together)
            found = []
            for order in range(2):
                kernel._launch.draw(order)
                found.append(kernel(x, *arguments, bias, tiling=tiling))
            assert (found[0].double() - wanted).norm() < 5e-3 * wanted.norm(), tiling
            assert torch.equal(*found)
            if n % 32 == 0:
                gated = kernel(x, *arguments, gated=True, tiling=tiling)
                assert (gated.double() - gate(wanted - bias.double())).norm() < 6e-3 * gate(wanted).norm(), tiling
