"""Rows in 8 bits that come with the norm or the gate before them: as by one kernel after the other."""

import pytest
import torch
import torch.nn.functional as F

from transect.ops.linear import gate_up
from transect.ops.linear.packed.eight_bit import scaled8_rounding
from transect.ops.norm import rms_norm
from transect.ops.opset import resolve_ops

DEVICE, DTYPE = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
FORMATS = {"fp8": (True, False), "int8": (False, False), "blocks": (True, True)}


def rows(m, k, seed=1):
    return torch.randn(m, k, generator=torch.Generator().manual_seed(seed)).to(DEVICE, DTYPE)


def check(found, exact, fp8, blocks):
    """``found`` is what the kernel that only rounds makes of ``exact``; GPUs may differ by a bit."""
    want = scaled8_rounding.triton_rounded(exact.to(DTYPE), fp8, blocks)
    torch.testing.assert_close(found.scale, want.scale, rtol=2e-2 if DEVICE == "cuda" else 1e-5, atol=0)
    assert found.codes.ne(want.codes).float().mean() <= (0.1 if DEVICE == "cuda" else 0.002)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("m", "k"), [(3, 200), (2, 256)])
def test_the_norm_of_a_sum(name, m, k):
    fp8, blocks = FORMATS[name]
    x, residual, weight = rows(m, 2 * k)[:, :k], rows(m, k, 2), rows(1, k, 3)[0]
    total, found = scaled8_rounding.norm_rounded(x, residual, weight, 1e-5, fp8, blocks)
    assert torch.equal(total, x + residual)
    check(found, rms_norm.reference(total, weight, 1e-5), fp8, blocks)


@pytest.mark.parametrize("name", FORMATS)
def test_the_gate(name):
    fp8, blocks = FORMATS[name]
    both = rows(3, 400)
    gate, up = both.float().chunk(2, 1)
    found = scaled8_rounding.gate_rounded(both, fp8, blocks)
    check(found, F.silu(gate) * up, fp8, blocks)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("m", "k"), [(17, 1000), (64, 4096), (300, 14336)])
def test_on_a_gpu_as_by_the_kernels_that_it_takes_the_place_of(name, m, k):
    """The stream to the bit; of the codes few differ, where the norm's sum has another order."""
    x, residual, weight = rows(m, k), rows(m, k, 2), rows(1, k, 3)[0]
    normed, stream = resolve_ops("cuda").add_rms_norm(x, residual, weight, 1e-5)
    total, found = scaled8_rounding.norm_rounded(x, residual, weight, 1e-5, *FORMATS[name], dependent_launch=True)
    assert torch.equal(total, stream)
    both = rows(m, 2 * k, 4)
    gated = scaled8_rounding.gate_rounded(both, *FORMATS[name], dependent_launch=True)
    for one, exact in ((found, normed), (gated, gate_up.gate_halves(both))):
        want = scaled8_rounding.triton_rounded(exact, *FORMATS[name])
        torch.testing.assert_close(one.scale, want.scale, rtol=0.01, atol=0)
        assert one.codes.ne(want.codes).float().mean() <= 0.01


def test_no_rows_and_rows_of_other_shapes():
    x, weight = rows(0, 32), rows(1, 32)[0]
    total, found = scaled8_rounding.norm_rounded(x, x, weight, 1e-5, True)
    assert total.shape == found.codes.shape == (0, 32) and found.scale.shape == (0,)
    with pytest.raises(ValueError, match="one shape and dtype"):
        scaled8_rounding.norm_rounded(rows(2, 32), rows(3, 32), weight, 1e-5, True)
