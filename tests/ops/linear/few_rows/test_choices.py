"""Which kernel runs a product of few rows: what the files say, and the rule for sizes that they lack."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from transect.hardware.targets import TARGETS
from transect.ops.linear import fixed_order
from transect.ops.linear.few_rows import choices, cuda, invariant, rule
from transect.ops.linear.few_rows.choices import FOLDER, ROWS, Choice, read_choice
from transect.ops.linear.few_rows.cuda import CudaTiling
from transect.ops.linear.few_rows.hopper import COMPILED, candidates, choose_tiling


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[torch.device]:
    """A device that is called so; the user has measured nothing."""
    monkeypatch.setenv("TRANSECT_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr("transect.hardware.device.own_target", lambda device: TARGETS["sm_90"])
    monkeypatch.setattr(choices, "multiprocessors", lambda device: 132)
    for cached in (choices.chosen, choices.choices):
        cached.cache_clear()
    yield torch.device("cuda", 0)
    for cached in (choices.chosen, choices.choices):
        cached.cache_clear()


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
        if "invariant" in size.split():
            parts = 1 if gated else fixed_order.parts_on_hopper(n, k)
            assert tiling in invariant.candidates(m, n, k, parts, gated=gated), size
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
    with pytest.raises(TypeError, match="not a tiling of cublas"):
        Choice("cublas", choose_tiling(64, 4096, 4096))
    with pytest.raises(TypeError, match="not a tiling of triton"):
        Choice("triton", choose_tiling(64, 4096, 4096))


@pytest.mark.parametrize(
    ("m", "name"),
    [
        (1, "1x8x16"),
        (5, "8x8x16"),
        (17, "32x8x16"),
        (33, "48x8x16"),
        (49, "64x8x16"),
        (65, "96x8x16"),
        (256, "256x8x16"),
    ],
)
def test_sizes_share_a_choice_by_rows(m: int, name: str) -> None:
    assert choices.key(m, 8, 16) == name
    assert choices.key(m, 8, 16, gated=True) == f"{name} gated"
    assert choices.key(m, 8, 16, stream=True) == f"{name} stream"
    assert choices.key(m, 8, 16, alone=True) == f"{name} alone"


def test_nothing_is_chosen_without_a_gpu_or_outside_the_rows() -> None:
    assert choices.chosen(64, 4096, 4096, torch.device("cpu")) is None
    assert choices.chosen(0, 4096, 4096, torch.device("cuda")) is None
    assert choices.chosen(257, 4096, 4096, torch.device("cuda")) is None


def test_from_225_to_255_rows_no_tiling_for_256_runs(h200: torch.device) -> None:
    place, chosen = h200, choices.chosen
    measured = {m: chosen(m, 28672, 4096, place) for m in (50, 64, 100, 128, 256)}
    assert all(choice is not None and choice.by == "hopper" for choice in measured.values())
    assert measured[50] == measured[64] and measured[100] == measured[128]
    assert all(chosen(m, 28672, 4096, place) != measured[256] for m in (200, 255))
    assert chosen(129, 4096, 4096, place) == chosen(160, 4096, 4096, place) != chosen(161, 4096, 4096, place)
    assert chosen(200, 4096, 1024, place).by == "triton"  # tiles that leave out rows that are not there


def test_alone_runs_what_is_quickest_then_or_else_what_a_chain_of_layers_runs(h200: torch.device) -> None:
    place, chosen = h200, choices.chosen
    both = [(chosen(128, 6144, 4096, place), chosen(128, 6144, 4096, place, alone=True))]
    both.append((chosen(256, 4096, 4096, place), chosen(256, 4096, 4096, place, alone=True)))
    assert all(layer is not None and layer.by != "cublas" for layer, _ in both)
    assert all(alone is not None and alone.by == "cublas" for _, alone in both)
    assert chosen(128, 28672, 4096, place) == chosen(128, 28672, 4096, place, alone=True) is not None
    # 65 to 96 rows without a choice of their own take that of 128, here as in layers.
    assert chosen(80, 16384, 2048, place, alone=True) == Choice("cublas")
    assert chosen(200, 28672, 4096, place, alone=True) is None


def test_a_choice_for_alone_says_something_else_than_that_for_a_chain(h200: torch.device) -> None:
    place, chosen = h200, choices.chosen
    named = [size for size in choices.choices("NVIDIA H200") if size.endswith(" alone")]
    assert named
    for size in named:
        m, n, k = (int(part) for part in size.split()[0].split("x"))
        in_layers = chosen(m, n, k, place) or Choice("cublas")
        assert chosen(m, n, k, place, alone=True) != in_layers, size


def test_alone_nothing_of_ours_runs_that_was_slower_than_cublas(h200: torch.device) -> None:
    """In the race that is recorded, from 64 rows on."""
    place, chosen = h200, choices.chosen
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


# ----------------------------------------------------------------------------------------------- sizes that no file has


@pytest.mark.parametrize(
    ("n", "k"), [(7168, 5120), (27648, 5120), (5120, 13824), (37888, 3584), (152064, 5120), (896, 4864)]
)
def test_the_rule_takes_tilings_that_run(h200: torch.device, n: int, k: int) -> None:
    for m in range(17, 257, 13):
        for gated in (False, True):
            choice = choices.chosen(m, n, k, h200, gated=gated)
            if choice is not None and choice.by == "hopper":
                assert choice.tiling.refusal(m, n // 2 if gated else n, k) is None, (m, n, k)
                assert choice.tiling.gated == gated
            else:
                assert choice is None or choice == Choice("cublas")


def test_one_launch_gates_up_to_16_rows_of_any_weight(h200: torch.device) -> None:
    for m in (1, 2, 9, 16):
        choice = choices.chosen(m, 37888, 3584, h200, gated=True)
        assert choice is not None and isinstance(choice.tiling, CudaTiling)
        assert choice.tiling.refusal(m, gated=True) is None
    assert choices.chosen(9, 37888, 3584, h200) is None  # the kernel's own rule


def test_norms_stand_in_the_products_of_one_row(h200: torch.device) -> None:
    choice = choices.chosen(1, 7168, 5120, h200, stream=True)
    assert choice is not None and isinstance(choice.tiling, CudaTiling) and choice.tiling.ranks == 1
    assert choices.chosen(2, 7168, 5120, h200, stream=True) is None
    assert choices.chosen(1, 7168, 5128, h200, stream=True) is None  # squares are of 16 neighbours, 64 at a time


def test_no_rule_but_for_hopper_and_whole_sixteens(h200: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    assert choices.chosen(64, 28680, 4096, h200) is None
    monkeypatch.setattr("transect.hardware.device.own_target", lambda device: TARGETS["sm_80"])
    choices.chosen.cache_clear()
    assert choices.chosen(64, 27648, 5120, h200) is None


def test_what_the_user_measured_wins(h200: torch.device, tmp_path: Path) -> None:
    shipped = choices.chosen(64, 28672, 4096, h200)
    assert shipped is not None and shipped.by == "hopper"
    file = tmp_path / "tuned" / FOLDER.name / "nvidia_h200.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"choices": {"64x28672x4096": {"by": "cublas"}}}))
    choices.chosen.cache_clear(), choices.choices.cache_clear()
    assert choices.chosen(64, 28672, 4096, h200) == Choice("cublas")
    assert choices.chosen(128, 28672, 4096, h200).by == "hopper"


def test_more_work_is_predicted_to_take_longer() -> None:
    for tiling in candidates(64, 5120, 13824):
        assert rule.seconds(tiling, 64, 5120, 13824) < rule.seconds(tiling, 64, 10240, 13824) * 1.01
        assert rule.seconds(tiling, 64, 5120, 13824) < rule.seconds(tiling, 64, 5120, 27648)


@pytest.mark.parametrize(("name", "few"), [("sm_80", 16), ("sm_89", 8), ("sm_120", 8)])
def test_a_card_without_bulk_copies_has_gates_and_norms_in_products_by_rule(
    monkeypatch: pytest.MonkeyPatch, name: str, few: int
) -> None:
    device = torch.device("cuda", 0)
    monkeypatch.setattr("transect.hardware.device.own_target", lambda device: TARGETS[name])
    monkeypatch.setattr(choices, "multiprocessors", lambda device: 128)
    found = {m: choices._by_rule(m, 28672, 4096, device, True, False, False) for m in (1, few, few + 1, 64, 200)}
    assert [None if choice is None else choice.by for choice in found.values()] == [
        "cuda",
        "cuda",
        *["triton"] * 2,
        None,
    ]
    for m, choice in found.items():
        if choice is not None and choice.by == "cuda":
            assert cuda.shared_bytes(choice.tiling, m) <= TARGETS[name].block_bytes
    sizes = ((6144, 4096, False), (4096, 4096, False), (28672, 4096, True), (4096, 14336, False))
    for m in (1, few, 40, 64):
        kinds = {choices._by_rule(m, n, k, device, gated, True, False).by for n, k, gated in sizes}
        assert kinds == {"cuda" if m <= few else "triton"}, m
    assert choices._by_rule(64, 4080, 4096, device, False, True, False) is None  # no whole tiles
    assert choices._by_rule(1, 4096, 4096, device, False, False, False) is None
