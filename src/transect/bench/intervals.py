r"""Confidence intervals: of rates, of differences of rates, of means and ratios. Two-sided, by level such as 0.95.

Rates use score intervals, which stay honest for few samples and for rates of 0 and 1:

* one rate: Wilson (1927).
* a difference of two rates on the same questions: Newcombe (1998, Statistics in Medicine 17, 2635-2650), method 10.
* a difference of two rates on different requests: Newcombe (1998, Statistics in Medicine 17, 873-890), method 10.

Ratios of sums and means use Student's t.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist, fmean, variance

Bounds = tuple[float, float]
"""Lower and upper end of an interval."""
FEWEST = 5
"""Samples that a mean or ratio needs."""


def normal_quantile(confidence: float) -> float:
    """Return the two-sided quantile of the normal distribution, such as 1.96 for 0.95."""
    return NormalDist().inv_cdf(0.5 + confidence / 2)


def student_quantile(confidence: float, degrees: float) -> float:
    """Return the two-sided quantile of Student's t (Abramowitz and Stegun, 26.7.5), for at least 3 degrees of
    freedom."""
    z = normal_quantile(confidence)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    fourth = (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160
    return z + first / degrees + second / degrees**2 + third / degrees**3 + fourth / degrees**4


def rate_bounds(hits: float, count: float, confidence: float) -> Bounds:
    """Return Wilson's interval of a rate; (0, 1) without samples."""
    if not count:
        return 0.0, 1.0
    z = normal_quantile(confidence)
    rate = hits / count
    middle = (rate + z * z / (2 * count)) / (1 + z * z / count)
    half = z * math.sqrt(rate * (1 - rate) / count + z * z / (4 * count * count)) / (1 + z * z / count)
    # Without rounding, the ends of no and of all hits are 0 and 1.
    return max(0.0, middle - half) if hits else 0.0, min(1.0, middle + half) if hits < count else 1.0


def paired_difference(one: Sequence[float], other: Sequence[float], confidence: float) -> Bounds:
    """Return the interval of the rate of ``one`` less that of ``other``; both are 0 or 1 for the same questions."""
    count = len(one)
    both = sum(a and b for a, b in zip(one, other, strict=True))
    first, second = sum(one), sum(other)
    neither = count - first - second + both
    # Correlation of the pairs, with Newcombe's correction towards 0.
    product = both * neither - (first - both) * (second - both)
    if product > 0:
        product = max(product - count / 2, 0)
    scale = math.sqrt(first * (count - first) * second * (count - second))
    phi = product / scale if scale else 0.0
    return _difference(first, count, second, count, phi, confidence)


def rate_difference(hits: float, count: float, other_hits: float, other_count: float, confidence: float) -> Bounds:
    """Return the interval of a rate less another one, of different requests; (-1, 1) without samples."""
    if not count or not other_count:
        return -1.0, 1.0
    return _difference(hits, count, other_hits, other_count, 0.0, confidence)


def _difference(
    hits: float, count: float, other_hits: float, other_count: float, phi: float, confidence: float
) -> Bounds:
    p, q = hits / count, other_hits / other_count
    low, high = rate_bounds(hits, count, confidence)
    other_low, other_high = rate_bounds(other_hits, other_count, confidence)
    below, above = p - low, other_high - q
    down = math.sqrt(max(0.0, below**2 - 2 * phi * below * above + above**2))
    above, below = high - p, q - other_low
    up = math.sqrt(max(0.0, above**2 - 2 * phi * above * below + below**2))
    return max(-1.0, p - q - down), min(1.0, p - q + up)


def ratio_bounds(values: Sequence[float], weights: Sequence[float], confidence: float) -> Bounds:
    """Return the interval of sum(values) / sum(weights) over independent pairs, by the linearized variance.

    Raises:
        ValueError: there are fewer than 5 pairs.
    """
    count, total = len(values), math.fsum(weights)
    if count < FEWEST:
        raise ValueError(f"an interval needs at least {FEWEST} samples, not {count}: give more")
    ratio = math.fsum(values) / total
    spread = math.fsum((value - ratio * weight) ** 2 for value, weight in zip(values, weights, strict=True))
    half = student_quantile(confidence, count - 1) * math.sqrt(spread * count / (count - 1)) / total
    return ratio - half, ratio + half


def mean_difference(one: Sequence[float], other: Sequence[float], confidence: float) -> Bounds:
    """Return Welch's interval of the mean of ``one`` less that of ``other``. Raises ValueError for fewer than 5 samples
    of either."""
    if min(len(one), len(other)) < FEWEST:
        raise ValueError(f"an interval needs at least {FEWEST} samples, not {min(len(one), len(other))}: give more")
    parts = variance(one) / len(one), variance(other) / len(other)
    middle = fmean(one) - fmean(other)
    if not sum(parts):
        return middle, middle
    degrees = sum(parts) ** 2 / (parts[0] ** 2 / (len(one) - 1) + parts[1] ** 2 / (len(other) - 1))
    half = student_quantile(confidence, max(degrees, 3)) * math.sqrt(sum(parts))
    return middle - half, middle + half
