"""Products with weights of 4-bit codes: that every way of ``int4_matmul`` gives them."""

import pytest
import torch
import torch.nn.functional as F
from cuda_kernels import int4_weight

from transect.ops.lang.jit import INTERPRETED
from transect.ops.linear.packed.int4 import int4_matmul
from transect.ops.numerics import sample


@pytest.fixture
def device() -> str:
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        return "cuda"
    if not INTERPRETED:
        pytest.skip("needs a GPU or Triton's interpreter")
    return "cpu"


def test_float32_does_not_lose_the_zeros_share_to_cancellation(device: str) -> None:
    weight = int4_weight(24, 1024, 64, device)
    x = (sample(3, 1024) + 4).to(device)  # rows with a mean: the sum of x is large
    exact = int4_matmul.reference(x.double(), weight, 24)
    of_torch = (F.linear(x, int4_matmul.dense(weight, 24, x.dtype)).double() - exact).norm()
    assert (int4_matmul.by_triton(x, weight, 24).double() - exact).norm() <= 2 * of_torch


@pytest.mark.parametrize("group", [32, 64, 128])
def test_a_rebuilt_weight_is_the_rounded_one(device: str, group: int) -> None:
    weight = int4_weight(40, 256, group, device)
    rebuilt = int4_matmul.rebuilt(torch.eye(256, device=device, dtype=torch.float16), weight, 40).T
    assert torch.allclose(rebuilt.float(), int4_matmul.dense(weight, 40, torch.float32), rtol=1e-3, atol=1e-6)


def test_gate_and_up_are_rebuilt_apart(device: str) -> None:
    weight = int4_weight(96, 256, 64, device)
    both = int4_matmul.rebuild(weight, 96, torch.float16)
    apart = both.unflatten(0, (-1, 2, 16)).transpose(0, 1).flatten(0, 2)
    assert torch.equal(int4_matmul.rebuild(weight, 96, torch.float16, apart=True), apart)


def test_shapes_that_do_not_fit_are_refused(device: str) -> None:
    weight = int4_weight(40, 256, 128, device)
    for x, n in ((torch.zeros(2, 128), 40), (torch.zeros(2, 256), 60)):
        with pytest.raises(ValueError, match="arrange"):
            int4_matmul.by_triton(x.to(device), weight, n)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("m", "n"),
    [
        *((m, 1000) for m in (1, 16, 64, 65, 300, 520)),
        *((m, 1004) for m in (40, 300)),
        *((m, 17000) for m in (16, 20, 40, 64)),
        (3, 66000),
    ],
)
def test_every_number_of_rows_has_a_kernel(m: int, n: int) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    weight = int4_weight(n, 1024, 128, "cuda")
    x = torch.randn(m, 1024, device="cuda", dtype=torch.bfloat16, generator=torch.Generator("cuda").manual_seed(m))
    bias = torch.randn(n, device="cuda", dtype=torch.bfloat16, generator=torch.Generator("cuda").manual_seed(0))
    want = int4_matmul.reference(x.double(), weight, n, bias.double())
    of_torch = (F.linear(x, int4_matmul.dense(weight, n, x.dtype), bias).double() - want).norm()
    assert (int4_matmul.int4_matmul(x, weight, n, bias).double() - want).norm() <= 2 * of_torch


@pytest.mark.gpu
def test_the_peer_that_torch_brings_computes_the_same() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    weight = int4_weight(64, 1024, 128, "cuda")
    x = torch.randn(3, 1024, device="cuda", dtype=torch.bfloat16, generator=torch.Generator("cuda").manual_seed(1))
    want = int4_matmul.reference(x.double(), weight, 64)
    peer = int4_matmul.Prepared(int4_matmul._for_torch, int4_matmul._by_torch)
    assert (peer(x, weight, 64).double() - want).norm() <= 0.02 * want.norm()
