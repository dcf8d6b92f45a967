"""The Triton kernels of products of few rows, with tilings of the caller's."""

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from transect.ops.lang.jit import INTERPRETED
from transect.ops.linear import gate_up
from transect.ops.linear.few_rows import small_matmul
from transect.ops.linear.few_rows.choices import FOLDER, read_choice
from transect.ops.linear.few_rows.cuda import Beside
from transect.ops.linear.few_rows.triton import TritonRows, TritonTiling
from transect.ops.numerics import sample

interpreted = pytest.mark.skipif(not INTERPRETED, reason="the tiles are the interpreter's; a GPU takes larger ones")
CHOSEN = [
    (size, entry)
    for size, entry in json.loads((FOLDER / "nvidia_h200.json").read_text())["choices"].items()
    if entry["by"] == "triton" and "tiling" in entry
]
SMALL = TritonTiling(bm=16, bn=16, bk=16, split=1, warps=1, stages=1, bulk=True)


@interpreted
@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("split", [1, 3])
def test_a_cut_changes_nothing_but_the_order(swap: bool, split: int) -> None:
    x, weight, bias = sample(21, 104), sample(40, 104, seed=1), sample(40, seed=2)
    y = TritonRows()(x, weight, bias, tiling=replace(SMALL, swap=swap, split=split))
    torch.testing.assert_close(y, small_matmul.reference(x, weight, bias), rtol=1e-5, atol=1e-5)


@interpreted
@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("rows", [1, 16, 35])
@pytest.mark.parametrize("bulk", [False, True])
def test_a_cut_with_a_gate_is_the_gated_product(swap: bool, rows: int, bulk: bool) -> None:
    x, weight = sample(rows, 72), sample(2 * 40, 72, seed=1) / 8
    y = TritonRows()(x, weight, tiling=replace(SMALL, swap=swap, bulk=bulk, gated=True))
    torch.testing.assert_close(y, gate_up.reference(x, weight), rtol=1e-5, atol=1e-5)


@interpreted
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("swap", [False, True])
def test_a_weight_in_fp8_is_that_of_its_values(swap: bool, gated: bool) -> None:
    """Also with a norm on either side and parts of K."""
    x, codes, scale = sample(13, 104), (sample(80, 104, seed=1) * 20).to(torch.float8_e4m3fn), sample(80, seed=2).abs()
    values, tiling = codes.float() * scale[:, None] / 64, replace(SMALL, bulk=False, swap=swap, gated=gated)
    if gated:
        y = TritonRows().beside(x, codes, None, Beside(), tiling=tiling, weight_scale=scale / 64)[0]
        torch.testing.assert_close(y, gate_up.reference(x, values), rtol=1e-5, atol=1e-5)
        return
    beside = Beside(residual=sample(13, 80, seed=3), scale=sample(80, seed=4))
    for split in (1, 3):
        how = {"tiling": replace(tiling, split=split)}
        coded = TritonRows().beside(x, codes, None, beside, weight_scale=scale / 64, **how)
        for got, want in zip(coded, TritonRows().beside(x, values, None, beside, **how), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@interpreted
def test_a_gate_takes_no_bias_and_no_parts() -> None:
    x, weight, bias = sample(3, 64), sample(32, 64), sample(32)
    gated = replace(SMALL, gated=True)
    for arguments, tiling in (((x, weight, bias), gated), ((x, weight), replace(gated, split=2))):
        with pytest.raises(ValueError, match="a gate is for whole sums"):
            TritonRows()(*arguments, tiling=tiling)
    beside = Beside(residual=sample(3, 48), scale=sample(48))
    with pytest.raises(ValueError, match="whole tiles"):
        TritonRows().beside(x, sample(48, 64), None, beside, tiling=replace(SMALL, bn=32))


@interpreted
@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize(("split", "bulk"), [(1, True), (3, True), (3, False)])
def test_norms_beside_the_products_are_norms_apart(swap: bool, split: int, bulk: bool) -> None:
    tiling, rows = replace(SMALL, swap=swap, bulk=bulk), TritonRows()
    x, inward, residual, scale = (
        sample(21, 104),
        sample(48, 104, seed=1) / 10,
        sample(21, 48, seed=2),
        sample(48, seed=3),
    )
    outward = sample(2 * 40, 48, seed=4) / 7
    total, scaled, squares = rows.beside(
        x, inward, None, Beside(residual=residual, scale=scale), tiling=replace(tiling, split=split)
    )
    want = residual + x @ inward.T
    torch.testing.assert_close(total, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(scaled, want * scale, rtol=1e-5, atol=1e-5)
    assert scaled is not None and squares is not None and squares.shape == (21, 3)
    normed = F.rms_norm(want, (48,), scale, 1e-3)
    norm = Beside(squares=squares, eps=1e-3)
    got = rows.beside(scaled, outward, None, norm, tiling=replace(tiling, split=split))[0]
    torch.testing.assert_close(got, normed @ outward.T, rtol=1e-4, atol=1e-5)
    got = rows.beside(scaled, outward, None, norm, tiling=replace(tiling, gated=True))[0]
    torch.testing.assert_close(got, gate_up.reference(normed, outward), rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(("size", "entry"), CHOSEN, ids=[size for size, _ in CHOSEN])
def test_every_shipped_cut(size: str, entry: dict[str, object]) -> None:
    """It is as exact as torch, for any number of rows of its bucket, and the same bits every time."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs an NVIDIA GPU of Hopper or later")
    m, n, k = (int(part) for part in size.split()[0].split("x"))
    tiling, call = read_choice(entry).tiling, TritonRows()
    assert tiling is not None
    torch.manual_seed(0)
    weight = torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * k**-0.5
    for rows in (m, m - 7):
        x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
        exact = (gate_up if tiling.gated else small_matmul).reference(x.double(), weight.double())
        torchs = gate_up.by_linear(x, weight) if tiling.gated else F.linear(x, weight)
        y = call(x, weight, tiling=tiling)
        assert (y.double() - exact).norm() <= 1.2 * (torchs.double() - exact).norm()
        assert torch.equal(call(x, weight, tiling=tiling), y)
