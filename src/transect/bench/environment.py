"""What made a result: the machine and the software, for the JSON beside the numbers."""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata
from typing import Any

from ..hardware.cpu import processor_name


def environment() -> dict[str, Any]:
    """Command line (without API keys), processor, cores, Python, and versions of Transect and torch."""
    return {
        "command": " ".join(["transect", *_without_keys(sys.argv[1:])]),
        "processor": processor_name(),
        "cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": {name: metadata.version(name) for name in ("transect", "torch")},
    }


def _without_keys(arguments: list[str]) -> list[str]:
    kept: list[str] = []
    for argument in arguments:
        if kept and kept[-1] == "--api-key":
            kept.append("...")
        else:
            kept.append("--api-key=..." if argument.startswith("--api-key=") else argument)
    return kept
