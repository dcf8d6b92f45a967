"""Products of 17 to 256 rows on Hopper: plans and choices everywhere, the kernel on a GPU."""

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
    CUTS,
    FLAGS,
    FOLDER,
    ROWS,
    Choice,
    Plan,
    candidates,
    plan_rows,
    read_choice,
)
from transect.ops.linear.few_rows.small_matmul import best_launcher

SIZES = [(6144, 4096), (4096, 14336), (28672, 4096), (128256, 2048), (1024, 3072), (40, 64), (8, 8), (1000, 520)]


def test_the_source_compiles_the_cuts_that_are_known_here() -> None:
    source = cuda_build.source("small_matmul_hopper.cu").read_text()
    listed = re.findall(r"^  TRANSECT_CUT\(([\d, ]+)\)$", source, re.M)
    assert {tuple(int(part) for part in line.split(",")) for line in listed} == set(CUTS)
    assert len(listed) == len(CUTS)


@pytest.mark.parametrize(("n", "k"), SIZES)
@pytest.mark.parametrize("m", [17, 32, 33, 64, 100, 128, 200, 256])
def test_plans_are_of_known_cuts_and_fit(m: int, n: int, k: int) -> None:
    rule = plan_rows(m, n, k)
    assert rule.refuses(m, n, k) == ""
    for plan in [rule, *candidates(m, n, k)]:
        assert plan.cut in CUTS
        assert plan.refuses(m, n, k) == "", plan


def test_what_a_plan_does_not_take_is_said() -> None:
    plan = plan_rows(64, 4096, 4096)
    assert "rows" in plan.refuses(65, 4096, 4096)
    gated = next(Plan(*cut, 1, 0, 3) for cut in CUTS if cut[1])
    assert "bias" in gated.refuses(16, 4096, 4096, True)


def test_choices_are_of_known_cuts_and_fit() -> None:
    files = list(FOLDER.glob("*.json"))
    assert [file.name for file in files] == ["nvidia_h200.json"]
    for size, entry in json.loads(files[0].read_text())["choices"].items():
        m, n, k = (int(part) for part in size.split()[0].split("x"))
        assert m in ROWS
        gated, stream = "gated" in size.split(), "stream" in size.split()
        choice = read_choice(entry)
        assert (choice.by == "hopper") == (choice.plan is not None), size
        assert choice.by in ("hopper", "cuda", "triton", "gluon", "cublas"), size
        assert (choice.by == "gluon") == (choice.early is not None) and (stream or choice.early is None), size
        assert not stream or ((choice.rows_plan or choice.cut or choice.early) and n % 16 == k % 64 == 0), size
        if choice.rows_plan is not None:
            assert choice.rows_plan.refuses(m, gated) == "", size
        if choice.cut is not None:
            cut, width = choice.cut, choice.cut.bn * (2 if choice.cut.gated else 1)
            assert choice.cut.gated == gated and cut.early and cut.bulk, size
            assert not stream or n % cut.bn == 0, size  # squares of whole tiles
            assert cut.stages * (cut.bm + width) * cut.bk * 2 <= 225 * 1024, size
        if choice.early is not None:
            assert choice.early.gated == gated and choice.early.bm < 2 * max(m, 33), size
            assert choice.early.refuses(n // 2 if gated else n, k) == "", size
        if choice.plan is not None:
            assert choice.plan.cut in CUTS, size
            assert choice.plan.gated == gated, size
            assert choice.plan.refuses(m, n // 2 if choice.plan.gated else n, k) == "", size


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


def test_from_193_to_255_rows_no_plan_for_256_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    place, chosen = torch.device("cuda", 5), small_matmul_hopper.chosen
    measured = {m: chosen(m, 28672, 4096, place) for m in (50, 64, 100, 128, 256)}
    assert all(choice is not None and choice.by == "hopper" for choice in measured.values())
    assert measured[50] == measured[64] and measured[100] == measured[128]
    assert {chosen(m, 28672, 4096, place).by for m in (200, 255)} == {"cublas"}
    assert chosen(129, 4096, 4096, place) == chosen(160, 4096, 4096, place) != chosen(161, 4096, 4096, place)
    assert chosen(200, 4096, 1024, place).cut is not None  # tiles that leave out rows that are not there
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
    refuses = small_matmul_hopper.refuses
    assert refuses(x, weight) == "" == refuses(x, weight, torch.zeros(40, dtype=torch.bfloat16))
    assert "bfloat16" in refuses(x.float(), weight)
    assert "16 bytes" in refuses(x[:, 1:], weight[:, 1:])
    assert "[M, K]" in refuses(x[:, :32], weight)
    assert "multiple of 8" in refuses(x, weight[:33])
    assert "256" in refuses(torch.zeros(257, 64, dtype=torch.bfloat16), weight)


@pytest.fixture
def rows() -> small_matmul_hopper.HopperRows:
    return loaded(small_matmul_hopper.HopperRows, hopper=True)


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), [(4096, 14336), (1000, 520), (40, 72), (8, 8), (6144, 4096)])
@pytest.mark.parametrize("m", [17, 32, 50, 64, 100, 128, 200, 256])
def test_every_plan_gives_the_product_and_every_run_the_same(
    rows: small_matmul_hopper.HopperRows, m: int, n: int, k: int
) -> None:
    x, weight, bias = product_inputs(m, n, k)
    want = x.double() @ weight.double().T + bias.double()
    of_torch = (F.linear(x, weight, bias).double() - want).norm()
    for plan in [plan_rows(m, n, k), *candidates(m, n, k)]:
        got = rows(x, weight, bias, plan=plan)
        assert (got.double() - want).norm() <= 2 * of_torch, plan
        for pdl in (False, True):
            assert torch.equal(got, rows(x, weight, bias, plan=plan, pdl=pdl)), plan


