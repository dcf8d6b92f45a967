"""Products of 17 to 256 rows on Hopper: tilings and choices everywhere, the kernel on a GPU."""

import json
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from cuda_kernels import check_chain, loaded, product_inputs

from transect.ops.lang import cuda_build
from transect.ops.linear.few_rows import hopper as small_matmul_hopper
from transect.ops.linear.few_rows.hopper import (
    COMPILED,
    FLAGS,
    FOLDER,
    ROWS,
    Choice,
    HopperTiling,
    candidates,
    choose_tiling,
    read_choice,
)
from transect.ops.linear.few_rows.small_matmul import best_launcher

SIZES = [(6144, 4096), (4096, 14336), (28672, 4096), (128256, 2048), (1024, 3072), (40, 64), (8, 8), (1000, 520)]


def test_the_source_compiles_the_kernels_that_are_known_here() -> None:
    source = cuda_build.source("small_matmul_hopper.cu").read_text()
    listed = re.findall(r"^  TRANSECT_CUT\(([\d, ]+)\)$", source, re.M)
    assert {tuple(int(part) for part in line.split(",")) for line in listed} == set(COMPILED)
    assert len(listed) == len(COMPILED)


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


def test_choices_are_of_known_kernels_and_fit() -> None:
    files = list(FOLDER.glob("*.json"))
    assert [file.name for file in files] == ["nvidia_h200.json"]
    for size, entry in json.loads(files[0].read_text())["choices"].items():
        m, n, k = (int(part) for part in size.split()[0].split("x"))
        assert m in ROWS
        gated, stream = "gated" in size.split(), "stream" in size.split()
        choice = read_choice(entry)
        tiling = choice.tiling
        assert choice.by in ("hopper", "cuda", "triton", "gluon", "cublas"), size
        assert tiling is not None or choice.by not in ("hopper", "gluon"), size
        assert tiling is None or choice.by != "cublas", size
        assert stream or choice.by != "gluon", size
        assert not stream or (tiling is not None and choice.by != "hopper" and n % 16 == k % 64 == 0), size
        if tiling is None:
            continue
        if choice.by == "cuda":
            assert tiling.refusal(m, gated) is None, size
        if choice.by == "triton":
            width = tiling.bn * (2 if tiling.gated else 1)
            assert tiling.gated == gated and tiling.dependent_launch and tiling.bulk, size
            assert not stream or n % tiling.bn == 0, size  # squares of whole tiles
            assert tiling.stages * (tiling.bm + width) * tiling.bk * 2 <= 225 * 1024, size
        if choice.by == "gluon":
            assert tiling.gated == gated and tiling.bm < 2 * max(m, 33), size
            assert tiling.refusal(n // 2 if gated else n, k) is None, size
        if choice.by == "hopper":
            assert tiling.compiled in COMPILED, size
            assert tiling.gated == gated, size
            assert tiling.refusal(m, n // 2 if tiling.gated else n, k) is None, size


def test_a_choice_takes_a_tiling_of_its_own_kernel() -> None:
    with pytest.raises(TypeError, match="no tiling of cublas"):
        Choice("cublas", choose_tiling(64, 4096, 4096))
    with pytest.raises(TypeError, match="no tiling of triton"):
        Choice("triton", choose_tiling(64, 4096, 4096))


@pytest.mark.parametrize(
    ("m", "name"), [(1, "1x8x16"), (5, "8x8x16"), (17, "32x8x16"), (33, "64x8x16"), (65, "96x8x16"), (256, "256x8x16")]
)
def test_sizes_share_a_choice_by_rows(m: int, name: str) -> None:
    assert small_matmul_hopper.key(m, 8, 16) == name
    assert small_matmul_hopper.key(m, 8, 16, gated=True) == f"{name} gated"
    assert small_matmul_hopper.key(m, 8, 16, stream=True) == f"{name} stream"
    assert small_matmul_hopper.key(m, 8, 16, alone=True) == f"{name} alone"


def test_nothing_is_chosen_without_a_gpu_or_outside_the_rows() -> None:
    assert small_matmul_hopper.chosen(64, 4096, 4096, torch.device("cpu")) is None
    assert small_matmul_hopper.chosen(0, 4096, 4096, torch.device("cuda")) is None
    assert small_matmul_hopper.chosen(257, 4096, 4096, torch.device("cuda")) is None


def test_from_193_to_255_rows_no_tiling_for_256_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    place, chosen = torch.device("cuda", 5), small_matmul_hopper.chosen
    measured = {m: chosen(m, 28672, 4096, place) for m in (50, 64, 100, 128, 256)}
    assert all(choice is not None and choice.by == "hopper" for choice in measured.values())
    assert measured[50] == measured[64] and measured[100] == measured[128]
    assert {chosen(m, 28672, 4096, place).by for m in (200, 255)} == {"cublas"}
    assert chosen(129, 4096, 4096, place) == chosen(160, 4096, 4096, place) != chosen(161, 4096, 4096, place)
    assert chosen(200, 4096, 1024, place).by == "triton"  # tiles that leave out rows that are not there
    assert chosen(100, 28673, 4096, place) is None
    chosen.cache_clear()


def test_alone_runs_what_is_quickest_then_or_else_what_a_chain_of_layers_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    place, chosen = torch.device("cuda", 6), small_matmul_hopper.chosen
    both = [(chosen(128, 6144, 4096, place), chosen(128, 6144, 4096, place, alone=True))]
    both.append((chosen(256, 4096, 4096, place), chosen(256, 4096, 4096, place, alone=True)))
    assert all(layer is not None and layer.by != "cublas" for layer, _ in both)
    assert all(alone is not None and alone.by == "cublas" for _, alone in both)
    assert chosen(128, 28672, 4096, place) == chosen(128, 28672, 4096, place, alone=True) is not None
    # 65 to 96 rows without a choice of their own take that of 128, here as in layers.
    assert chosen(80, 16384, 2048, place, alone=True) == Choice("cublas")
    assert chosen(200, 28672, 4096, place, alone=True) == Choice("cublas")
    assert chosen(100, 28673, 4096, place, alone=True) is None
    chosen.cache_clear()


def test_a_choice_for_alone_says_something_else_than_that_for_a_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    place, chosen = torch.device("cuda", 7), small_matmul_hopper.chosen
    named = [size for size in small_matmul_hopper.choices("NVIDIA H200") if size.endswith(" alone")]
    assert named
    for size in named:
        m, n, k = (int(part) for part in size.split()[0].split("x"))
        in_layers = chosen(m, n, k, place) or Choice("cublas")
        assert chosen(m, n, k, place, alone=True) != in_layers, size
    chosen.cache_clear()


def test_alone_nothing_of_ours_runs_that_was_slower_than_cublas(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the race that is recorded, from 64 rows on."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    place, chosen = torch.device("cuda", 8), small_matmul_hopper.chosen
    file = Path(__file__).parents[4] / "benchmarks" / "results" / "h200" / "ops_many_rows_alone.json"
    times: dict[tuple[int, int, int], dict[Choice, float]] = {}
    for row in json.loads(file.read_text())["rows"]:
        times.setdefault((row["rows"], row["n"], row["k"]), {})[read_choice(row["choice"])] = row["us"]
    ours = 0
    for size, by in times.items():
        choice = chosen(*size, place, alone=True) or Choice("cublas")
        ours += choice.by != "cublas"
        assert size[0] < 64 or by[choice] <= by[Choice("cublas")], size
    assert ours
    chosen.cache_clear()


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
