"""Weights of 8 bits: the tilings and the Triton kernels everywhere, the CUDA kernels on a GPU."""

import re

import pytest
import torch
import torch.nn.functional as F
from cuda_kernels import loaded

from transect.ops.lang import cuda_build
from transect.ops.lang.jit import INTERPRETED
from transect.ops.linear.few_rows.cuda import SHARED, Beside, CudaTiling
from transect.ops.linear.packed.eight_bit import scaled8_rounding, scaled8_rows, scaled8_tiles

FORMATS = ("fp8", "int8", "blocks")


def weight(name, n, k, device="cpu", seed=0):
    """(codes, scale) of random numbers."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(n, k, generator=generator)
    codes, scale = scaled8_rounding.rounded(values, name != "int8")
    if name == "blocks":
        scale = torch.rand(-(-n // 128), -(-k // 128), generator=generator) / 64 + 1e-3
    return codes.to(device), scale.to(device)


def rows_of(m, k, device="cpu", dtype=torch.float32):
    return torch.randn(m, k, generator=torch.Generator().manual_seed(1)).to(device, dtype)


def exact(x, codes, scale, fp8):
    return x.double() @ scaled8_tiles.dense(codes, scale, fp8, torch.float64).T


def test_the_source_compiles_the_kernels_that_are_known_here():
    source = cuda_build.source("scaled8.cu").read_text()
    listed = re.findall(r"^  TRANSECT_ROWS\((\w+), (\d), (\d)\)$", source, re.M)
    for format_ in ("kFp8", "kInt8", "kFp8Blocks"):
        found = sorted((int(columns), int(stages)) for own, columns, stages in listed if own == format_)
        assert found == sorted(scaled8_rows.KERNELS + scaled8_rows.SHALLOW)


@pytest.mark.parametrize("n", [16, 1024, 4096, 6144, 28672, 151936])
@pytest.mark.parametrize("m", [1, 8, 16])
@pytest.mark.parametrize("k", [64, 4096, 14336])
def test_a_tiling_covers_the_weight_and_fits(m, n, k):
    for gated in (False, True):
        tiling = scaled8_rows.choose_tiling(m, n, k, 132, gated)
        assert (tiling.columns, tiling.stages) in scaled8_rows.KERNELS
        assert tiling.per * 16 * 132 >= n and scaled8_rows.shared_bytes(tiling, m) <= SHARED
        assert not (gated and tiling.ranks > 1)


def test_what_the_kernels_do_not_take_is_said():
    x, (codes, scale) = rows_of(2, 64, dtype=torch.bfloat16), weight("fp8", 5, 64)
    assert scaled8_rows.refusal(x, codes, scale) is scaled8_tiles.refusal(x, codes, scale) is None
    assert "bfloat16" in scaled8_rows.refusal(x.float(), codes, scale)
    assert "16 bytes" in scaled8_rows.refusal(x[:, 1:], codes[:, 1:], scale)
    assert "16 codes" in scaled8_rows.refusal(x[:, :40].contiguous(), codes[:, :40], scale)
    assert "multiple of 16" in scaled8_tiles.refusal(x[:, :40], codes[:, :40], scale)
    for refusal in (scaled8_rows.refusal, scaled8_tiles.refusal):
        assert "scales must be [5]" in refusal(x, codes, scale[:3])
        assert "float32" in refusal(x, codes, scale.half())


@pytest.mark.skipif(not INTERPRETED, reason="on a GPU the product of all shapes is tested below")
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 24, 64), (35, 33, 160), (17, 130, 144)])
def test_both_sides_in_eight_bits(name, m, n, k):
    """The kernels' own sums, of the codes that the reference rounds to."""
    codes, scale = weight(name, n, k)
    fp8, bias, x = name != "int8", rows_of(1, n)[0], rows_of(m, k)
    a, s = scaled8_rounding.rounded(x, fp8, name == "blocks")
    found = scaled8_tiles.Tiles8().product(a, s, codes, scale, bias, fp8, dtype=torch.float32)
    torch.testing.assert_close(found, scaled8_tiles.reference(x, codes, scale, bias, fp8), rtol=1e-5, atol=1e-4)
    wide = s[:, None] if s.ndim == 1 else s.repeat_interleave(128, 1)[:, :k]
    error = (a.view(torch.float8_e4m3fn).float() if fp8 else a.float()) * wide - x
    assert error.abs().amax() <= x.abs().amax() / (16 if fp8 else 127)


@pytest.mark.skipif(not INTERPRETED, reason="on a GPU the product of all shapes is tested below")
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("m", "n", "k"), [(20, 72, 272), (70, 136, 272)])
def test_the_sums_of_gpus_without_bulk_copies(monkeypatch, name, m, n, k):
    monkeypatch.setattr(scaled8_tiles, "copies_in_bulk", lambda device: False)
    codes, scale = weight(name, n, k)
    fp8, bias, x = name != "int8", rows_of(1, n)[0], rows_of(m, k)
    a, s = scaled8_rounding.rounded(x, fp8, name == "blocks")
    found = scaled8_tiles.Tiles8().product(a, s, codes, scale, bias, fp8, dtype=torch.float32)
    torch.testing.assert_close(found, scaled8_tiles.reference(x, codes, scale, bias, fp8), rtol=1e-5, atol=1e-4)


