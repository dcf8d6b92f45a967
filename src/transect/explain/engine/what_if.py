"""A counterfactual replay from the command line: settings as text in, a comparison as text or JSON out."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ...costs.fitting import Errors, FittedSteps
from ...engine.scheduling.decisions import read_records
from .calibration import calibrated, drift, measured_steps, spread
from .log import DecisionRunLog, build
from .rates import rates_for
from .simulate import Latencies, changed, recorded, simulate
from .work import StepWork

NEWEST = 200
"""Steps at the end of a log that are checked for drift."""


@dataclass(frozen=True, slots=True)
class WhatIf:
    """Measured latencies, the model's for the same settings, and its prediction for changed ones."""

    changes: Mapping[str, Any]
    measured: Latencies
    same: Latencies
    predicted: Latencies
    model: FittedSteps
    errors: Errors | None
    """Errors on the second half of the log of a model fitted to the first half; None if there are too few steps."""
    followed: Errors | None
    """The same errors, if each prediction uses the machine's speed in the steps before (``calibration.followed``)."""
    like: Errors | None
    """Differences between equal steps (``calibration.spread``): noise of the machine, which no model predicts."""
    warnings: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields for JSON; seconds."""
        return {
            "changes": dict(self.changes),
            "measured": self.measured.to_dict(),
            "simulated_unchanged": self.same.to_dict(),
            "predicted": self.predicted.to_dict(),
            "step_time": self.model.to_dict(),
            "step_time_errors": None if self.errors is None else asdict(self.errors),
            "followed_errors": None if self.followed is None else asdict(self.followed),
            "like_steps": None if self.like is None else asdict(self.like),
            "warnings": self.warnings,
        }

    def lines(self) -> list[str]:
        """Return a table with remarks."""
        rows: list[tuple[str, ...]] = [("", "measured", "model, unchanged", "model, changed", "change")]
        for title, kind in (("TTFT", "ttft"), ("ITL", "itl")):
            for name in ("p50", "p99"):
                values = [getattr(each, kind).get(name) for each in (self.measured, self.same, self.predicted)]
                if None not in values:
                    shown = [f"{1e3 * value:.1f} ms" for value in values]
                    rows.append((f"{title} {name}", *shown, f"{values[2] / values[1] - 1:+.0%}"))
        rates = [each.tokens_per_second for each in (self.measured, self.same, self.predicted)]
        rows.append(("tokens/s", *(f"{rate:.1f}" for rate in rates), f"{rates[2] / rates[1] - 1:+.0%}"))
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        found = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        found.append("")
        said = ", ".join(f"{name}={value}" for name, value in self.changes.items()) or "nothing"
        found.append(f"changed: {said}; {self.measured.requests} requests, arrivals as they were")
        if self.errors is not None:
            found.append(f"step times, first half on second half: {self.errors}")
        if self.followed is not None:
            found.append(f"with the machine's speed in the steps before: {self.followed}")
        if self.like is not None:
            found.append(f"decode steps beside those before and after them, which is the machine alone: {self.like}")
        return [*found, *self.warnings]


def what_if(log: DecisionRunLog, work: StepWork, settings: Sequence[str]) -> WhatIf:
    """Predict the run with ``settings`` (``name=value``) changed.

    Raises:
        ValueError: a setting is at fault, or the log is too short.
    """
    changes = parse(settings)
    config, other = changed(log, work, changes)
    unchanged, _ = changed(log, work, {})
    model, checked = calibrated(log, work)
    warnings = []
    loads, seconds = measured_steps(log, work)
    if len(loads) >= 2 * NEWEST:
        older = FittedSteps.fit(loads[:-NEWEST], seconds[:-NEWEST])
        warning = drift(older, loads[-NEWEST:], seconds[-NEWEST:])
        warnings += [warning] if warning else []
    if not work.floor([(0, 0, 1)]).seconds:
        warnings.append("no floors are known for this log: step times are fitted on tokens and positions alone")
    if other is not None:
        warnings.append("another device or format: step times are scaled by the floors, which nothing here measured")
    same = simulate(log, model, work, unchanged)
    predicted = simulate(log, model, work, config, other)
    plain, followed = checked or (None, None)
    return WhatIf(changes, recorded(log), same, predicted, model, plain, followed, spread(log), tuple(warnings))


def main() -> None:
    """Predict the log on the standard input: ``python -m transect.explain.engine.what_if whole|part NAME=VALUE ...``.

    Prints JSON; an error is a line on the standard error. Other processes run first.
    """
    os.nice(19)
    log = build(read_records(sys.stdin.buffer.read()), complete=sys.argv[1] == "whole")
    try:
        found = what_if(log, StepWork.of(log.header, rates_for(log.header, measure=False)), sys.argv[2:])
    except ValueError as error:
        sys.exit(str(error).removeprefix("--set "))
    print(json.dumps(found.to_dict()))


def parse(settings: Sequence[str]) -> dict[str, Any]:
    """Parse ``["max_num_seqs=8", "batching=static"]`` to names and values; values are JSON if possible, else text.

    Raises:
        ValueError: one has no ``=``.
    """
    found: dict[str, Any] = {}
    for each in settings:
        name, separator, value = each.partition("=")
        if not separator or not name:
            raise ValueError(f"--set {each!r} must be name=value, such as max_num_batched_tokens=512")
        try:
            found[name.strip()] = json.loads(value)
        except ValueError:
            found[name.strip()] = value
    return found


if __name__ == "__main__":
    main()
