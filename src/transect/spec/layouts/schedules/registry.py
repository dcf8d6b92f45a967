"""All pipeline schedules: one file of this folder an entry, found by its record."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from ...records import records_in
from .pipeline_schedule import PipelineSchedule


@cache
def schedules() -> Mapping[str, PipelineSchedule]:
    """Find all schedules by name, those with one run of layers to a rank first.

    Raises:
        ValueError: two records have one name.
    """
    found = records_in(__package__, PipelineSchedule, "pipeline schedules")
    return {each.name: each for each in sorted(found.values(), key=lambda each: (each.chunked, each.name))}


def schedule_kind(name: object) -> PipelineSchedule:
    """Return the record of a schedule.

    Raises:
        ValueError: there is none of this name; the message lists them.
    """
    if name not in schedules():
        raise ValueError(f"schedule is one of {', '.join(schedules())}, not {name!r}")
    return schedules()[str(name)]
