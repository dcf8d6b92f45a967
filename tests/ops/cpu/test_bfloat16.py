"""Products whose inputs are rounded to bfloat16: near what float64 makes of the rounded inputs, the same bits in any
batch, and float32 where the processor lacks the instruction."""

from __future__ import annotations

import pytest
import torch

from tests.ops.cpu.test_kernels import _random_weight
from transect.ops.cpu import build
from transect.ops.cpu.library import Kind, Library, load
from transect.ops.registry import Unavailable

ROUNDING = 2.0**-8
"""Largest relative error of a number that is rounded to bfloat16."""
FEATURES = {"avx512f", "avx512bw", "avx512vl", "avx512_bf16", "avx512vbmi"}


def _rounded(library: Library, kind: Kind, x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().float() if library.bfloat16 and kind != Kind.F32 else x


@pytest.mark.parametrize("kind", list(Kind))
@pytest.mark.parametrize(("n", "k"), [(1, 32), (40, 64), (100, 1536)])
def test_products_of_rounded_inputs_and_their_bits_in_any_batch(
    rounding_library: Library, kind: Kind, n: int, k: int
) -> None:
    library = rounding_library
    torch.manual_seed(n * k)
    k = -(-k // 256) * 256 if kind.name.endswith("_K") else k
    weight, dense = _random_weight(library, kind, n, k, bias=n > 40)
    x = torch.randn(45, k) * torch.logspace(-3, 3, 45)[:, None]
    bias = 0 if weight.bias is None else weight.bias.double()
    whole = library.linear(x, weight)
    exact = _rounded(library, kind, x).double() @ dense.double().T + bias
    terms = x.double().abs() @ dense.double().abs().T + abs(bias)
    assert ((whole - exact).abs() <= 2e-6 * terms).all()
    assert ((whole - (x.double() @ dense.double().T + bias)).abs() <= (ROUNDING + 2e-6) * terms).all()
    for m in (0, 1, 2, 3, 7, 8, 13, 33):
        assert torch.equal(library.linear(x[:m], weight), whole[:m]), m
    assert torch.equal(library.linear(x[7:8], weight), whole[7:8])


@pytest.mark.parametrize("kind", [Kind.BF16, Kind.Q8_FLOAT_G16, Kind.Q4_0])
def test_odd_lengths_of_rows(rounding_library: Library, kind: Kind) -> None:
    """A row need not end where a vector does."""
    torch.manual_seed(0)
    panel = rounding_library.panel(kind)
    for panels in (1, 3, 17, 29):
        weight, dense = _random_weight(rounding_library, kind, 18, panels * panel)
        x = torch.randn(3, panels * panel)
        exact = _rounded(rounding_library, kind, x).double() @ dense.double().T
        terms = x.double().abs() @ dense.double().abs().T
        assert ((rounding_library.linear(x, weight) - exact).abs() <= 2e-6 * terms).all()


def test_every_code_is_exact(rounding_library: Library) -> None:
    """Against an input of 1 the product is the weight: in fp8 to the bit, in 8 bits within the rounding of its zero."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(16, 1).clone()
    codes[codes & 0x7F == 0x7F] = 1  # NaN
    one = torch.eye(256)
    for kind in (Kind.FP8, Kind.Q8_FLOAT):
        scale = torch.full((16, 8), 0.75)
        data = rounding_library.pack_affine(kind, codes, scale, -96 * scale)
        weight = _random_weight(rounding_library, kind, 16, 256)[0]
        weight.data.copy_(data)
        rows = rounding_library.rows(weight, torch.arange(16))
        torch.testing.assert_close(rounding_library.linear(one, weight).T, rows, rtol=0, atol=0)


def test_a_processor_without_the_instruction_computes_in_float32(libraries: tuple[Library, Library]) -> None:
    exact, rounding = libraries
    torch.manual_seed(0)
    weight, _ = _random_weight(exact, Kind.Q4_0, 48, 64)
    x = torch.randn(5, 64)
    assert torch.equal(exact.linear(x, weight), rounding.linear(x, weight)) == (not rounding.bfloat16)
    assert not exact.bfloat16
    assert rounding.bfloat16 == (
        exact.name.startswith("kernels-native") and set(build._processor().split()) >= FEATURES
    )
    assert rounding.name == exact.name + ("-bfloat16" if rounding.bfloat16 else "")


def test_threads_do_not_change_the_bits() -> None:
    try:
        one, three = load(1, bfloat16=True), load(3, bfloat16=True)
    except Unavailable as reason:
        pytest.skip(str(reason))
    torch.manual_seed(0)
    weight, _ = _random_weight(one, Kind.Q4_K, 200, 256)
    x = torch.randn(21, 256)
    assert torch.equal(one.linear(x, weight), three.linear(x, weight))