@pytest.mark.gpu
@pytest.mark.parametrize("m", [17, 64, 100, 128, 256])
@pytest.mark.parametrize(("features", "k"), [(14336, 4096), (520, 200)])
def test_the_gate_is_applied_to_the_sums(rows: small_matmul_hopper.HopperRows, m: int, features: int, k: int) -> None:
    x, weight, _ = product_inputs(m, 2 * features, k)
    gate, up = (x.double() @ weight.double().T).chunk(2, 1)
    want = F.silu(gate) * up
    rounded = want.to(x.dtype)
    tried = candidates(m, features, k, gated=True)
    assert tried
    for plan in tried:
        got = rows(x, weight, plan=plan)
        assert (got.double() - want).norm() <= 2 * (rounded.double() - want).norm(), plan
        assert torch.equal(got, rows(x, weight, plan=plan, pdl=True)), plan


@pytest.mark.gpu
def test_launches_on_one_stream_in_a_graph_follow_each_other(rows: small_matmul_hopper.HopperRows) -> None:
    plans = candidates(100, 1024, 1024)
    assert any(plan.parts(1024) for plan in plans)
    check_chain(rows, 100, [{"plan": plan} for plan in plans], 0.1)


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
    for pdl in (False, True):
        got = launch(x, weight, pdl=pdl)
        assert (got.double() - want).norm() <= 2 * of_torch, pdl
        assert torch.equal(got, launch(x, weight, pdl=pdl)), pdl


@pytest.mark.gpu
def test_what_it_does_not_take_raises(rows: small_matmul_hopper.HopperRows) -> None:
    x, weight, _ = product_inputs(40, 64, 64)
    with pytest.raises(ValueError, match="16 bytes"):
        rows(x[:, 1:], weight[:, 1:])
    with pytest.raises(ValueError, match="rows"):
        rows(x, weight, plan=Plan(*next(cut for cut in CUTS if cut[0] and cut[2] < 64), 1, 0, 2))


def test_flags_hold_a_counter_for_every_block_of_every_plan() -> None:
    for m in ROWS:
        for n, k in SIZES:
            for plan in candidates(m, n, k):
                assert not plan.parts(n) or plan.grid(n) <= FLAGS, plan
