"""The portfolio: one HTML page of what a student has built, figures beside floors, machine and date."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from pathlib import Path

from .grade.verdict import Verdict
from .progress import Climbed
from .record import ROADS
from .registry import all_rungs

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #212529 }
h2 { margin-top: 2rem } .rung { border-left: 4px solid #2b8a3e; padding: .2rem 1rem; margin: 1rem 0 }
.rung.slow { border-color: #f08c00 } pre { background: #f1f3f5; padding: 1rem; overflow-x: auto; font-size: 13px }
.figures { color: #495057; margin: 0; padding-left: 1.2rem } .bar { background: #e9ecef; height: 8px; max-width: 24rem }
.bar span { display: block; height: 8px; background: #2b8a3e } small { color: #868e96 }
"""


def page(done: Mapping[str, Climbed]) -> str:
    """Write the whole page; it loads nothing from anywhere."""
    total = len(all_rungs())
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><title>What I built</title>",
        f"<style>{STYLE}</style><h1>What I built</h1>",
        f"<p>{len([name for name in done if name in all_rungs()])} of {total} rungs of Transect's ladder, each graded "
        "on my own machine: right in every case, then measured beside the floor.</p>",
    ]
    for road in ROADS:
        here = [rung for rung in all_rungs().values() if rung.road == road and rung.name in done]
        if here:
            parts.append(f"<h2>{road.capitalize()}</h2>")
        for rung in here:
            parts.append(_entry(rung.title, rung.file, done[rung.name]))
    own = [name for name in done if name not in all_rungs()]
    parts += ["<h2>Rungs of a teacher</h2>"] if own else []
    parts += [_entry(name.removeprefix("my_").replace("_", " "), f"{name}.py", done[name]) for name in own]
    return "\n".join(parts) + "\n"


def _entry(title: str, file: str, entry: Climbed) -> str:
    verdict = Verdict(**entry.verdict)
    figures = "".join(f"<li>{escape(line)}</li>" for line in verdict.lines()[1:])
    percent = verdict.percent
    bar = "" if percent is None else f'<div class=bar><span style="width:{min(percent, 100):.1f}%"></span></div>'
    source = Path(entry.folder) / file
    try:
        code = f"<details><summary>{escape(file)}</summary><pre>{escape(source.read_text())}</pre></details>"
    except OSError:
        code = ""
    kind = "rung slow" if entry.slow else "rung"
    return (
        f'<div class="{kind}"><h3>{escape(title)}</h3>{bar}<ul class=figures>{figures}</ul>'
        f"<small>{escape(entry.at[:10])}, {escape(entry.machine)}</small>{code}</div>"
    )
