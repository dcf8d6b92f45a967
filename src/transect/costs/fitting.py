"""Step times fitted on measured steps: ``FittedSteps``, a model of many terms over the floors of the cost model, for
prediction and simulation of one engine; and ``fit_efficiency``, the few coefficients of ``serving.py``.

``FittedSteps`` is linear:

``seconds = fixed + a * floor + b * rows + c * keys + d * pairs + e * chunks + f(computed tokens)``

All coefficients are at least 0, so that more work never takes less time. The floor carries what the hardware needs.
``f`` carries what kernels add to it: it rises from one number of tokens to the next that steps are padded to (a GPU has
a few dozen), in one way for steps that only decode and in another for those with prefill chunks. Keys are those that
decodes read, pairs those of prefill chunks. Errors count relatively, and large ones less than in proportion, so that
steps which something else held up do not bend the model.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from .serving import Efficiency, ServingSteps
from .steps import StepLoad

FEWEST = 20
"""Fewest steps to fit on."""
LARGE = 0.05
"""Relative error above which a step counts less."""
RIDGE = 1e-4
MOST_SIZES = 48
"""Most knots of ``f``, one for each number of computed tokens; with more numbers, knots are a quarter of an octave
apart."""
SCALES = (1e-4, 1.0, 1e-5, 1e-7, 1e-7, 1e-5, 1e-4)
"""Seconds of one unit of each plain term, for numbers of like size."""
LADDER = 1e-4
"""Seconds of one unit of each stretch of ``f``."""


@dataclass(frozen=True, slots=True)
class Errors:
    """Relative errors of predictions: ``|predicted - measured| / measured``."""

    steps: int
    median: float
    p90: float
    p99: float
    bias: float
    """Ratio of predicted to measured time, all steps together."""

    def __str__(self) -> str:
        return (
            f"{self.steps} steps: median error {self.median:.1%}, p90 {self.p90:.1%}, p99 {self.p99:.1%}; "
            f"all together {self.bias - 1:+.1%}"
        )


@dataclass(frozen=True)
class FittedSteps:
    """A fitted model of step times. Times are seconds."""

    decode_knots: tuple[float, ...]
    """Knots of the time of steps that only decode, in tokens."""
    mixed_knots: tuple[float, ...]
    """Knots of the time of steps with prefill chunks, in tokens."""
    coefficients: tuple[float, ...]
    host: float
    """Median host time from one step's result until it waits for the next, while there is work."""

    def seconds(self, load: StepLoad) -> float:
        """Predict the time of one step, in plain Python: simulations ask for millions."""
        plain = sum(a * b for a, b in zip(_plain(load), self.coefficients, strict=False))
        knots, ends = self._ladders[bool(load.chunks)]
        if len(knots) < 2:
            return plain
        tokens = load.padded
        if tokens >= knots[-1]:
            return plain + ends[-1] * tokens / knots[-1]
        place = bisect_right(knots, tokens)
        if not place:
            return plain
        low, high = knots[place - 1], knots[place]
        return plain + ends[place - 1] + (ends[place] - ends[place - 1]) * (tokens - low) / (high - low)

    @cached_property
    def _ladders(self) -> tuple[tuple[tuple[float, ...], list[float]], ...]:
        """``f`` as knots and its values there, for decodes and for steps with chunks."""
        found, at = [], len(SCALES)
        for knots in (self.decode_knots, self.mixed_knots):
            ends = [0.0]
            for each in range(max(0, len(knots) - 1)):
                ends.append(ends[-1] + LADDER * self.coefficients[at + each])
            at += max(0, len(knots) - 1)
            found.append((knots, ends))
        return tuple(found)

    def predict(self, loads: Sequence[StepLoad]) -> np.ndarray:
        """Predict the times of several steps."""
        return np.array([self.seconds(load) for load in loads])

    def errors(self, loads: Sequence[StepLoad], measured: Sequence[float]) -> Errors:
        """Compare predictions with ``measured`` times."""
        return errors(self.predict(loads), np.array(measured))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        knots = {"decode_knots": self.decode_knots, "mixed_knots": self.mixed_knots}
        return {**knots, "coefficients": self.coefficients, "host_seconds": self.host}

    @classmethod
    def fit(cls, loads: Sequence[StepLoad], measured: Sequence[float], host: float = 0.0) -> FittedSteps:
        """Fit the model to ``measured`` times.

        Raises:
            ValueError: there are fewer than ``FEWEST`` steps.
        """
        if len(loads) < FEWEST:
            raise ValueError(f"a model of step times needs at least {FEWEST} steps, not {len(loads)}: log a longer run")
        seconds = np.array(measured)
        decodes, mixed = (
            _knots([load.padded for load in loads if bool(load.chunks) is kind]) for kind in (False, True)
        )
        features = _features(loads, decodes, mixed)
        weight = np.ones(len(loads))
        for _ in range(4):
            found = _fit(features, seconds, weight)
            relative = np.abs(features @ found / seconds - 1)
            weight = np.minimum(1.0, LARGE / np.maximum(relative, 1e-9))
        return cls(decodes, mixed, tuple(float(each) for each in found), host)


