"""What ``transect tune MODEL`` tries, takes and keeps."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from transect.hardware.targets import TARGETS
from transect.ops.linear.few_rows import choices, hopper, search
from transect.ops.linear.few_rows.choices import Choice
from transect.ops.linear.few_rows.search import Product

CPU = torch.device("cpu")


def multiply(choice: Choice, x: Tensor, weight: Tensor, gated: bool) -> Tensor:
    y = F.linear(x, weight)
    if not gated:
        return y
    gate, up = y.chunk(2, 1)
    return F.silu(gate) * up


def by_choice(quick: dict[Choice, float], otherwise: float, under_load: dict[Choice, float] | None = None) -> Any:
    """A timer, and a race of contenders: times in a trial, and under load where they differ."""

    def timer(calls: list[Any], replays: int) -> list[float]:
        return [quick.get(calls[0].args[0], otherwise)]

    def race(contenders: list[list[Any]]) -> list[float]:
        return [(under_load or quick).get(calls[0].args[0], otherwise) for calls in contenders]

    return timer, race


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRANSECT_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr("transect.hardware.device.own_target", lambda device: TARGETS["sm_90"])
    monkeypatch.setattr(choices, "multiprocessors", lambda device: 132)
    choices.choices.cache_clear(), choices.chosen.cache_clear()
    yield
    choices.choices.cache_clear(), choices.chosen.cache_clear()


def test_the_quickest_is_taken_where_it_gains() -> None:
    product = Product("o", 256, 128)
    quick = search.hopper_tilings(48, 256, 128, False)[3]
    (found,) = search.search(product, [48], multiply, *by_choice({quick: 1.0, Choice("cublas"): 2.0}, 3.0), CPU)
    assert (found.before, found.choice) == (Choice("cublas"), quick)
    assert (found.before_seconds, found.seconds) == (2.0, 1.0)
    (found,) = search.search(product, [48], multiply, *by_choice({quick: 1.99, Choice("cublas"): 2.0}, 3.0), CPU)
    assert found.choice == found.before == Choice("cublas") and found.tried > 5


def test_times_under_load_decide() -> None:
    """Two tilings win at the full clock; under load one of them does, and the other is slower than what runs."""
    product, cublas = Product("o", 256, 128), Choice("cublas")
    hungry, frugal, far = search.hopper_tilings(48, 256, 128, False)[2:5]
    trials = {hungry: 0.97, frugal: 0.99, cublas: 1.0, far: 1.2}
    timer, race = by_choice(trials, 1.5, {hungry: 1.4, frugal: 1.1, cublas: 1.3, far: 0.1})
    (found,) = search.search(product, [48], multiply, timer, race, CPU)
    assert (found.before_seconds, found.choice, found.seconds) == (1.3, frugal, 1.1)
    assert [(each.choice, each.trial_seconds) for each in found.finals] == [
        (cublas, 1.0),
        (hungry, 0.97),
        (frugal, 0.99),
    ]
    timer, race = by_choice(trials, 1.5, {hungry: 1.4, frugal: 1.29, cublas: 1.3})
    (found,) = search.search(product, [48], multiply, timer, race, CPU)
    assert found.choice == cublas and found.seconds == 1.3  # 1% is not worth it


def test_finalists() -> None:
    slow, quick, *others = search.hopper_tilings(48, 4096, 4096, False)
    cuda = search.cuda_tilings(16, 4096, 4096, False)[0]
    times = {slow: 2.0, quick: 1.0, others[0]: 1.01, others[1]: 1.02, cuda: 1.1, Choice("cublas"): 1.3}
    assert search.finalists(slow, times) == [slow, quick, others[0], cuda]
    assert search.finalists(quick, {quick: 1.0, slow: 2.0}) == [quick]


def test_what_is_wrong_or_not_the_same_twice_is_left_out() -> None:
    product, good = Product("o", 256, 128), Choice("cublas")

    def wrong(choice: Choice, x: Tensor, weight: Tensor, gated: bool) -> Tensor:
        y = multiply(choice, x, weight, gated)
        return y if choice == good else y + torch.rand_like(y)

    (found,) = search.search(product, [48], wrong, *by_choice({good: 2.0}, 1.0), CPU)
    assert (found.choice, found.tried) == (good, 1)


def test_what_is_kept_runs_from_then_on(h200: None) -> None:
    device, name = torch.device("cuda", 0), "NVIDIA H200"
    plain, gated = Product("o", 5120, 5120), Product("gate_up", 27648, 5120, True)
    tiling = hopper.candidates(48, 5120, 5120)[0]
    found = [
        search.ProductTimes(plain, 48, Choice("cublas"), 2.0, Choice("hopper", tiling), 1.0, 9),
        search.ProductTimes(gated, 128, Choice("cublas"), 2.0, Choice("cublas"), 2.0, 9),
    ]
    assert choices.chosen(40, 5120, 5120, device) != Choice("hopper", tiling)
    path = search.save(name, search.entries(found))
    assert path.parent.name == "small_matmul"
    assert choices.chosen(40, 5120, 5120, device) == Choice("hopper", tiling)
    assert choices.chosen(128, 27648, 5120, device, gated=True) == choices.chosen(128, 27648, 5120, device)
    search.save(name, search.entries(found[1:]))  # adds to what is there
    assert choices.chosen(48, 5120, 5120, device) == Choice("hopper", tiling)


def test_one_row_is_kept_for_norms_in_products_too() -> None:
    found = [
        search.ProductTimes(
            Product("o", 4096, 4096), 1, Choice("cuda"), 2.0, search.cuda_tilings(1, 4096, 4096, False)[0], 1, 9
        )
    ]
    assert set(search.entries(found)) == {"1x4096x4096", "1x4096x4096 stream"}


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("m", [1, 16, 32, 48, 200])
def test_contenders_fit(m: int, gated: bool) -> None:
    for choice in search.contenders(m, Product("", 27648, 5120, gated), Choice("cublas")):
        if choice.by == "hopper":
            assert choice.tiling.refusal(m, 13824 if choice.tiling.gated else 27648, 5120) is None
        if choice.by == "cuda":
            assert choice.tiling.refusal(m, gated) is None
