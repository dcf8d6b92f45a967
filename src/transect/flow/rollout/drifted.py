"""Drift as a condition of promotion: the tests of ``transect flow watch``, on what the candidate has answered.

The reference is given (training data, or captures of a good time), or else the current version's own captures: users
are split between the two versions by chance, so their prompts differ by chance alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..watch.drift import LEAST, Baseline, DriftSettings, check_window
from ..watch.follow import newest_window
from ..watch.models import embed_here
from ..watch.records import reference_in
from ..watch.report import DRIFT_ALARMS


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftCondition:
    """The condition of a watch. Attributes are those of ``FlowWatch`` and ``DriftSettings``."""

    captures: Path
    reference: Path | None
    alarms: tuple[str, ...]
    model: str = ""
    window: int = 256
    false_alarms: float = 1e-3

    def check(self, candidate: str, current: str) -> tuple[str, dict[str, Any]]:
        """Test the newest captures of the candidate.

        Returns:
            the reason against a promotion, empty if there is none, and the p-values by test.

        Raises:
            ValueError: captures or reference cannot be read, or the reference is too small.
        """
        settings = DriftSettings(window=max(LEAST, self.window), false_alarms=self.false_alarms)
        found = newest_window(self.captures, settings, candidate)
        if len(found) < LEAST:
            return f"drift is not known: {len(found)} captured requests of {candidate}, {LEAST} are needed", {}
        if self.reference is not None:
            reference = reference_in(self.reference)
        else:
            reference = newest_window(self.captures, DriftSettings(window=2 * settings.window), current)
        embed = embed_here(self.model) if self.model else None
        report = check_window(Baseline.of(reference, settings, embed), found, settings, embed)
        tests = {DRIFT_ALARMS[test.name]: test for test in report.tests}
        raised = [name for name, test in tests.items() if test.alarm and name in self.alarms]
        told = ", ".join(
            f"{name} (p = {tests[name].p:.2g}{_sides(tests[name].reference, tests[name].window)})" for name in raised
        )
        return told and f"drift in {len(found)} requests: {told}", {name: test.p for name, test in tests.items()}


def _sides(reference: float, window: float) -> str:
    """Return the figures of both sides; empty where a test has none."""
    return "" if not math.hypot(reference, window) else f", {reference:.3g} before and {window:.3g} now"