def errors(predicted: np.ndarray, measured: np.ndarray) -> Errors:
    """Compare predicted with measured seconds."""
    relative = np.abs(predicted - measured) / measured
    median, p90, p99 = np.percentile(relative, [50, 90, 99])
    return Errors(len(measured), float(median), float(p90), float(p99), float(predicted.sum() / measured.sum()))


def _knots(sizes: Sequence[int]) -> tuple[float, ...]:
    """Choose the knots of ``f`` for steps of these sizes."""
    found = sorted(set(sizes))
    if len(found) <= MOST_SIZES:
        return tuple(float(size) for size in found)
    knots = [float(found[0])]
    while knots[-1] < found[-1]:
        knots.append(min(float(found[-1]), max(knots[-1] + 1, knots[-1] * 2**0.25)))
    return tuple(knots)


def _plain(load: StepLoad) -> tuple[float, ...]:
    """List the terms of a step beside ``f``, each in units of its scale."""
    amounts = (1.0, load.floor, load.rows, load.keys, load.pairs, load.chunks, bool(load.chunks))
    return tuple(scale * amount for scale, amount in zip(SCALES, amounts, strict=True))


def _features(loads: Sequence[StepLoad], decode_knots: tuple[float, ...], mixed_knots: tuple[float, ...]) -> np.ndarray:
    plain = np.array([_plain(load) for load in loads]).reshape(-1, len(SCALES))
    tokens = np.array([load.padded for load in loads], dtype=float)
    decodes = np.array([not load.chunks for load in loads], dtype=bool)[:, None]
    ladders = (LADDER * _ladder(tokens, decode_knots) * decodes, LADDER * _ladder(tokens, mixed_knots) * ~decodes)
    return np.concatenate([plain, *ladders], axis=1)


def _ladder(tokens: np.ndarray, knots: tuple[float, ...]) -> np.ndarray:
    """Build a column for each stretch between two knots: 0 before it, 1 after it. Beyond the last knot all rise in
    proportion."""
    if len(knots) < 2:
        return np.zeros((len(tokens), 0))
    low, high = np.array(knots[:-1]), np.array(knots[1:])
    return np.clip((tokens[:, None] - low) / (high - low), 0, 1) * np.maximum(1.0, tokens / knots[-1])[:, None]


