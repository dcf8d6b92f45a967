"""The chain of a flow as a picture for a terminal, and as plain values."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from .folder import FlowFolder

KIND = "flow"
"""Mark of a state among other reports."""
MARKS = {
    "waiting": ("○", "dim"),
    "running": ("●", "yellow"),
    "interrupted": ("◐", "yellow"),
    "done": ("✔", "green"),
    "stopped": ("✘", "red"),
    "failed": ("!", "red"),
    "left out": ("·", "dim"),
}
"""Sign and colour of each state."""


def chain_state(path: Path) -> dict[str, Any]:
    """Read the state of a flow: name, ``running``, and its steps with states, figures and reasons.

    A step that was running when its process was killed is ``interrupted``.

    Raises:
        ValueError: no flow has run in this folder.
    """
    folder = FlowFolder(path)
    found = folder.chain()
    if found is None:
        raise ValueError(f"{path} holds no flow: give the dir of a flow that has run, or its file")
    found |= {"kind": KIND, "running": folder.is_running()}
    for step in found["steps"]:
        if step["state"] == "running" and not found["running"]:
            step["state"] = "interrupted"
    return found


def draw(state: Mapping[str, Any]) -> RenderableType:
    """Draw a state of ``chain_state``: a line for each step, its reason, and its figures below."""
    lines = [Text(f"{state['name']}  {state['file']}{'  (running)' if state['running'] else ''}", style="bold")]
    steps = state["steps"]
    for number, step in enumerate(steps):
        sign, style = MARKS[step["state"]]
        line = Text(f"{sign} ", style=style).append(f"{step['name']:<10}", style="bold")
        line.append(f"{step['state']}{' (kept)' if step['kept'] else ''}", style=style)
        if step["seconds"]:
            line.append(f"  {duration(step['seconds'])}", style="dim")
        elif step["began"] and step["state"] == "running":
            line.append(f"  since {duration(time.time() - step['began'])}", style="dim")
        lines.append(line)
        bar = "│ " if number + 1 < len(steps) else "  "
        outcome = step["outcome"]
        for text in filter(None, (outcome.get("reason"), step["problem"])):
            lines.append(Text(f"{bar}  {text}", overflow="fold"))
        figures = outcome.get("figures", {})
        for name, verdict in figures.items():
            if isinstance(verdict, Mapping) and "passed" in verdict and verdict["reason"] not in outcome["reason"]:
                sign, style = MARKS["done" if verdict["passed"] else "stopped"]
                lines.append(Text(f"{bar}  {sign} {name}: {verdict['reason']}", style=style, overflow="fold"))
        if step["state"] != "failed" and (text := shown(figures)):
            lines.append(Text(f"{bar}  {text}", style="dim", overflow="fold"))
    return Group(*lines)


def shown(figures: Mapping[str, Any]) -> str:
    """Return the plain figures in one line; nested ones are left to ``--json``."""
    plain = {
        name: value for name, value in figures.items() if not isinstance(value, (Mapping, list)) and value is not None
    }
    return ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in plain.items()
    )


def duration(seconds: float) -> str:
    """Return a duration as ``8 s``, ``3.5 min`` or ``2.1 h``."""
    if seconds < 100:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
