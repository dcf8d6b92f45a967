"""All rungs: one file of ``rungs/`` an entry, found by its record."""

from __future__ import annotations

import difflib
import pkgutil
import runpy
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path

from . import rungs
from .record import ROADS, Rung


@cache
def all_rungs() -> Mapping[str, Rung]:
    """Find every rung by name, in the order of the ladder.

    Raises:
        ValueError: two rungs have one name, or a rung comes after one that does not exist.
    """
    found: dict[str, Rung] = {}
    for info in pkgutil.walk_packages(rungs.__path__, f"{rungs.__name__}."):
        module = import_module(info.name)
        for each in list(vars(module).values()):
            if isinstance(each, Rung):
                if each.name in found:
                    raise ValueError(f"two rungs are called {each.name!r}: rename one")
                found[each.name] = replace(each, page=(module.__doc__ or "").strip())
    ordered = sorted(found.values(), key=lambda rung: (ROADS.index(rung.road), rung.place))
    for rung in ordered:
        if missing := [name for name in rung.after if name not in found]:
            raise ValueError(f"rung {rung.name!r} comes after {missing[0]!r}, which does not exist")
    return {rung.name: rung for rung in ordered}


def get(name: str) -> Rung:
    """Find the rung called ``name``, or load it from a teacher's own file ``NAME.py``.

    Raises:
        ValueError: there is none; the message has the nearest name.
    """
    if name.endswith(".py"):
        return _own(Path(name).resolve())
    rungs = all_rungs()
    if name not in rungs:
        near = difflib.get_close_matches(name, rungs, n=1, cutoff=0.6)
        hint = f"did you mean {near[0]!r}?" if near else "`transect learn list` shows all"
        raise ValueError(f"no rung {name!r}; {hint}")
    return rungs[name]


def _own(path: Path) -> Rung:
    """Load a rung from a file outside this package.

    Raises:
        ValueError: there is no such file, or it has no rung.
    """
    if not path.is_file():
        raise ValueError(f"{path} is not there: `transect learn new` writes such files")
    space = runpy.run_path(str(path))
    found = next((each for each in space.values() if isinstance(each, Rung)), None)
    if found is None:
        raise ValueError(f"{path} has no RUNG: `transect learn new` writes files that have one")
    return replace(found, page=(space.get("__doc__") or "").strip(), own_file=str(path))


def unlocks(name: str) -> list[str]:
    """List the rungs that come directly after this one."""
    return [rung.name for rung in all_rungs().values() if name in rung.after]
