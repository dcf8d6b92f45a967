"""All pipeline schedules: one file of this folder an entry, found by its record."""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from functools import cache
from importlib import import_module

from .pipeline_schedule import PipelineSchedule


@cache
def schedules() -> Mapping[str, PipelineSchedule]:
    """Find all schedules by name, those with one run of layers to a rank first.

    Raises:
        ValueError: two records have one name.
    """
    found: dict[str, PipelineSchedule] = {}
    for info in pkgutil.iter_modules(import_module(__package__).__path__):
        if info.name == __name__.rpartition(".")[2]:
            continue
        for each in vars(import_module(f"{__package__}.{info.name}")).values():
            if isinstance(each, PipelineSchedule) and found.setdefault(each.name, each) is not each:
                raise ValueError(f"two pipeline schedules are called {each.name!r}: rename one")
    return {each.name: each for each in sorted(found.values(), key=lambda each: (each.chunked, each.name))}


def schedule_kind(name: object) -> PipelineSchedule:
    """Return the record of a schedule.

    Raises:
        ValueError: there is none of this name; the message lists them.
    """
    if name not in schedules():
        raise ValueError(f"schedule is one of {', '.join(schedules())}, not {name!r}")
    return schedules()[str(name)]
