"""States of flows as reports of the page."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def is_flow(folder: Path) -> bool:
    """Return True if a flow has run in this folder."""
    from ...flow.folder import FlowFolder

    return folder.is_dir() and FlowFolder(folder).chain() is not None


def flow_reports(folders: Iterable[Path]) -> list[dict[str, Any]]:
    """Return the states of flows, each with ``name`` and ``content``. A folder in which no flow has run yet is left
    out."""
    from ...flow.picture import chain_state

    found = []
    for folder in folders:
        with contextlib.suppress(ValueError):
            state = chain_state(folder)
            for step in state["steps"]:
                step.pop("inputs", None)  # settings of a run can be large, and are in its file
            found.append({"name": f"flow {state['name']}", "content": finite(state)})
    return found


def finite(value: Any) -> Any:
    """Replace infinities and NaN, which JSON lacks, by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: finite(each) for name, each in value.items()}
    return [finite(each) for each in value] if isinstance(value, (list, tuple)) else value
