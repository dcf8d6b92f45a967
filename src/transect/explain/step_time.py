"""How long a step takes: a model fitted on a log, over the cost model.

``seconds = fixed + a * floor + b * rows + c * keys + d * pairs + e * chunks + f(computed tokens)``

All coefficients are at least 0, so that more work never takes less time. The floor carries what the hardware needs.
``f`` carries what kernels add to it: it rises from one number of tokens to the next that steps are padded to (a GPU has
a few dozen), in one way for steps that only decode and in another for those with prefill chunks. Keys are those that
decodes read, pairs those of prefill chunks. Errors count relatively, and large ones less than in proportion, so that
steps which something else held up do not bend the model.

Where steps are planned ahead, a step that was over before anybody looked ended nobody knows when, and the one after it
began nobody knows when: neither is fitted or judged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from .log import RunLog, Step
from .work import Load, StepWork

FEWEST = 20
"""Steps to fit on."""
DRIFT = 0.25
"""Median relative error of new steps that means: this is no longer the system that the model was fitted on."""
LARGE = 0.05
"""A relative error from which on a step counts less."""
RIDGE = 1e-4
RECENT = 5
"""Steps that say how fast the machine is now."""
MOST_SIZES = 48
"""Numbers of tokens that ``f`` has a bend at; where steps have more, bends lie a quarter of an octave apart."""


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

    decode_knots: tuple[float, ...]
    """Tokens at which the time of steps that only decode bends."""
    mixed_knots: tuple[float, ...]
    """The same for steps with prefill chunks."""
    coefficients: tuple[float, ...]
    host: float
    """Median time that the host takes from one step's result until it waits for the next, where work is there."""

    def seconds(self, load: Load) -> float:
        """Predicted time of a step."""
        return float(self.predict([load])[0])

    def errors(self, loads: Sequence[Load], measured: Sequence[float]) -> Errors:
        """How far predictions are from ``measured`` times."""
        return errors(self.predict(loads), np.array(measured))

    def predict(self, loads: Sequence[Load]) -> np.ndarray:
        """Predicted times of several steps."""
        return _features(loads, self.decode_knots, self.mixed_knots) @ np.array(self.coefficients)

    @classmethod
    def fit(cls, loads: Sequence[Load], measured: Sequence[float], host: float = 0.0) -> StepTime:
        """The model that is nearest to ``measured`` times.

        Raises:
            ValueError: fewer than ``FEWEST`` steps.
        """
        if len(loads) < FEWEST:
            raise ValueError(f"a model of step times needs at least {FEWEST} steps, not {len(loads)}: log a longer run")
        seconds = np.array(measured)
        decodes, mixed = (_knots([load.padded for load in loads if load.decodes is kind]) for kind in (True, False))
        features = _features(loads, decodes, mixed)
        weight = np.ones(len(loads))
        for _ in range(4):
            found = _fit(features, seconds, weight)
            relative = np.abs(features @ found / seconds - 1)
            weight = np.minimum(1.0, LARGE / np.maximum(relative, 1e-9))
        return cls(decodes, mixed, tuple(float(each) for each in found), host)


def errors(predicted: np.ndarray, measured: np.ndarray) -> Errors:
    """The errors of predicted seconds."""
    relative = np.abs(predicted - measured) / measured
    median, p90, p99 = np.percentile(relative, [50, 90, 99])
    return Errors(len(measured), float(median), float(p90), float(p99), float(predicted.sum() / measured.sum()))


def calibrated(log: RunLog, work: StepWork, share: float = 0.5) -> tuple[StepTime, tuple[Errors, Errors] | None]:
    """The model of a whole log, and how well a model of its first ``share`` predicts the rest (``checked_steps``).

    Raises:
        ValueError: fewer than ``FEWEST`` steps, or fewer whose times are known.
    """
    loads, seconds = measured_steps(log, work)
    done = sum(step.at is not None for step in log.steps[1:])
    if len(loads) < FEWEST <= done:
        raise ValueError(
            f"only {len(loads)} of {done} steps have a known time: the device had done the others before the host "
            "looked. Log a longer run, or one with async_scheduling=False"
        )
    return StepTime.fit(loads, seconds, host_seconds(log)), checked_steps(log, work, share)


def followed(predicted: np.ndarray, measured: np.ndarray) -> np.ndarray:
    """Predictions that follow the machine: each times the median of measured over predicted of the ``RECENT`` steps
    before it. A processor's speed changes by the minute, with its clock and with who else uses its memory."""
    ratio = measured / predicted
    return np.array([predicted[i] * np.median(ratio[max(0, i - RECENT) : i] if i else 1.0) for i in range(len(ratio))])


def checked_steps(log: RunLog, work: StepWork, share: float = 0.5) -> tuple[Errors, Errors] | None:
    """How well the model of a log's first ``share`` predicts the rest, and how well where it follows the machine
    (``followed``); None: too few steps."""
    loads, seconds = measured_steps(log, work)
    cut = int(len(loads) * share)
    if min(cut, len(loads) - cut) < FEWEST:
        return None
    predicted = StepTime.fit(loads[:cut], seconds[:cut]).predict(loads[cut:])
    measured = np.array(seconds[cut:])
    return errors(predicted, measured), errors(followed(predicted, measured), measured)


