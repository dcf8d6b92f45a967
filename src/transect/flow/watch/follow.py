"""Follow a directory of captures: a report for each window that becomes full."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from .captures import read
from .drift import Baseline, DriftSettings, Embed, Judge, check_window
from .records import Observation, independent, observations
from .report import DriftReport, write_report


def newest_window(folder: Path, settings: DriftSettings, model: str = "", after: float = 0.0) -> list[Observation]:
    """Return the newest observations of a directory, one of each user and conversation, oldest first.

    Args:
        model: only of this version; empty for all.
        after: only later ones, in seconds since 1970.

    Raises:
        ValueError: there is no such directory.
    """
    return independent(observations(read(folder, after), model, after))[-settings.window :]


def follow(
    folder: Path,
    baseline: Baseline,
    settings: DriftSettings,
    embed: Embed | None = None,
    judge: Judge | None = None,
    model: str = "",
    every_s: float = 60.0,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[DriftReport]:
    """Yield a report for each full window; windows do not overlap. Reports are written beside the captures.

    Args:
        every_s: seconds between looks at the directory.
        sleep: waits.
    """
    after, number = 0.0, 0
    while True:
        window = newest_window(folder, settings, model, after)
        if len(window) < settings.window:
            sleep(every_s)
            continue
        report = check_window(baseline, window, settings, embed, judge, number)
        after, number = report.last, number + 1
        write_report(folder, report, number)
        yield report
