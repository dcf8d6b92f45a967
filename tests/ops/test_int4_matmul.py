"""Weights of 4-bit codes: which kernel a product runs on, and that all of them give it."""

import pytest
import torch

from transect.ops import int4_matmul
from transect.ops.int4_packing import pack
from transect.ops.numerics import sample


def _weight(n: int, k: int, group: int, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, generator=torch.Generator().manual_seed(n + k))
    scale = (sample(n, k // group, seed=1).abs() + 0.1).mul(k**-0.5 / 4).to(device, torch.bfloat16)
    return pack(codes, group).to(device), scale, -7.5 * scale


def test_float32_does_not_lose_the_zeros_share_to_cancellation() -> None:
    pytest.importorskip("triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not int4_matmul.INTERPRETED:
        pytest.skip("needs a GPU or Triton's interpreter")
    codes, scale, zero = _weight(24, 1024, 64, device)
    x = (sample(3, 1024) + 4).to(device)  # rows with a mean: the sum of x is large
    exact = int4_matmul.reference(x.double(), codes, scale.double(), zero.double())
    got = int4_matmul.by_triton(x, codes, scale.float(), zero.float())
    of_torch = (int4_matmul._peer(x, codes, scale.float(), zero.float()).double() - exact).norm()
    assert (got.double() - exact).norm() <= 2 * of_torch


@pytest.mark.parametrize(
    ("m", "n", "expected"),
    [(1, 4096, "rows"), (16, 28672, "rows"), (17, 28672, "hopper"), (64, 4096, "triton"), (8, 128256, "hopper"),
     (65, 128256, "rebuilt")],
)  # fmt: skip
def test_rows_decide_which_way_is_taken(m: int, n: int, expected: str) -> None:
    assert int4_matmul.way(m, n) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 16, 64, 70, 95, 96, 300])
def test_every_number_of_rows_has_a_kernel(m: int) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    weight = _weight(1000, 1024, 128, "cuda")
    x = torch.randn(m, 1024, device="cuda", dtype=torch.bfloat16, generator=torch.Generator("cuda").manual_seed(m))
    bias = torch.randn(1000, device="cuda", dtype=torch.bfloat16, generator=torch.Generator("cuda").manual_seed(0))
    want = int4_matmul.reference(x.double(), weight[0], *(t.double() for t in (*weight[1:], bias)))
    of_torch = (int4_matmul._peer(x, *weight, bias).double() - want).norm()
    assert (int4_matmul.int4_matmul(x, *weight, bias).double() - want).norm() <= 2 * of_torch
