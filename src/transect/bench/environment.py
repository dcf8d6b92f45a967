"""The machine and the software that made a result, for the JSON beside the numbers."""

from __future__ import annotations

import sys
from typing import Any

from ..hardware import environment as machine


def environment() -> dict[str, Any]:
    """Return the command line (without API keys), and ``hardware.environment`` with the versions of Transect and
    torch."""
    return {
        "command": " ".join(["transect", *_without_keys(sys.argv[1:])]),
        **machine.environment(("transect", "torch")),
    }


def _without_keys(arguments: list[str]) -> list[str]:
    kept: list[str] = []
    for argument in arguments:
        if kept and kept[-1] == "--api-key":
            kept.append("...")
        else:
            kept.append("--api-key=..." if argument.startswith("--api-key=") else argument)
    return kept
