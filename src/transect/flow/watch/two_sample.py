"""Tests of two samples, with p-values that hold for any distribution and any sample size.

Under the hypothesis that window and reference have the same distribution, every assignment of the labels "window" and
"reference" to the pooled values is equally likely. ``permutation_test`` compares the statistic of the real labels with
those of drawn ones, and stops early where the value is unremarkable (Besag and Clifford, "Sequential Monte Carlo
p-values", 1991): P(p <= level) <= level, exactly.

A statistic is a function of labels ``[B, N]`` (1: window, 0: reference; float32) that returns ``[B]`` values, of which
large ones speak against the hypothesis. Preparation may use the pooled values, never the labels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

Statistic = Callable[[np.ndarray], np.ndarray]

STOP = 20
"""Drawn statistics as large as the real one after which a test ends."""
COMPONENTS = 64
WIDTHS = (0.5, 1.0, 2.0)
"""Widths of the kernels, as multiples of the median distance."""


@dataclass(frozen=True, slots=True)
class TestResult:
    """A statistic and its p-value."""

    statistic: float
    p: float

    __test__ = False  # no class of tests of pytest's


def permutation_test(
    statistic: Statistic, window: int, reference: int, most: int, draw: np.random.Generator
) -> TestResult:
    """Test the statistic of the first ``window`` pooled values against the other ``reference`` ones.

    Args:
        most: drawn assignments at the most; the least p-value is 1 / (most + 1).
    """
    labels = np.zeros((1, window + reference), np.float32)
    labels[0, :window] = 1
    observed = float(statistic(labels)[0])
    bar = observed - 1e-5 * abs(observed)
    above = done = 0
    rows = 32
    while done < most:
        rows = min(2 * rows, 1024, most - done)
        drawn = draw.permuted(np.repeat(labels, rows, axis=0), axis=1)
        hits = np.flatnonzero(statistic(drawn) >= bar)
        if above + len(hits) >= STOP:
            place = int(hits[STOP - above - 1])
            return TestResult(observed, STOP / (done + place + 1))
        above, done = above + len(hits), done + rows
    return TestResult(observed, (above + 1) / (most + 1))


def vector_statistic(vectors: np.ndarray) -> Statistic:
    """Return the squared maximum mean discrepancy (Gretton et al., "A kernel two-sample test", 2012) of vectors.

    The vectors ``[N, D]`` are centred and projected on their first principal components, whose standard deviations are
    replaced by their roots; the kernel is a sum of Gaussians around the median distance.
    """
    centred = vectors.astype(np.float64) - vectors.mean(0, dtype=np.float64)
    values, axes = np.linalg.eigh(centred.T @ centred)
    values, axes = values[: -COMPONENTS - 1 : -1], axes[:, : -COMPONENTS - 1 : -1]
    kept = values > 1e-9 * max(values[0], 1e-30)
    scaled = np.asarray(centred @ axes[:, kept] / values[kept] ** 0.25, np.float32)
    squared = (scaled**2).sum(1)
    distances = np.maximum(squared[:, None] + squared[None] - 2 * scaled @ scaled.T, 0)
    median = float(np.median(distances[::2, 1::2])) or 1.0
    kernel = np.exp(distances / (-WIDTHS[0] * median))
    for width in WIDTHS[1:]:
        kernel += np.exp(distances / (-width * median))

    def discrepancy(labels: np.ndarray) -> np.ndarray:
        count = labels.sum(1, keepdims=True)
        weights = labels / count - (1 - labels) / (labels.shape[1] - count)
        found: np.ndarray = np.einsum("bn,bn->b", weights @ kernel, weights)
        return found

    return discrepancy


def ordered_statistic(values: Sequence[float]) -> Statistic:
    """Return the greatest distance of the two distribution functions (Kolmogorov-Smirnov); values may be
    equal."""
    array = np.asarray(values, np.float64)
    order = np.argsort(array, kind="stable")
    last = np.append(np.diff(array[order]) > 0, True)  # the last of equal values

    def distance(labels: np.ndarray) -> np.ndarray:
        count = labels.sum(1, keepdims=True)
        steps = labels[:, order] / count - (1 - labels[:, order]) / (labels.shape[1] - count)
        found: np.ndarray = np.abs(np.cumsum(steps, axis=1)[:, last]).max(1)
        return found

    return distance


def lower_mean_statistic(values: Sequence[float]) -> Statistic:
    """Return the mean of the reference minus that of the window: large if the window's values are lower."""
    array = np.asarray(values, np.float32)

    def difference(labels: np.ndarray) -> np.ndarray:
        count = labels.sum(1)
        found: np.ndarray = (1 - labels) @ array / (labels.shape[1] - count) - labels @ array / count
        return found

    return difference


def rates_test(hits: int, window: int, reference_hits: int, reference: int) -> TestResult:
    """Test two rates for equality (Fisher's exact test, two-sided); the statistic is their difference."""
    total, both = window + reference, hits + reference_hits

    def likelihood(k: int) -> float:
        return _log_choose(window, k) + _log_choose(reference, both - k) - _log_choose(total, both)

    own = likelihood(hits)
    least, most = max(0, both - reference), min(window, both)
    p = sum(math.exp(each) for k in range(least, most + 1) if (each := likelihood(k)) <= own + 1e-9)
    return TestResult(hits / window - reference_hits / reference, min(p, 1.0))


def excess_test(hits: int, count: int, limit: float) -> TestResult:
    """Test that a rate is at most ``limit`` (exact binomial test, one-sided); the statistic is the rate."""
    p = sum(
        math.exp(_log_choose(count, k) + k * math.log(limit) + (count - k) * math.log1p(-limit))
        for k in range(hits, count + 1)
    )
    return TestResult(hits / count, min(p, 1.0))


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
