"""Confidence intervals: examples of the papers, coverage by simulation, and few samples."""

import math
import random

import pytest

from transect.bench.intervals import (
    mean_difference,
    paired_difference,
    rate_bounds,
    rate_difference,
    ratio_bounds,
    student_quantile,
)


def test_one_rate_is_that_of_newcombes_table() -> None:
    assert rate_bounds(81, 263, 0.95) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert rate_bounds(0, 20, 0.95) == pytest.approx((0.0, 0.1611), abs=5e-5)
    assert rate_bounds(0, 0, 0.95) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("counts", "expected"),
    [((56, 70, 48, 80), (0.0524, 0.3339)), ((9, 10, 3, 10), (0.1705, 0.8090)), ((10, 10, 0, 20), (0.6791, 1.0))],
)
def test_a_difference_of_requests_is_that_of_newcombes_table(counts, expected) -> None:
    assert rate_difference(*counts, 0.95) == pytest.approx(expected, abs=5e-5)


@pytest.mark.parametrize(
    ("cells", "expected"),
    [((36, 12, 2, 0), (0.0569, 0.3404)), ((0, 0, 0, 5), (-0.4345, 0.4345)), ((1, 1, 7, 91), (-0.1361, -0.0023))],
)
def test_a_difference_on_the_same_questions_is_that_of_newcombes_table(cells, expected) -> None:
    """``cells``: both right, only the first, only the second, neither."""
    both, first, second, neither = cells
    one = [1] * both + [1] * first + [0] * second + [0] * neither
    other = [1] * both + [0] * first + [1] * second + [0] * neither
    assert paired_difference(one, other, 0.95) == pytest.approx(expected, abs=6e-3)
    low, high = paired_difference(other, one, 0.95)
    assert (-high, -low) == pytest.approx(paired_difference(one, other, 0.95))


@pytest.mark.parametrize("degrees", [3, 4, 9, 30, 200])
@pytest.mark.parametrize("confidence", [0.9, 0.95, 0.9875])
def test_students_quantile(degrees: int, confidence: float) -> None:
    from scipy import stats  # its import takes a second, and each worker imports every test

    assert student_quantile(confidence, degrees) == pytest.approx(stats.t.ppf(0.5 + confidence / 2, degrees), rel=0.02)


def test_equal_models_seem_better_as_seldom_as_the_level_says() -> None:
    draw = random.Random(0)
    found = {"paired": 0, "apart": 0, "ratio": 0, "mean": 0}
    for _ in range(2000):
        one, other = ([int(draw.random() < 0.6) for _ in range(40)] for _ in range(2))
        found["paired"] += paired_difference(one, other, 0.9)[0] > 0
        found["apart"] += rate_difference(sum(one), 40, sum(other), 40, 0.9)[0] > 0
        sizes = [draw.randint(5, 30) for _ in range(20)]
        found["ratio"] += ratio_bounds([draw.gauss(0, size) for size in sizes], sizes, 0.9)[0] > 0
        found["mean"] += mean_difference(*([draw.gauss(3, 1) for _ in range(8)] for _ in range(2)), 0.9)[0] > 0
    assert all(40 <= count <= 150 for count in found.values()), found  # 5% of 2,000 is 100


def test_too_few_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 5 samples, not 4"):
        ratio_bounds([1.0] * 4, [1.0] * 4, 0.95)
    with pytest.raises(ValueError, match="at least 5 samples"):
        mean_difference([1.0] * 9, [1.0] * 3, 0.95)
    assert mean_difference([2.0] * 5, [1.0] * 5, 0.95) == (1.0, 1.0)
    assert all(map(math.isfinite, ratio_bounds([1, 2, 3, 4, 5], [1, 1, 1, 1, 1], 0.95)))
