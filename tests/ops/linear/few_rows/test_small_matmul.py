"""Products of few rows: the tilings everywhere, the CUDA kernels on a GPU."""

import re
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from cuda_kernels import check_chain, loaded, product_inputs

from transect.hardware.targets import NVIDIA_TARGETS, TARGETS
from transect.ops.lang import cuda_build
from transect.ops.linear.few_rows import cuda as small_matmul_cuda
from transect.ops.linear.few_rows import small_matmul
from transect.ops.linear.few_rows.triton import TritonTiling
from transect.ops.registry import Unavailable


def test_the_source_compiles_the_kernels_that_are_known_here() -> None:
    source = cuda_build.source("small_matmul.cu").read_text()
    listed = re.findall(r"^  TRANSECT_ROWS\((\d), (\d+), (\d)\)$", source, re.M)
    assert sorted(tuple(map(int, each)) for each in listed) == sorted(small_matmul_cuda.COMPILED)


@pytest.mark.parametrize("n", [16, 37, 1024, 3072, 4096, 6144, 28672, 128256])
@pytest.mark.parametrize("m", [1, 8, 16, 32, 300])
def test_a_tiling_covers_the_weight_fits_and_sums_in_one_order(m: int, n: int) -> None:
    for shared in {TARGETS[name].block_bytes for name in NVIDIA_TARGETS}:
        if m > 16 and not small_matmul_cuda.quicker(m, 1, 1, shared):
            continue  # the Triton kernels run
        tiling = small_matmul_cuda.choose_tiling(m, n, 132, shared)
        assert tiling.refusal(m) is None and small_matmul_cuda.shared_bytes(tiling, m) <= shared
        assert tiling.per * 16 * 132 >= n
        alone = small_matmul_cuda.choose_tiling(1, n, 132, shared)
        assert (tiling.warps, tiling.ranks, tiling.per) == (alone.warps, alone.ranks, alone.per)


def test_what_a_tiling_does_not_take_is_said() -> None:
    tiling = small_matmul_cuda.CudaTiling
    assert tiling(2, 4, 3, 4, 8).refusal(32) is tiling(2, 4, 3).refusal(1, gated=True) is None
    assert "compiled" in tiling(2, 5, 3).refusal(1)
    assert "warps" in tiling(2, 4, 3, warps=6).refusal(1)
    assert "ranks" in tiling(2, 4, 3, ranks=9).refusal(1)
    assert "one rank" in tiling(2, 4, 3, ranks=2).refusal(1, gated=True)
    assert tiling(3, 4, 3).refusal(1) is None and "shared memory" in tiling(3, 4, 3).refusal(8)


def test_what_the_cuda_kernels_do_not_take_is_said() -> None:
    x, weight = torch.zeros(2, 64, dtype=torch.bfloat16), torch.zeros(5, 64, dtype=torch.bfloat16)
    assert small_matmul_cuda.cuda_refusal(x, weight) is None
    assert "bfloat16" in small_matmul_cuda.cuda_refusal(x.float(), weight)
    assert "16 bytes" in small_matmul_cuda.cuda_refusal(x[:, 1:], weight[:, 1:])
    assert "[M, K]" in small_matmul_cuda.cuda_refusal(x[:, :32], weight)


@pytest.fixture
def rows() -> small_matmul_cuda.CudaRows:
    return loaded(small_matmul_cuda.CudaRows)


@pytest.mark.gpu
@pytest.mark.parametrize("dependent_launch", [False, True])
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(1, 37, 72), (3, 200, 1000), (8, 6144, 4096), (16, 1024, 3072), (23, 1000, 1024), (100, 28672, 64)],
)
def test_error_is_that_of_torch_and_every_run_gives_the_same(
    rows: small_matmul_cuda.CudaRows, m: int, n: int, k: int, dependent_launch: bool
) -> None:
    x, weight, bias = product_inputs(m, n, k)
    want = x.double() @ weight.double().T + bias.double()
    got = rows(x, weight, bias, dependent_launch=dependent_launch)
    error, of_torch = ((y.double() - want).norm() for y in (got, F.linear(x, weight, bias)))
    assert error <= 2 * of_torch
    assert torch.equal(got, rows(x, weight, bias, dependent_launch=dependent_launch))


@pytest.mark.gpu
def test_every_cut_gives_the_product(rows: small_matmul_cuda.CudaRows) -> None:
    x, weight, bias = product_inputs(9, 520, 4096)
    want = x.double() @ weight.double().T + bias.double()
    of_torch = (F.linear(x, weight, bias).double() - want).norm()
    for columns, stages in small_matmul_cuda.KERNELS:
        for warps, ranks in ((4, 1), (4, 2), (8, 1), (4, 8)):
            tiling = small_matmul_cuda.CudaTiling(columns, stages, columns + 1, warps, ranks)
            if small_matmul_cuda.shared_bytes(tiling, 9) > small_matmul_cuda.SHARED:
                continue
            got = rows(x, weight, bias, tiling=tiling)
            assert (got.double() - want).norm() <= 2 * of_torch, tiling


