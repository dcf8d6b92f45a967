"""An explanation as one self-contained HTML file: timeline, parts, findings, operators and roofline.

The figures lie in the page as JSON, and a short script draws them: the timeline can be zoomed (wheel, or two fingers)
and moved (drag), and what the pointer is over says its name. Without a script the parts, findings and operators are
still there as tables.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from typing import Any

import numpy as np

from ..roofline import points_of_trace, roofline
from ..roofline_svg import svg
from .report import Explanation, as_dict, heaviest, notes, of_floor
from .split import PARTS
from .trace import COPY, KERNEL, OP, RANGE, RUNTIME, SET

MOST_EVENTS = 20_000
"""Largest number of events in the timeline; of more, the longest are kept."""
COLOURS = {
    "floor": "#2b8a3e", "inefficiency": "#f08c00", "unrated": "#868e96", "padding": "#e599f7", "launch": "#fab005",
    "host": "#1c7ed6", "sync": "#c92a2a", "loading": "#5f3dc4", "copies": "#0b7285", "communication": "#d6336c",
    "recompilation": "#a61e4d", "profiler": "#ced4da", "startup": "#adb5bd", "unexplained": "#212529",
}  # fmt: skip


def page(explanation: Explanation, title: str = "Where the time went") -> str:
    """Return the whole page."""
    split = explanation.split
    figures = as_dict(explanation)
    figures["timeline"] = timeline(explanation)
    # A browser looks for "</script" and "<!--" in a script element; JSON may write "<" in another way.
    data = json.dumps(figures).replace("<", "\\u003c")
    script = files(__package__).joinpath("report.js").read_text()
    style = files(__package__).joinpath("report.css").read_text()
    wall = 1e3 * split.wall
    bar = "".join(
        f'<span class="part" style="width:{100 * split.share(part):.3f}%;background:{COLOURS[part]}" '
        f'title="{escape(meaning)}: {100 * split.share(part):.1f}%"></span>'
        for part, meaning in PARTS.items()
        if split.parts.get(part, 0.0) > 0
    )
    parts = _table(
        ("", "share", "ms", ""),
        [
            (
                f'<i style="background:{COLOURS[part]}"></i>',
                f"{100 * split.share(part):.1f}%",
                f"{1e3 * split.parts.get(part, 0.0):.2f}",
                escape(meaning),
            )
            for part, meaning in PARTS.items()
            if split.parts.get(part, 0.0) > 0 or part == "unexplained"
        ],
        "parts",
    )
    findings = "".join(
        f'<li class="finding"><b>{escape(found.title)}</b>: {1e3 * found.gain:.1f} ms to gain ({found.share:.0%})'
        f"<p>{escape(found.evidence)}</p><p>Do: {escape(found.advice)}"
        + (f" [--apply does: {escape(found.apply)}]" if found.apply else "")
        + "</p></li>"
        for found in explanation.findings
    )
    operators = _table(
        ("operator", "calls", "ms", "of floor"),
        [
            (
                escape(f"{op.title} {op.key.shapes or ''}"[:140]),
                str(op.calls),
                f"{1e3 * op.seconds:.2f}",
                of_floor(op),
            )
            for op in heaviest(explanation)
        ],
        "operators",
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">
<title>{escape(title)}</title><style>{style}</style></head><body>
<h1>{escape(title)}</h1>
<p>Wall time {wall:.1f} ms on the {"GPU" if split.on_gpu else "CPU"}. {escape("; ".join(notes(explanation)))}</p>
<div id="bar">{bar}</div>
{parts}
<h2>What to change</h2>
<ol id="findings">{findings or "<li>nothing that would gain 2% or more</li>"}</ol>
<h2>Timeline</h2>
<p class="hint">Wheel: zoom. Drag: move. Double click: all of it.</p>
<canvas id="timeline" height="240"></canvas><div id="hover">&nbsp;</div>
<h2>Operators</h2>
{operators}
<h2>Roofline</h2>
<div id="roofline">{_picture(explanation)}</div>
<script id="figures" type="application/json">{data}</script>
<script>{script}</script>
</body></html>
"""


def timeline(explanation: Explanation) -> dict[str, Any]:
    """Return lanes of events as (begin, length, name number), in seconds from the start of the explained time."""
    split, trace = explanation.split, explanation.split.trace
    inside = np.isin(trace.kind, (OP, RANGE, RUNTIME, KERNEL, COPY, SET))
    inside &= (trace.ts + trace.dur > split.begin) & (trace.ts < split.begin + split.wall)
    chosen = np.flatnonzero(inside)
    left_out = max(0, len(chosen) - MOST_EVENTS)
    if left_out:
        longest = np.argsort(-trace.dur[chosen], kind="stable")[:MOST_EVENTS]
        chosen = np.sort(chosen[longest])
    names: dict[str, int] = {}
    lanes: dict[str, list[tuple[float, float, int]]] = {}
    for index in map(int, chosen):
        on_device = trace.kind[index] in (KERNEL, COPY, SET)
        lane = f"{'GPU' if on_device else 'thread'} {int(trace.lane[index])}"
        number = names.setdefault(trace.key_of(index).name, len(names))
        begin = float(trace.ts[index] - split.begin)
        lanes.setdefault(lane, []).append((round(begin, 7), round(float(trace.dur[index]), 7), number))
    gaps = [(round(g.begin - split.begin, 7), round(g.seconds, 7), g.part) for g in split.gaps if g.seconds > 20e-6]
    return {"names": list(names), "lanes": lanes, "gaps": gaps[:MOST_EVENTS], "left_out": left_out}


def _picture(explanation: Explanation) -> str:
    if explanation.ceilings is None:
        return "<p>No ceilings are known.</p>"
    points = points_of_trace(explanation.split, explanation.ceilings)
    if not points:
        return "<p>No operator has shapes.</p>"
    return svg(roofline(explanation.ceilings, points))


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], name: str) -> str:
    cells = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    heads = "".join(f"<th>{cell}</th>" for cell in head)
    return f'<div class="wide"><table id="{name}"><tr>{heads}</tr>{cells}</table></div>'
