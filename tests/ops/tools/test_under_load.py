"""Races under load: how long a contender runs before its time counts, and in which order they run."""

import math
from functools import partial

import pytest
import torch

from transect.ops.tools import under_load


class Board:
    """A GPU that pretends: its clock nears what the power of the running work allows, in tenths of a second."""

    LAG = 0.05

    def __init__(self) -> None:
        self.clock, self.run = 1.0, list[str]()

    def busy(self, name: str, at_full_clock: float, watts: float, seconds: float) -> float:
        """Seconds of a call of work that draws so many watts at the full clock, on a board of 700."""
        allowed = min(1.0, 700 / watts)
        self.clock = allowed + (self.clock - allowed) * math.exp(-seconds / self.LAG)
        self.run.append(name)
        return at_full_clock / self.clock

    def contender(self, name: str, at_full_clock: float, watts: float) -> partial[float]:
        return partial(under_load.settled, partial(self.busy, name, at_full_clock, watts))


def test_energy_decides_at_the_limit_of_power() -> None:
    board = Board()
    quick, frugal, light = ("quick", 1.00, 1000.0), ("frugal", 1.05, 800.0), ("light", 1.60, 300.0)
    assert board.busy(*quick, 0.001) < board.busy(*frugal, 0.001)  # a race of milliseconds
    times = under_load.in_turns([board.contender(*each) for each in (quick, frugal, light)])
    for found, wanted in zip(times, (1000 / 700, 1.05 * 800 / 700, 1.60), strict=True):
        assert abs(found / wanted - 1) < 0.02


def test_a_turn_lasts_until_slices_agree() -> None:
    def slices(times: list[float]) -> tuple[float, list[float]]:
        left, asked = list(times), list[float]()

        def busy(seconds: float) -> float:
            asked.append(seconds)
            return left.pop(0)

        return under_load.settled(busy), asked

    found, asked = slices([1.0, 1.0, 1.0, 1.0, 1.2, 1.3, 1.3, 9.0])  # agrees at first, before the clock moves
    assert (found, len(asked)) == (1.3, 7)
    assert sum(asked[:5]) >= under_load.LEAST_SECONDS
    most = math.ceil(under_load.MOST_SECONDS / under_load.SLICE_SECONDS)
    found, asked = slices([1.0, 2.0] * most)  # never agrees
    assert found == 1.5 and len(asked) in (most, most + 1)


def test_every_second_round_runs_in_the_opposite_order() -> None:
    seen: list[str] = []

    def turn(name: str, times: list[float]) -> float:
        seen.append(name)
        return times.pop(0)

    times = under_load.in_turns([partial(turn, "a", [1.0, 5.0, 2.0]), partial(turn, "b", [4.0, 3.0, 9.0])], 3)
    assert seen == ["a", "b", "b", "a", "a", "b"] and times == [2.0, 4.0]


@pytest.mark.gpu
def test_runs_contenders_in_graphs() -> None:
    x, ran = torch.randn(64, 64, device="cuda"), list[str]()

    def call(name: str) -> torch.Tensor:
        ran.append(name)
        return x @ x

    times = under_load.race([[partial(call, "a")] * 3, [partial(call, "b")]])
    assert len(times) == 2 and min(times) > 0
    assert ran == [*"aaaaaabb", *"bbaaaaaa", *"aaaaaabb"]  # once, and once to be captured
