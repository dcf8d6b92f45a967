"""Counts of a release's versions since a watch began, kept in a file; a server that restarts loses none of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..folder import read_json, write_json
from .remote import Counts


class VersionTally:
    """Adds up what counters of a server grow by. A counter that shrinks was reset: its server started again.

    Args:
        path: file of the counts; those in it are continued.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        kept = read_json(path) or {}
        self.counts: dict[str, Counts] = kept.get("counts", {})
        self.looks: list[dict[str, Any]] = kept.get("looks", [])
        """Looks at the counts so far, in order."""
        self.seconds: float = kept.get("seconds", 0.0)
        """Duration of the watch, without interruptions."""
        self._last: dict[str, Counts] | None = kept.get("last")

    def add(self, now: Mapping[str, Counts], seconds: float) -> bool:
        """Take the counters of this moment, and return True if one has grown. The first call sets the beginning.

        Args:
            seconds: time since the last call.
        """
        grown = False
        for version, counters in now.items() if self._last is not None else ():
            total = self.counts.setdefault(version, {})
            before = self._last.get(version, {}) if self._last is not None else {}
            for name, value in counters.items():
                growth = value - before.get(name, 0.0)
                growth = value if growth < 0 else growth
                total[name] = total.get(name, 0.0) + growth
                grown = grown or growth > 0
        self._last = {version: dict(counters) for version, counters in now.items()}
        self.seconds += seconds
        return grown

    def write(self) -> None:
        """Write the file. Raises ValueError if the disk refuses."""
        values = {"counts": self.counts, "looks": self.looks, "seconds": self.seconds, "last": self._last}
        write_json(values, self._path)
