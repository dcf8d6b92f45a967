"""Reports on drift: the tests of a window, the alarms, and the file by which they reach the server's metrics."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

DRIFT_ALARMS = {
    "prompt_vectors": "PromptDrift",
    "answer_vectors": "AnswerDrift",
    "prompt_lengths": "PromptLengthDrift",
    "answer_lengths": "AnswerLengthDrift",
    "refusals": "RefusalDrift",
    "schema_failures": "SchemaFailures",
    "judge": "JudgeScoreDrop",
}
"""Names of alarms by test."""
REPORT = "drift.json"
"""File of the newest report in a directory of captures; the server shows it in its metrics."""


@dataclass(frozen=True, slots=True)
class DriftTest:
    """Result of one test of a window. ``reference`` and ``window``: a figure of each side, such as a mean."""

    name: str
    statistic: float
    p: float
    level: float
    alarm: bool
    reference: float
    window: float


@dataclass(frozen=True, slots=True)
class DriftReport:
    """Tests of a window. ``first`` and ``last``: times of its observations, in seconds since 1970."""

    first: float
    last: float
    observations: int
    false_alarms: float
    tests: list[DriftTest]

    @property
    def alarms(self) -> list[str]:
        """Names of the raised alarms."""
        return [DRIFT_ALARMS[test.name] for test in self.tests if test.alarm]


def write_report(folder: Path, report: DriftReport, windows: int) -> None:
    """Write the newest report beside the captures, for the server's metrics. Raises OSError."""
    path = folder / REPORT
    fresh = path.with_suffix(".new")
    data = {"time": time.time(), "windows": windows, **asdict(report)}
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w") as file:
        json.dump(data, file)
    fresh.replace(path)


def read_report(folder: Path) -> dict[str, Any] | None:
    """Read the newest report; None if there is none, or it is damaged."""
    try:
        report = json.loads((folder / REPORT).read_text())
        whole = {"time", "windows"} <= report.keys() and all(
            test["name"] in DRIFT_ALARMS and {"p", "statistic", "alarm"} <= test.keys() for test in report["tests"]
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return report if whole else None