def _fit(features: np.ndarray, seconds: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Solve weighted least squares of relative errors over coefficients of at least 0. A small ridge holds down the
    coefficients that no step determines, but not the fixed time."""
    scaled = features / seconds[:, None]
    scale = np.sqrt((scaled**2).mean(axis=0))
    scale[scale == 0] = 1.0
    scaled = scaled / scale
    ridge = np.full(scaled.shape[1], RIDGE)
    ridge[0] = 1e-9
    gram = (scaled * weight[:, None]).T @ scaled / len(seconds) + np.diag(ridge)
    target = (scaled * weight[:, None]).mean(axis=0)
    return _at_least_zero(gram, target) / scale


def _at_least_zero(gram: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Minimize ``x @ gram @ x / 2 - target @ x`` over ``x`` of at least 0, by the active sets of Lawson and Hanson
    (1974): solve for the free coefficients, and fix those at 0 that would fall below."""
    found, free = np.zeros(len(target)), np.zeros(len(target), dtype=bool)
    for _ in range(3 * len(target)):
        slope = np.where(free, 0.0, target - gram @ found)
        if slope.max() <= 1e-12:
            break
        free[slope.argmax()] = True
        while free.any():
            there = np.zeros(len(target))
            there[free] = np.linalg.solve(gram[np.ix_(free, free)], target[free])
            below = free & (there <= 0)
            if not below.any():
                found = there
                break
            found = found + (found[below] / (found[below] - there[below])).min() * (there - found)
            free &= found > 1e-15
    return np.where(free, found, 0.0)


# ---- the coefficients of ``serving.py`` ------------------------------------------------------------------------------

SHARES = ("few", "weights", "keys", "moved")
"""Coefficients that are shares of a bandwidth: between ``LEAST`` and 1."""
LEAST = 0.3
HELD = 1e-2
"""Weight of the coefficients' starting values beside the measured steps; it determines coefficients that no step
constrains."""
Measured = tuple[Callable[[Efficiency], ServingSteps], StepLoad, float]
"""A way to make the step times of a model, the work of a step, and its measured seconds."""


def fit_efficiency(start: Efficiency, measured: Sequence[Measured], free: Sequence[str]) -> Efficiency:
    """Fit the coefficients ``free`` of ``start`` to measured steps, by relative errors.

    Method: Levenberg (1944) and Marquardt (1963), over logarithms of coefficients and logits of shares, which keeps
    shares between ``LEAST`` and 1.

    Raises:
        ValueError: there are fewer steps than coefficients.
    """
    if len(measured) < len(free):
        raise ValueError(f"{len(free)} coefficients need at least as many measured steps, not {len(measured)}")
    first = np.array([_encoded(name, getattr(start, name)) for name in free])

    def efficiency(place: np.ndarray) -> Efficiency:
        changes: dict[str, Any] = {name: _decoded(name, value) for name, value in zip(free, place, strict=True)}
        return replace(start, **changes)

    def residuals(place: np.ndarray) -> np.ndarray:
        known = efficiency(place)
        errors = [np.log(make(known).seconds(load) / seconds) for make, load, seconds in measured]
        return np.array([*errors, *(HELD * (place - first))])

    place, damping = first.copy(), 1e-3
    now = residuals(place)
    for _ in range(100):
        slopes = np.stack([(residuals(place + step) - now) / 1e-4 for step in 1e-4 * np.eye(len(free))], axis=1)
        curve = slopes.T @ slopes
        move = np.linalg.solve(curve + damping * np.eye(len(free)), -slopes.T @ now)
        tried = residuals(place + np.clip(move, -0.5, 0.5))
        if tried @ tried < now @ now:
            place, now, damping = place + np.clip(move, -0.5, 0.5), tried, damping / 3
        else:
            damping *= 5
        if damping > 1e8 or np.abs(move).max() < 1e-6:
            break
    return efficiency(place)


def _encoded(name: str, value: float) -> float:
    share = (value - LEAST) / (1 - LEAST)
    return float(np.log(share / (1 - share)) if name in SHARES else np.log(value))


def _decoded(name: str, value: float) -> float:
    return float(LEAST + (1 - LEAST) / (1 + np.exp(-value)) if name in SHARES else np.exp(value))