@pytest.mark.skipif(not INTERPRETED, reason="on a GPU it is tested below, with what it is for")
def test_rows_are_rounded_as_by_torch():
    """But where the interpreter cuts fp8 off."""
    x = rows_of(5, 200)
    for fp8, blocks in ((True, False), (True, True), (False, False)):
        codes, scale = scaled8_rounding.triton_rounded(x, fp8, blocks)
        of_torch, scale_of_torch = scaled8_rounding.rounded(x, fp8, blocks)
        assert torch.equal(scale, scale_of_torch)
        assert codes.ne(of_torch).float().mean() <= (0.04 if fp8 else 0)


@pytest.fixture
def few():
    return loaded(scaled8_rows.CudaRows8)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 48, 64), (3, 200, 1008), (8, 6144, 4096), (16, 1024, 3072), (1, 4096, 14336)]
)
def test_few_rows_have_the_product_of_the_values(few, name, m, n, k):
    codes, scale = weight(name, n, k, "cuda")
    x, bias = rows_of(m, k, "cuda", torch.bfloat16), rows_of(1, n, "cuda", torch.bfloat16)[0]
    want = exact(x, codes, scale, name != "int8") + bias.double()
    for dependent in (False, True):
        found = few(x, codes, scale, bias, name != "int8", dependent_launch=dependent)
        assert (found.double() - want).norm() <= 0.004 * want.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
def test_every_cut_of_few_rows_gives_the_product(few, name):
    codes, scale = weight(name, 520, 4096, "cuda")
    x = rows_of(9, 4096, "cuda", torch.bfloat16)
    want = exact(x, codes, scale, name != "int8")
    for columns, stages in scaled8_rows.KERNELS + scaled8_rows.SHALLOW:
        for warps, ranks in ((4, 1), (8, 1), (4, 4)):
            tiling = CudaTiling(columns, stages, columns + 1, warps, ranks)
            clusters = ranks == 1 or few._target.hopper
            if clusters and scaled8_rows.shared_bytes(tiling, 9) <= few._target.block_bytes:
                found = few(x, codes, scale, fp8=name != "int8", tiling=tiling)
                assert (found.double() - want).norm() <= 0.004 * want.norm(), tiling


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("m", [1, 8, 11])
def test_gate_and_norms_beside_few_rows(few, name, m):
    fp8 = name != "int8"
    codes, scale = weight(name, 1024, 512, "cuda")
    x = rows_of(m, 512, "cuda", torch.bfloat16)
    squares = (x.float() ** 2).unflatten(1, (-1, 16)).sum(-1)
    normed = x.double() * torch.rsqrt(squares.double().sum(1, keepdim=True) / 512 + 1e-5)
    gate, up = exact(normed, codes, scale, fp8).chunk(2, 1)
    found = few.beside(x, codes, scale, Beside(squares=squares, eps=1e-5), fp8=fp8, gated=True)[0]
    want = F.silu(gate) * up
    assert (found.double() - want).norm() <= 0.01 * want.norm()
    residual, factor = rows_of(m, 1024, "cuda", torch.bfloat16), rows_of(1, 1024, "cuda", torch.bfloat16)[0]
    total, scaled, left = few.beside(x, codes, scale, Beside(residual=residual, scale=factor), fp8=fp8)
    want = exact(x, codes, scale, fp8) + residual.double()
    assert (total.double() - want).norm() <= 0.005 * want.norm()
    assert (scaled.double() - want * factor.double()).norm() <= 0.01 * (want * factor.double()).norm()
    want = (total.float() ** 2).unflatten(1, (left.shape[1], -1)).sum(-1)  # of sixteens, or of tiles by Triton
    torch.testing.assert_close(left, want, rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("m", "n", "k"), [(17, 48, 64), (64, 1024, 4096), (130, 520, 1040), (700, 4096, 2048)])
def test_many_rows_in_eight_bits(name, m, n, k):
    codes, scale = weight(name, n, k, "cuda")
    x, fp8 = rows_of(m, k, "cuda", torch.bfloat16), name != "int8"
    a, s = scaled8_rounding.triton_rounded(x, fp8, name == "blocks")
    of_torch, scale_of_torch = scaled8_rounding.rounded(x, fp8, name == "blocks")
    torch.testing.assert_close(s, scale_of_torch)
    assert (a.int() - of_torch.int()).ne(0).float().mean() <= 0.01
    found = scaled8_tiles.Tiles8()(x, codes, scale, None, fp8)
    want = scaled8_tiles.reference(x.float(), codes, scale, None, fp8)
    assert (found.float() - want).norm() <= 0.01 * want.norm()
    want = exact(x, codes, scale, fp8)
    assert (found.double() - want).norm() <= 0.05 * want.norm()
