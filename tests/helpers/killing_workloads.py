"""Workloads in which planted bugs show: searched for once, small, and kept in
``tests/engine/scheduling/killing_workloads.json``.

``python tests/helpers/killing_workloads.py`` searches for all of them anew.
"""

from __future__ import annotations

import json
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any

from engine_workloads import Abort, Arrival, Break, Run, Workload, preempted_failures, workloads
from hypothesis import HealthCheck, Phase, find, settings
from hypothesis import strategies as st
from planted_bugs import MUTANTS, name_of

from transect.engine.scheduling.sampling_params import SamplingParams
from transect.engine.scheduling.scheduler_config import SchedulerConfig

FILE = Path(__file__).parent.parent / "engine" / "scheduling" / "killing_workloads.json"
ALL_KINDS = st.one_of(
    workloads(lag=1),
    workloads(lag=0),
    workloads(lag=1, storm=True),
    workloads(lag=0, storm=True),
    workloads(lag=1, breaking=True),
    workloads(lag=2, depth=3),
    preempted_failures(),
)


def violation(workload: Workload, **classes: type) -> str | None:
    """The promise that is broken when the workload runs on these classes, or None."""
    try:
        Run(workload, **classes).finish()
    except AssertionError as broken:
        return str(broken) or "an assertion of the engine itself"
    return None


def search(mutant: dict[str, type], *, smallest: bool = False) -> Workload:
    """A workload in which the bug shows, of 2000 random ones, always the same; ``smallest``: made as small as can be.

    Raises:
        hypothesis.errors.NoSuchExample: there is none.
    """
    phases = (Phase.generate, Phase.shrink) if smallest else (Phase.generate,)
    options: dict[str, Any] = {"database": None, "derandomize": True, "phases": phases, "deadline": None}
    wanted = settings(max_examples=2000, suppress_health_check=list(HealthCheck), **options)
    return find(ALL_KINDS, lambda workload: violation(workload, **mutant) is not None, settings=wanted)


def recorded() -> dict[str, Workload]:
    """The workload kept for each bug, by the bug's name."""
    return {name: _from_plain(plain) for name, plain in json.loads(FILE.read_text()).items()}


def _plain(value: Any) -> Any:
    """A dataclass as a dict of what is not the default."""
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if not is_dataclass(value):
        return value
    return {
        field.name: _plain(getattr(value, field.name))
        for field in fields(value)
        if field.default is MISSING or getattr(value, field.name) not in (field.default, ())
    }


def _from_plain(plain: dict[str, Any]) -> Workload:
    arrivals = (
        each
        | {"prompt": tuple(each["prompt"]), "params": SamplingParams(**each["params"])}
        | {name: tuple(each[name]) for name in ("fail", "grammar") if name in each}
        for each in plain["arrivals"]
    )
    parts = {
        "config": SchedulerConfig(**plain["config"]),
        "arrivals": tuple(Arrival(**each) for each in arrivals),
        "aborts": tuple(Abort(**each) for each in plain.get("aborts", ())),
        "breaks": tuple(Break(**each) for each in plain.get("breaks", ())),
    }
    return Workload(**plain | parts)


if __name__ == "__main__":
    found = {}
    for mutant in MUTANTS:
        workload = found[name_of(mutant)] = search(mutant, smallest=True)
        print(f"{name_of(mutant)}: {violation(workload, **mutant)}")
    lines = (f"  {json.dumps(name)}: {json.dumps(_plain(workload))}" for name, workload in found.items())
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    assert recorded() == found
