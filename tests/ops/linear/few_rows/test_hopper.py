"""Products of 17 to 256 rows on Hopper: tilings and choices everywhere, the kernel on a GPU."""

import re

import pytest
import torch
import torch.nn.functional as F
from cuda_kernels import check_chain, loaded, product_inputs

from transect.ops.lang import cuda_build
from transect.ops.linear.few_rows import hopper as small_matmul_hopper
from transect.ops.linear.few_rows.choices import ROWS
from transect.ops.linear.few_rows.hopper import (
    COMPILED,
    FLAGS,
    INVARIANT,
    HopperTiling,
    candidates,
    choose_tiling,
)
from transect.ops.linear.few_rows.small_matmul import best_launcher

SIZES = [(6144, 4096), (4096, 14336), (28672, 4096), (128256, 2048), (1024, 3072), (40, 64), (8, 8), (1000, 520)]


def test_the_source_compiles_the_kernels_that_are_known_here() -> None:
    source = cuda_build.source("small_matmul_hopper.cu").read_text()
    listed = re.findall(r"^  TRANSECT_CUT\(([\d, ]+)\)$", source, re.M)
    assert {tuple(int(part) for part in line.split(",")) for line in listed} == {*COMPILED, *INVARIANT}
    assert len(listed) == len(COMPILED) + len(INVARIANT)


@pytest.mark.parametrize(("n", "k"), SIZES)
@pytest.mark.parametrize("m", [17, 32, 33, 64, 100, 128, 200, 256])
def test_tilings_are_of_known_kernels_and_fit(m: int, n: int, k: int) -> None:
    rule = choose_tiling(m, n, k)
    assert rule.refusal(m, n, k) is None
    for tiling in [rule, *candidates(m, n, k)]:
        assert tiling.compiled in COMPILED
        assert tiling.refusal(m, n, k) is None, tiling


def test_what_a_tiling_does_not_take_is_said() -> None:
    tiling = choose_tiling(64, 4096, 4096)
    assert "rows" in tiling.refusal(65, 4096, 4096)
    gated = next(HopperTiling(*kernel, 1, 0, 3) for kernel in COMPILED if kernel[1])
    assert "bias" in gated.refusal(16, 4096, 4096, True)


def test_what_the_kernel_does_not_take_is_said() -> None:
    x, weight = torch.zeros(20, 64, dtype=torch.bfloat16), torch.zeros(40, 64, dtype=torch.bfloat16)
    refusal = small_matmul_hopper.refusal
    assert refusal(x, weight) is refusal(x, weight, torch.zeros(40, dtype=torch.bfloat16)) is None
    assert "bfloat16" in refusal(x.float(), weight)
    assert "16 bytes" in refusal(x[:, 1:], weight[:, 1:])
    assert "[M, K]" in refusal(x[:, :32], weight)
    assert "multiple of 8" in refusal(x, weight[:33])
    assert "256" in refusal(torch.zeros(257, 64, dtype=torch.bfloat16), weight)


@pytest.fixture
def rows() -> small_matmul_hopper.HopperRows:
    return loaded(small_matmul_hopper.HopperRows, hopper=True)


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), [(4096, 14336), (1000, 520), (40, 72), (8, 8), (6144, 4096)])
@pytest.mark.parametrize("m", [17, 32, 50, 64, 100, 128, 137, 200, 256])
def test_every_tiling_gives_the_product_and_every_run_the_same(
    rows: small_matmul_hopper.HopperRows, m: int, n: int, k: int
) -> None:
    x, weight, bias = product_inputs(m, n, k)
    want = x.double() @ weight.double().T + bias.double()
    of_torch = (F.linear(x, weight, bias).double() - want).norm()
    for tiling in [choose_tiling(m, n, k), *candidates(m, n, k)]:
        got = rows(x, weight, bias, tiling=tiling)
        assert (got.double() - want).norm() <= 2 * of_torch, tiling
        for dependent_launch in (False, True):
            assert torch.equal(got, rows(x, weight, bias, tiling=tiling, dependent_launch=dependent_launch)), tiling


@pytest.mark.gpu
@pytest.mark.parametrize("m", [17, 64, 100, 128, 137, 200, 256])
@pytest.mark.parametrize(("features", "k"), [(14336, 4096), (520, 200)])
def test_the_gate_is_applied_to_the_sums(rows: small_matmul_hopper.HopperRows, m: int, features: int, k: int) -> None:
    x, weight, _ = product_inputs(m, 2 * features, k)
    gate, up = (x.double() @ weight.double().T).chunk(2, 1)
    want = F.silu(gate) * up
    rounded = want.to(x.dtype)
    tried = candidates(m, features, k, gated=True)
    assert tried
    for tiling in tried:
        got = rows(x, weight, tiling=tiling)
        assert (got.double() - want).norm() <= 2 * (rounded.double() - want).norm(), tiling
        assert torch.equal(got, rows(x, weight, tiling=tiling, dependent_launch=True)), tiling


@pytest.mark.gpu
def test_launches_on_one_stream_in_a_graph_follow_each_other(rows: small_matmul_hopper.HopperRows) -> None:
    tilings = candidates(100, 1024, 1024)
    assert any(tiling.parts(1024) for tiling in tilings)
    check_chain(rows, 100, [{"tiling": tiling} for tiling in tilings], 0.1)


@pytest.mark.gpu
@pytest.mark.parametrize("m", [32, 64, 128, 256])
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (6144, 4096), (4096, 14336), (16384, 2048), (6144, 1024)])
def test_by_itself_and_in_a_chain_it_is_the_same_product(
    rows: small_matmul_hopper.HopperRows, m: int, n: int, k: int
) -> None:
    x, weight, _ = product_inputs(m, n, k)
    want = x.double() @ weight.double().T
    of_torch = (F.linear(x, weight).double() - want).norm()
    launch = best_launcher()
    for dependent_launch in (False, True):
        got = launch(x, weight, dependent_launch=dependent_launch)
        assert (got.double() - want).norm() <= 2 * of_torch, dependent_launch
        assert torch.equal(got, launch(x, weight, dependent_launch=dependent_launch)), dependent_launch


@pytest.mark.gpu
def test_what_it_does_not_take_raises(rows: small_matmul_hopper.HopperRows) -> None:
    x, weight, _ = product_inputs(40, 64, 64)
    with pytest.raises(ValueError, match="16 bytes"):
        rows(x[:, 1:], weight[:, 1:])
    with pytest.raises(ValueError, match="rows"):
        rows(
            x,
            weight,
            tiling=HopperTiling(*next(kernel for kernel in COMPILED if kernel[0] and kernel[2] < 64), 1, 0, 2),
        )


def test_flags_hold_a_counter_for_every_block_of_every_tiling() -> None:
    for m in ROWS:
        for n, k in SIZES:
            for tiling in candidates(m, n, k):
                assert not tiling.parts(n) or tiling.grid(n) <= FLAGS, tiling
