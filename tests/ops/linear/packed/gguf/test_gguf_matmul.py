"""Products with blocks of GGUF files: the kernels for few rows on Hopper, gates and tilings, what is said
to what they do not take. The reference and Triton are tested with all operators."""

import re

import pytest
import torch
from cuda_kernels import loaded, miss

from transect.ops.lang import cuda_build
from transect.ops.lang.jit import INTERPRETED
from transect.ops.linear.packed.gguf import gguf_rows
from transect.ops.linear.packed.gguf.gguf_layout import arranged_shape
from transect.ops.linear.packed.gguf.gguf_matmul import Products, dequantize, drawn, reference
from transect.ops.linear.packed.gguf.gguf_rows import (
    GGUFRows,
    GGUFTiling,
    choose_tiling,
    refusal,
    shared_bytes,
    tiling_of,
)
from transect.spec.numbers.gguf import UNITS


@pytest.fixture(scope="module")
def rows() -> GGUFRows:
    return loaded(GGUFRows)


@pytest.mark.gpu
@pytest.mark.parametrize("name", UNITS)
@pytest.mark.parametrize(("n", "k"), [(48, 512), (4096, 4096), (40, 1280), (1000, 14336)])
def test_few_rows_on_hopper(rows: GGUFRows, name: str, n: int, k: int) -> None:
    """x and the weight as they are, whatever the number of rows; the same bits in every run."""
    arranged = drawn(name, n, k, "cuda")
    bias = torch.randn(n, device="cuda").to(torch.bfloat16)
    for m in (1, 3, 8, 9, 17):
        x = torch.randn(m, k, device="cuda").to(torch.bfloat16)
        wanted = reference(x.double(), arranged, name, n, bias.double())
        found = rows(x, arranged, name, n, bias)
        assert miss(found, wanted) < 4e-3, m
        assert torch.equal(rows(x, arranged, name, n, bias, dependent_launch=True), found)
    assert miss(dequantize(arranged, name, n, k, torch.float32), reference_values(arranged, name, n, k)) < 1e-6


def test_gate_and_up_are_dequantized_apart() -> None:
    if not INTERPRETED:
        pytest.skip("needs Triton's interpreter")
    arranged = drawn("Q4_K", 96, 256, "cpu")
    both = dequantize(arranged, "Q4_K", 96, 256, torch.float32)
    apart = both.unflatten(0, (-1, 2, 16)).transpose(0, 1).flatten(0, 2)
    assert torch.equal(dequantize(arranged, "Q4_K", 96, 256, torch.float32, apart=True), apart)


def reference_values(arranged: torch.Tensor, name: str, n: int, k: int) -> torch.Tensor:
    one = torch.eye(k, device=arranged.device)
    return reference(one, arranged, name, n).T


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "Q8_0"])
def test_gates_and_tilings_on_hopper(rows: GGUFRows, name: str) -> None:
    n, k = 2048, 2048
    arranged = drawn(name, n, k, "cuda")
    for m in (1, 8, 11):
        x = torch.randn(m, k, device="cuda").to(torch.bfloat16)
        both = reference(x.double(), arranged, name, n)
        turns = both.unflatten(-1, (-1, 2, 16))
        wanted = torch.nn.functional.silu(turns[:, :, 0].flatten(1)) * turns[:, :, 1].flatten(1)
        assert miss(rows(x, arranged, name, n, gated=True), wanted) < 6e-3
        for tiling in (
            GGUFTiling(1, 1, 8, 1, 2),
            GGUFTiling(1, 3, 4, 2, 3),
            GGUFTiling(2, 2, 12, 3, 2),
            GGUFTiling(2, 6, 16, 1, 2),
        ):
            if shared_bytes(tiling, UNITS[name].unit, m) <= 227 * 1024:
                assert miss(rows(x, arranged, name, n, tiling=tiling), both) < 4e-3, tiling


@pytest.mark.parametrize("name", UNITS)
@pytest.mark.parametrize("gated", [False, True])
def test_chosen_tilings_fit(name: str, gated: bool) -> None:
    unit = UNITS[name].unit
    for m in (1, 2, 3, 8):
        for n, k in ((16, 256), (1024, 4096), (4096, 14336), (6144, 4096), (28672, 4096), (128256, 4096)):
            tiling = choose_tiling(m, n, k, unit, 132, gated)
            assert shared_bytes(tiling, unit, m) <= 227 * 1024
            assert tiling.warps % tiling.teams == 0
            assert not gated or (tiling.per % 2 == 0 and tiling.columns * tiling.teams % 2 == 0)
            assert -(-n // 16 // tiling.per) <= 132


def test_teams_keep_all_warps_busy() -> None:
    """Two warps share two of 14 sixteens by 16 units, and wait for each other once. All warps share two by 56."""
    wide, deep = (tiling_of(1, n, k, 2368, 132, 2, 16) for n, k in ((28672, 4096), (4096, 14336)))
    assert wide is not None and deep is not None
    assert (wide.per, wide.teams) == (14, 8) and (deep.per, deep.teams) == (2, 1)


def test_what_the_kernel_does_not_take_is_said() -> None:
    arranged, x = drawn("Q4_K", 40, 512), torch.zeros(3, 512, dtype=torch.bfloat16)
    assert refusal(x, arranged, "Q4_K", 40) is None
    assert "bfloat16" in str(refusal(x.float(), arranged, "Q4_K", 40))
    assert "16 bytes" in str(refusal(x[:, 1:], arranged, "Q4_K", 40))
    assert "units of Q5_K" in str(refusal(x, arranged, "Q5_K", 40))
    assert "units of Q4_K" in str(refusal(x, arranged, "Q4_K", 99))


def test_a_product_where_no_kernel_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    x, arranged = torch.randn(5, 512), drawn("Q6_K", 40, 512)
    assert torch.equal(Products("cpu")(x.double(), arranged, "Q6_K", 40), reference(x.double(), arranged, "Q6_K", 40))
    assert Products("cpu").gated(x, arranged, "Q6_K", 40) is None


def test_the_source_knows_the_types_and_their_sizes() -> None:
    source, codes = (cuda_build.source(f"gguf_{name}").read_text() for name in ("rows.cu", "codes.cuh"))
    (listed,) = re.findall(r"^enum Type \{(.*?)\};", codes, re.M)
    assert [name.strip().removeprefix("k") for name in listed.split(",")] == [*UNITS, "Int4", "Int4_64", "Int4_32"]
    started = re.findall(r"^  TRANSECT_START\(k(\w+), (\d)\)$", source, re.M)
    assert started == [(name, rb) for name in UNITS for rb in "12"]
    assert arranged_shape(UNITS["Q4_K"], 33, 300) == (3, 2, 2368)
    assert gguf_rows.MOST_ROWS == 8
