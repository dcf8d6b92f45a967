"""What a report claims: intervals of known cases, and no gain where there is no signal."""

import random

import pytest

from transect.bench.search_gain import Accuracy, Gain


def test_wilsons_interval_of_a_known_case():
    """8 of 10: 0.490 to 0.943 (Newcombe 1998)."""
    low, high = Accuracy(8, 10).interval
    assert low == pytest.approx(0.4902, abs=1e-3) and high == pytest.approx(0.9433, abs=1e-3)
    assert Accuracy(0, 10).interval[0] == 0 and Accuracy(10, 10).interval[1] == pytest.approx(1)


def test_a_clear_gain_and_a_clear_loss_are_said():
    single, searched = [True] * 40 + [False] * 60, [True] * 70 + [False] * 30
    assert Gain(searched, single, 0.1).verdict == "gain" and Gain(single, searched, 0.1).verdict == "loss"
    assert str(Gain(searched, single, 0.1)).startswith("gain: search 70.0%")
    assert Gain(searched, single, 0.1).to_dict()["single"]["accuracy"] == 0.4


def test_a_task_without_signal_has_no_gain():
    """Answers by lot: of 200 reports about 2.5% may claim a gain by chance, and guessing bounds them further."""
    claims = 0
    for seed in range(200):
        rng = random.Random(seed)
        right = [[rng.random() < 0.1 for _ in range(100)] for _ in range(2)]
        claims += Gain(*right, 0.1).verdict == "gain"
    assert claims <= 6


def test_a_search_at_the_level_of_guessing_has_no_gain():
    single, searched = [False] * 100, [True] * 20 + [False] * 80
    assert Gain(searched, single, 0.05).verdict == "gain" and Gain(searched, single, 0.2).verdict == "no gain"