def measured_steps(log: RunLog, work: StepWork) -> tuple[list[Load], list[float]]:
    """The work and the time of every step whose time is known; the first one, which sets things up, is left out."""
    known = known_steps(log)
    return [work.load(step.rows) for step in known], [step.seconds for step in known]


def known_steps(log: RunLog) -> list[Step]:
    """The steps whose beginning and end the log says."""
    return [
        after
        for before, after in pairwise(log.steps)
        if after.at is not None and after.seconds > 0 and after.late != "host" and before.late != "host"
    ]


def spread(log: RunLog) -> Errors | None:
    """How far decode steps are from the mean of the steps before and after them, where the same sequences ran in all
    three: the work is the same but for a position, so what is left is the machine, and no model can know it. None where
    fewer than ``FEWEST`` steps are of that kind."""
    expected, measured = [], []
    known = {step.number: step for step in known_steps(log)}
    for number, step in known.items():
        around = known.get(number - 1), known.get(number + 1)
        if None in around or any(count > 1 for _, _, count in step.rows):
            continue
        rows = {seq for seq, _, _ in step.rows}
        if all(each is not None and _decodes(each, rows) for each in around):
            expected.append(sum(each.seconds for each in around if each is not None) / 2)
            measured.append(step.seconds)
    return errors(np.array(expected), np.array(measured)) if len(measured) >= FEWEST else None


def _decodes(step: Step, rows: set[int]) -> bool:
    """Whether a step has one token for each of these sequences, and nothing else."""
    return len(step.rows) == len(rows) and all(seq in rows and count == 1 for seq, _, count in step.rows)


def host_seconds(log: RunLog) -> float:
    """The median time that the host takes from one result until it waits for the next, where work is there."""
    taken = []
    for before, after in pairwise(log.steps):
        if before.at is not None and after.at is not None and before.planned.running:
            until = after.waited if log.header.lag else after.begins
            taken.append(max(0.0, until - before.at))
    return float(np.median(taken)) if taken else 0.0


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
    knots = {"decode_knots": model.decode_knots, "mixed_knots": model.mixed_knots}
    return {**knots, "coefficients": model.coefficients, "host_seconds": model.host}


def _knots(sizes: Sequence[int]) -> tuple[float, ...]:
    """The bends of ``f`` for steps of these sizes."""
    found = sorted(set(sizes))
    if len(found) <= MOST_SIZES:
        return tuple(float(size) for size in found)
    knots = [float(found[0])]
    while knots[-1] < found[-1]:
        knots.append(min(float(found[-1]), max(knots[-1] + 1, knots[-1] * 2**0.25)))
    return tuple(knots)


def _features(loads: Sequence[Load], decode_knots: tuple[float, ...], mixed_knots: tuple[float, ...]) -> np.ndarray:
    plain = [
        (
            1e-4,
            load.floor,
            1e-5 * load.rows,
            1e-7 * load.decode_keys,
            1e-7 * load.prompt_pairs,
            1e-5 * load.chunks,
            0.0 if load.decodes else 1e-4,
        )
        for load in loads
    ]
    tokens = np.array([load.padded for load in loads], dtype=float)
    decodes = np.array([load.decodes for load in loads], dtype=bool)[:, None]
    ladders = (1e-4 * _ladder(tokens, decode_knots) * decodes, 1e-4 * _ladder(tokens, mixed_knots) * ~decodes)
    return np.concatenate([np.array(plain).reshape(-1, 7), *ladders], axis=1)


def _ladder(tokens: np.ndarray, knots: tuple[float, ...]) -> np.ndarray:
    """A column for each stretch between two knots: 0 before it, 1 behind it. Beyond the last knot all rise in
    proportion."""
    if len(knots) < 2:
        return np.zeros((len(tokens), 0))
    low, high = np.array(knots[:-1]), np.array(knots[1:])
    return np.clip((tokens[:, None] - low) / (high - low), 0, 1) * np.maximum(1.0, tokens / knots[-1])[:, None]


def _fit(features: np.ndarray, seconds: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Weighted least squares of relative errors over coefficients of at least 0, by coordinate descent. A small ridge
    holds down the coefficients that no step speaks for, but not the fixed time."""
    scaled = features / seconds[:, None]
    scale = np.sqrt((scaled**2).mean(axis=0))
    scale[scale == 0] = 1.0
    scaled = scaled / scale
    ridge = np.full(scaled.shape[1], RIDGE)
    ridge[0] = 1e-9
    gram = (scaled * weight[:, None]).T @ scaled / len(seconds) + np.diag(ridge)
    target = (scaled * weight[:, None]).mean(axis=0)
    found = np.zeros(scaled.shape[1])
    for _ in range(2000):
        before = found.copy()
        for each in range(len(found)):
            found[each] = max(0.0, found[each] - (gram[each] @ found - target[each]) / gram[each, each])
        if np.abs(found - before).max() < 1e-8:
            break
    return found / scale
