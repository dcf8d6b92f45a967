"""Rungs that a student has climbed: a JSON file in the user's cache folder, written after a right check."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..hardware.cache import cache_folder
from ..hardware.cpu import processor_name
from .grade.verdict import Verdict


@dataclass(frozen=True, slots=True)
class Climbed:
    """One rung that was solved."""

    rung: str
    at: str
    """Date and time (ISO 8601, UTC)."""
    machine: str
    folder: str
    slow: bool
    verdict: dict[str, Any]


def progress_file() -> Path:
    """Return ``learn/progress.json`` in ``$TRANSECT_CACHE`` or the user's cache folder."""
    return cache_folder() / "learn" / "progress.json"


def climbed() -> dict[str, Climbed]:
    """Read the rungs that were solved, by name."""
    try:
        return {name: Climbed(**entry) for name, entry in json.loads(progress_file().read_text()).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def note(verdict: Verdict, folder: Path) -> None:
    """Keep the verdict of a rung that is right."""
    assert verdict.right
    now = datetime.now(UTC).isoformat(timespec="seconds")
    machine = processor_name() if verdict.device == "cpu" else verdict.device
    entry = Climbed(verdict.rung, now, machine, str(folder.resolve()), verdict.slow, asdict(verdict))
    kept = {**climbed(), verdict.rung: entry}
    path = progress_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps({name: asdict(each) for name, each in kept.items()}, indent=1) + "\n")
    temporary.replace(path)
