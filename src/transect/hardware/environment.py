"""Environment of a measurement: machine, versions, commit. Every recorded result has it."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from ..version import __version__
from .cpu import processor_name

ROOT = Path(__file__).resolve().parents[3]
"""Repository that this package is run from."""


def environment(packages: Sequence[str] = ("torch", "numpy")) -> dict[str, Any]:
    """Return the machine, the version and commit of this project, and the versions of installed ``packages``."""
    versions = {}
    for name in packages:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "processor": processor_name(),
        "cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": versions,
        "version": __version__,
        "commit": commit(),
    }


def commit(root: Path = ROOT) -> str:
    """Return the commit of the sources in ``root``, with ``+changes`` if tracked files differ from it.

    A copied tree without a git history may name its commit in a file ``COMMIT`` beside ``src``. Where neither is there,
    the answer is ``unknown``.
    """
    note = root / "COMMIT"
    if note.is_file():
        return note.read_text().strip() or "unknown"
    git = ["git", "-C", str(root)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True).stdout.strip()
        status = [*git, "status", "--porcelain", "--", "src", "benchmarks/*.py"]
        dirty = subprocess.run(status, capture_output=True, text=True).stdout
    except OSError:
        return "unknown"
    return (head or "unknown") + ("+changes" if head and dirty.strip() else "")
