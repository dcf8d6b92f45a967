"""How long a step takes: a model fitted on a log, over the cost model.

``seconds = fixed + a * floor + b * rows + c * keys + d * pairs + (a piecewise linear function of the tokens)``

All coefficients are at least 0, so that more work never takes less time. The floor carries what the hardware needs;
the function of the tokens carries what kernels add to it (tiles that are half full, other kernels for few rows). It
is fitted by relative errors, and a second time without the steps that something else on the machine held up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .log import RunLog
from .work import Load, StepWork

FEWEST = 20
"""Steps to fit on."""
DRIFT = 0.25
"""Median relative error of new steps that means: this is no longer the system that the model was fitted on."""
OUTLIER = 3.0
"""Steps that take so many times their prediction are left out of the second fit."""
RIDGE = 1e-3


@dataclass(frozen=True, slots=True)
class Errors:
    """Relative errors of predictions: ``|predicted - measured| / measured``."""

    steps: int
    median: float
    p90: float
    p99: float
    bias: float
    """Predicted over measured time, all steps together."""

    def __str__(self) -> str:
        return (
            f"{self.steps} steps: median error {self.median:.1%}, p90 {self.p90:.1%}, p99 {self.p99:.1%}; "
            f"all together {self.bias - 1:+.1%}"
        )


@dataclass(frozen=True, slots=True)
class StepTime:
    """A fitted model. Times are seconds."""

    knots: tuple[float, ...]
    """Tokens at which the piecewise linear function bends."""
    coefficients: tuple[float, ...]
    host: float
    """Median time between the end of a step and the beginning of the next, where work was there."""

    def seconds(self, load: Load) -> float:
        """Predicted time of a step."""
        return float(_features([load], self.knots)[0] @ np.array(self.coefficients))

    def errors(self, loads: Sequence[Load], measured: Sequence[float]) -> Errors:
        """How far predictions are from ``measured`` times."""
        predicted = _features(loads, self.knots) @ np.array(self.coefficients)
        return errors(predicted, np.array(measured))

    @classmethod
    def fit(cls, loads: Sequence[Load], measured: Sequence[float], host: float = 0.0) -> StepTime:
        """The model that is nearest to ``measured`` times.

        Raises:
            ValueError: fewer than ``FEWEST`` steps.
        """
        if len(loads) < FEWEST:
            raise ValueError(f"a model of step times needs at least {FEWEST} steps, not {len(loads)}: log a longer run")
        seconds = np.array(measured)
        most = max(load.tokens for load in loads)
        knots = [1.0]
        while knots[-1] < most:
            knots.append(knots[-1] * 2)
        features = _features(loads, tuple(knots))
        keep = np.ones(len(loads), dtype=bool)
        for _ in range(3):
            found = _fit(features[keep], seconds[keep])
            ratio = seconds / np.maximum(features @ found, 1e-9)
            keep = (ratio < OUTLIER) & (ratio > 1 / OUTLIER)
            if keep.sum() < FEWEST:
                break
        return cls(tuple(knots), tuple(float(each) for each in found), host)


def errors(predicted: np.ndarray, measured: np.ndarray) -> Errors:
    """The errors of predicted seconds."""
    relative = np.abs(predicted - measured) / measured
    median, p90, p99 = np.percentile(relative, [50, 90, 99])
    return Errors(len(measured), float(median), float(p90), float(p99), float(predicted.sum() / measured.sum()))


def calibrated(log: RunLog, work: StepWork, share: float = 0.5) -> tuple[StepTime, Errors | None]:
    """The model of a whole log, and how well a model of its first ``share`` predicts the rest (None: too few)."""
    loads, seconds = measured_steps(log, work)
    cut = int(len(loads) * share)
    checked = None
    if cut >= FEWEST and len(loads) - cut >= FEWEST:
        checked = StepTime.fit(loads[:cut], seconds[:cut]).errors(loads[cut:], seconds[cut:])
    return StepTime.fit(loads, seconds, host_seconds(log)), checked


def measured_steps(log: RunLog, work: StepWork) -> tuple[list[Load], list[float]]:
    """The work and the time of every step that is done; the first one, which sets things up, is left out."""
    done = [step for step in log.steps[1:] if step.at is not None and step.seconds > 0]
    return [work.load(step.rows) for step in done], [step.seconds for step in done]


def host_seconds(log: RunLog) -> float:
    """The median time between steps that followed one another without a wait for work."""
    gaps = []
    for before, after in zip(log.steps, log.steps[1:], strict=False):
        if before.at is not None and after.at is not None and before.planned.running:
            gaps.append(max(0.0, after.begins - before.at))
    return float(np.median(gaps)) if gaps else 0.0


def drift(model: StepTime, loads: Sequence[Load], measured: Sequence[float]) -> str | None:
    """The warning that newer steps no longer take what the model predicts; None where they do."""
    if len(loads) < FEWEST:
        return None
    found = model.errors(loads, measured)
    if found.median <= DRIFT:
        return None
    return (
        f"StepTimeDrift: the last {found.steps} steps are off by {found.median:.0%} at the median "
        f"(predicted {found.bias:.2f}x of measured): the machine, its load or the model changed; calibrate again"
    )


def to_dict(model: StepTime) -> dict[str, Any]:
    """For JSON."""
    return {"knots": model.knots, "coefficients": model.coefficients, "host_seconds": model.host}


def _features(loads: Sequence[Load], knots: tuple[float, ...]) -> np.ndarray:
    plain = np.array(
        [(1e-4, load.floor, 1e-5 * load.rows, 1e-7 * load.keys, 1e-7 * load.pairs) for load in loads]
    ).reshape(-1, 5)
    tokens = np.array([load.tokens for load in loads], dtype=float)
    hats = np.stack([_hat(tokens, knots, index) for index in range(len(knots))], axis=1)
    return np.concatenate([plain, 1e-4 * hats], axis=1)


def _hat(tokens: np.ndarray, knots: tuple[float, ...], index: int) -> np.ndarray:
    """1 at a knot, 0 at its neighbours; the last one goes on rising in proportion."""
    heights = np.zeros(len(knots))
    heights[index] = 1.0
    inside = np.interp(tokens, knots, heights)
    beyond = tokens > knots[-1]
    return np.where(beyond, heights[-1] * tokens / knots[-1], inside)


def _fit(features: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Least squares of relative errors over coefficients of at least 0, by coordinate descent. A small ridge holds
    down the coefficients that no step speaks for."""
    scaled = features / seconds[:, None]
    scale = np.sqrt((scaled**2).mean(axis=0))
    scale[scale == 0] = 1.0
    scaled = scaled / scale
    gram = scaled.T @ scaled / len(seconds) + RIDGE * np.eye(scaled.shape[1])
    target = scaled.mean(axis=0)
    found = np.zeros(scaled.shape[1])
    for _ in range(2000):
        before = found.copy()
        for each in range(len(found)):
            gradient = gram[each] @ found - target[each]
            found[each] = max(0.0, found[each] - gradient / gram[each, each])
        if np.abs(found - before).max() < 1e-9:
            break
    return found / scale