@pytest.mark.gpu
def test_a_row_does_not_depend_on_the_others(rows: small_matmul_cuda.CudaRows) -> None:
    x, weight, bias = product_inputs(300, 1000, 4096)
    everything = rows(x, weight, bias)
    for m in (1, 7, 8, 9, 16, 17, 32, 33, 256):
        assert torch.equal(rows(x[:m], weight, bias), everything[:m]), m
    assert torch.equal(rows(x[290:], weight, bias), everything[290:])


@pytest.mark.gpu
def test_launches_on_one_stream_in_a_graph_follow_each_other(rows: small_matmul_cuda.CudaRows) -> None:
    check_chain(rows, 4, [{}] * 4, 0.05)


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 8, 11, 16, 30])
def test_the_gate_is_applied_to_the_sums(rows: small_matmul_cuda.CudaRows, m: int) -> None:
    x, weight, _ = product_inputs(m, 2 * 392, 1032)
    gate, up = (x.double() @ weight.double().T).chunk(2, 1)
    want = F.silu(gate) * up
    gate, up = F.linear(x, weight).chunk(2, 1)
    of_torch = ((F.silu(gate) * up).double() - want).norm()
    for columns, stages in small_matmul_cuda.KERNELS:
        for per, warps in ((columns, 8), (columns + 1, 4)):
            tiling = small_matmul_cuda.CudaTiling(columns, stages, per, warps)
            if small_matmul_cuda.shared_bytes(tiling, m) > small_matmul_cuda.SHARED:
                continue
            got = rows(x, weight, tiling=tiling, gated=True, dependent_launch=True)
            assert (got.double() - want).norm() <= 2 * of_torch, tiling
            assert torch.equal(got, rows(x, weight, tiling=tiling, gated=True)), tiling


@pytest.mark.gpu
def test_a_gate_wants_one_rank_and_no_bias(rows: small_matmul_cuda.CudaRows) -> None:
    x, weight, bias = product_inputs(2, 64, 64)
    with pytest.raises(ValueError, match="one rank"):
        rows(x, weight, tiling=small_matmul_cuda.CudaTiling(1, 4, 1, 4, 2), gated=True)
    with pytest.raises(ValueError, match="no bias"):
        rows(x, weight, bias, gated=True)


@pytest.fixture
def hopper_without_its_library(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """A machine that has the library for few rows, and no nvcc to build the one for more; who asked for that."""
    asked: list[torch.device] = []

    def missing(device: torch.device) -> None:
        asked.append(device)
        raise Unavailable("no nvcc")

    monkeypatch.setattr(small_matmul, "CudaRows", lambda: None)
    monkeypatch.setattr(small_matmul.small_matmul_hopper, "HopperRows", missing)
    return asked


X, WEIGHT = (SimpleNamespace(device=torch.device("cuda"), shape=(64, 64), dtype=torch.bfloat16) for _ in range(2))


def test_without_the_library_for_more_rows_others_run(
    hopper_without_its_library: list[torch.device], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(small_matmul, "CudaRows", lambda: "rows")
    monkeypatch.setattr(small_matmul, "cuda_refusal", lambda *arguments: None)
    monkeypatch.setattr(small_matmul, "TritonRows", lambda: lambda *arguments: "by Triton")
    monkeypatch.setattr("transect.hardware.device.own_target", lambda device: TARGETS["sm_90"])
    call = small_matmul.best_launcher()
    assert [call(X, WEIGHT), call(X, WEIGHT)] == ["by Triton"] * 2
    assert caplog.text.count("no nvcc") == len(hopper_without_its_library) == 1


def test_a_gated_product_that_is_not_there_is_looked_for_once(
    hopper_without_its_library: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    choice = small_matmul.choices.Choice("hopper", small_matmul.small_matmul_hopper.choose_tiling(64, 64, 64))
    monkeypatch.setattr(small_matmul.choices, "chosen", lambda *sizes, **kind: choice)
    monkeypatch.setattr(small_matmul.small_matmul_hopper, "refusal", lambda *arguments: None)
    monkeypatch.setattr("transect.hardware.device.own_target", lambda device: TARGETS["sm_90"])
    call = small_matmul.gated_launcher()
    assert [call(X, WEIGHT), call(X, WEIGHT)] == [None] * 2
    assert len(hopper_without_its_library) == 1


@pytest.mark.parametrize("what", ["dtype", "addresses"])
def test_a_gate_inside_the_triton_kernels_is_for_what_their_bulk_copies_take(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A float32 model of a measured size runs too, by other kernels."""
    tiling = TritonTiling(bm=64, bn=16, bk=64, split=1, bulk=True, gated=True)
    choice = small_matmul.choices.Choice("triton", tiling)
    monkeypatch.setattr(small_matmul.choices, "chosen", lambda *sizes, **kind: choice)
    monkeypatch.setattr(small_matmul, "TritonRows", lambda: lambda *arguments, tiling: tiling)
    call = small_matmul.gated_launcher()
    x, weight = torch.zeros(2, 64, dtype=torch.bfloat16), torch.zeros(32, 64, dtype=torch.bfloat16)
    assert call(x, weight) == tiling
    other = (x.float(), weight.float()) if what == "dtype" else (x[:, 1:], weight[:, 1:])
    assert call(*other) is None
