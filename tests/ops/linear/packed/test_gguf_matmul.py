"""Products with blocks of GGUF files: the kernel for few rows on Hopper, gates and tilings, what is said to what it
does not take. The reference and Triton are tested with all operators."""

import re

import pytest
import torch

from transect.ops.lang import cuda_build
from transect.ops.linear.packed import gguf_rows
from transect.ops.linear.packed.gguf_layout import FORMATS, arranged_shape
from transect.ops.linear.packed.gguf_matmul import Products, dequantize, drawn, reference
from transect.ops.linear.packed.gguf_rows import GGUFRows, Tiling, choose_tiling, refusal, shared_bytes
from transect.ops.registry import Unavailable


@pytest.fixture(scope="module")
def rows() -> GGUFRows:
    try:
        return GGUFRows()
    except Unavailable as error:
        pytest.skip(str(error))


def miss(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("n", "k"), [(48, 512), (4096, 4096), (40, 1280), (1000, 14336)])
def test_few_rows_on_hopper(rows: GGUFRows, name: str, n: int, k: int) -> None:
    """x and the weight as they are, whatever the number of rows; the same bits in every run."""
    arranged = drawn(name, n, k, "cuda")
    bias = torch.randn(n, device="cuda").to(torch.bfloat16)
    for m in (1, 3, 8, 9, 16, 33):
        x = torch.randn(m, k, device="cuda").to(torch.bfloat16)
        wanted = reference(x.double(), arranged, name, n, bias.double())
        found = rows(x, arranged, name, n, bias)
        assert miss(found, wanted) < 4e-3, m
        assert torch.equal(rows(x, arranged, name, n, bias, dependent_launch=True), found)
    assert miss(dequantize(arranged, name, n, k, torch.float32), reference_values(arranged, name, n, k)) < 1e-6


def reference_values(arranged: torch.Tensor, name: str, n: int, k: int) -> torch.Tensor:
    one = torch.eye(k, device=arranged.device)
    return reference(one, arranged, name, n).T


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "Q8_0"])
def test_gates_and_tilings_on_hopper(rows: GGUFRows, name: str) -> None:
    n, k = 2048, 2048
    arranged = drawn(name, n, k, "cuda")
    for m in (1, 8, 16):
        x = torch.randn(m, k, device="cuda").to(torch.bfloat16)
        both = reference(x.double(), arranged, name, n)
        turns = both.unflatten(-1, (-1, 2, 16))
        wanted = torch.nn.functional.silu(turns[:, :, 0].flatten(1)) * turns[:, :, 1].flatten(1)
        assert miss(rows(x, arranged, name, n, gated=True), wanted) < 6e-3
        for tiling in (Tiling(1, 1, 8, 2), Tiling(1, 3, 4, 3), Tiling(2, 2, 4, 2), Tiling(2, 6, 8, 2)):
            if shared_bytes(tiling, FORMATS[name].unit, m) <= 227 * 1024:
                assert miss(rows(x, arranged, name, n, tiling=tiling), both) < 4e-3, tiling


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("gated", [False, True])
def test_chosen_tilings_fit(name: str, gated: bool) -> None:
    unit = FORMATS[name].unit
    for m in (1, 2, 8, 9, 16):
        for n in (16, 1024, 4096, 6144, 28672, 128256):
            tiling = choose_tiling(m, n, unit, 132, gated)
            assert shared_bytes(tiling, unit, m) <= 227 * 1024
            assert tiling.per % tiling.columns == 0 and (not gated or tiling.columns == 2)
            assert -(-n // 16 // tiling.per) <= 132


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
    source = cuda_build.source("gguf_rows.cu").read_text()
    (listed,) = re.findall(r"^enum Type \{(.*?)\};", source, re.M)
    assert [name.strip().removeprefix("k") for name in listed.split(",")] == list(FORMATS)
    started = re.findall(r"^  TRANSECT_START\(k(\w+), (\d), (\d)\)$", source, re.M)
    assert started == [(name, rb, nt) for name in FORMATS for rb in "12" for nt in "12"]
    assert arranged_shape(FORMATS["Q4_K"], 33, 300) == (3, 2, 2368)
    assert gguf_rows.MOST_ROWS >= 16
