"""Step times of a decision log: which steps have a known time, the model fitted on them, and how well it predicts.

Where steps are planned ahead, a step that was over before the host looked has no known end, and the step after it no
known beginning: neither is fitted or judged.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from ...costs.fitting import FEWEST, Errors, FittedSteps, errors
from ...costs.steps import StepLoad
from .log import DecisionRunLog, LoggedStep
from .work import StepWork

DRIFT = 0.25
"""Median relative error of new steps above which the system differs from the one that the model was fitted on."""
RECENT = 5
"""Newest steps, which show the present speed of the machine."""


def calibrated(
    log: DecisionRunLog, work: StepWork, share: float = 0.5
) -> tuple[FittedSteps, tuple[Errors, Errors] | None]:
    """Fit the model of a whole log, and check how well a model of its first ``share`` predicts the rest.

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
    return FittedSteps.fit(loads, seconds, host_seconds(log)), checked_steps(log, work, share)


def followed(predicted: np.ndarray, measured: np.ndarray) -> np.ndarray:
    """Make predictions follow the machine: multiply each by the median ratio of measured to predicted time in the
    ``RECENT`` steps before it. A processor's speed changes by the minute, with its clock and the load on its memory."""
    ratio = measured / predicted
    return np.array([predicted[i] * np.median(ratio[max(0, i - RECENT) : i] if i else 1.0) for i in range(len(ratio))])


def checked_steps(log: DecisionRunLog, work: StepWork, share: float = 0.5) -> tuple[Errors, Errors] | None:
    """Check how well the model of a log's first ``share`` predicts the rest, alone and with ``followed``; None if there
    are too few steps."""
    loads, seconds = measured_steps(log, work)
    cut = int(len(loads) * share)
    if min(cut, len(loads) - cut) < FEWEST:
        return None
    predicted = FittedSteps.fit(loads[:cut], seconds[:cut]).predict(loads[cut:])
    measured = np.array(seconds[cut:])
    return errors(predicted, measured), errors(followed(predicted, measured), measured)


def measured_steps(log: DecisionRunLog, work: StepWork) -> tuple[list[StepLoad], list[float]]:
    """List the work and the time of every step whose time is known, without the first one, which sets things up."""
    known = known_steps(log)
    return [work.load(step.rows) for step in known], [step.seconds for step in known]


def known_steps(log: DecisionRunLog) -> list[LoggedStep]:
    """List the steps whose beginning and end the log has."""
    return [
        after
        for before, after in pairwise(log.steps)
        if after.at is not None and after.seconds > 0 and after.late != "host" and before.late != "host"
    ]


def spread(log: DecisionRunLog) -> Errors | None:
    """Compare decode steps with the mean of the steps before and after them, if the same sequences ran in all three.

    Their work differs by one position, so the rest is the machine, which no model can know. None if there are fewer
    than ``FEWEST`` such steps."""
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


def _decodes(step: LoggedStep, rows: set[int]) -> bool:
    """Return True if a step has one token for each of these sequences, and no other rows."""
    return len(step.rows) == len(rows) and all(seq in rows and count == 1 for seq, _, count in step.rows)


def host_seconds(log: DecisionRunLog) -> float:
    """Return the median time of the host before each step, while there is work: from one result to the next step's
    begin, or, if steps are planned ahead, from planning a step to submitting it."""
    taken = []
    for before, after in pairwise(log.steps):
        if before.at is None or after.at is None or not before.planned.running:
            continue
        if not log.header.lag:
            taken.append(max(0.0, after.begins - before.at))
        elif before.waited > after.planned.began:  # the wait until it is time to plan comes before that
            taken.append(before.waited - after.planned.began)
    return float(np.median(taken)) if taken else 0.0


def drift(model: FittedSteps, loads: Sequence[StepLoad], measured: Sequence[float]) -> str | None:
    """Return a warning if newer steps no longer take the predicted time, else None."""
    if len(loads) < FEWEST:
        return None
    found = model.errors(loads, measured)
    if found.median <= DRIFT:
        return None
    return (
        f"StepTimeDrift: the last {found.steps} steps are off by {found.median:.0%} at the median "
        f"(predicted {found.bias:.2f}x of measured): the machine, its load or the model changed; calibrate again"
    )
