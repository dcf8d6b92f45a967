"""The alarm ``StepTimeDrift``: measured step times of the running engine differ from the predicted ones.

The engine predicts each timed step before it runs and learns from it (``costs/learning.py``). The alarm looks at
windows of steps between two scrapes. Other work on the device, a lower clock or a failing link makes steps longer than
all that was learned of them; plans that were made with those times do not hold then.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ...explain.engine.calibration import DRIFT

if TYPE_CHECKING:
    from ...engine.scheduling.outputs import SchedulerStats

log = logging.getLogger(__name__)

NAME = "StepTimeDrift"
WINDOW = 200
"""Fewest timed steps between two checks."""


class DriftWatch:
    """Compares predicted with measured time over windows of steps.

    Attributes:
        ratio: measured over predicted time of the last whole window; 1 before there is one.
        raised: True while that is off by more than ``DRIFT``.
    """

    def __init__(self) -> None:
        self.ratio = 1.0
        self.raised = False
        self._before = 0, 0.0, 0.0

    def look(self, stats: SchedulerStats) -> None:
        """Take the newest counters, and log when the alarm starts and ends."""
        now = stats.timed_steps, stats.step_seconds, stats.predicted_step_seconds
        steps, measured, predicted = (new - old for new, old in zip(now, self._before, strict=True))
        if steps < 0:  # the engine was restarted
            self._before = now
        if steps < WINDOW or predicted <= 0:
            return
        first = not self._before[0]
        self._before = now
        if first:  # the engine was still learning
            return
        self.ratio = measured / predicted
        raised = abs(self.ratio - 1) > DRIFT
        if raised and not self.raised:
            log.warning(
                "transect: %s: the last %d steps took %.2f times the predicted time: the device, its load or its clock "
                "changed, and plans made with these times do not hold",
                *(NAME, steps, self.ratio),
            )
        if self.raised and not raised:
            log.warning("transect: %s is over: steps take %.2f times the predicted time", NAME, self.ratio)
        self.raised = raised
