"""The path as a student sees it: rows of the list, advice after a check, the map of what unlocks what,
and the chapters of the docs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from .progress import climbed
from .record import ROADS, Rung
from .registry import all_rungs, unlocks


def rows() -> list[dict[str, Any]]:
    """List each rung with its state: ``done``, ``open`` (all rungs before it are done) or ``later``."""
    done = climbed()
    found = []
    for rung in all_rungs().values():
        state = "done" if rung.name in done else "open" if all(name in done for name in rung.after) else "later"
        found.append(
            {
                "name": rung.name,
                "road": rung.road,
                "title": rung.title,
                "kind": rung.kind,
                "minutes": rung.minutes,
                "after": list(rung.after),
                "unlocks": unlocks(rung.name),
                "state": state,
                "solved_at": done[rung.name].at if rung.name in done else None,
            }
        )
    return found


def advice(rung: Rung, folder: Path, right: bool) -> list[str]:
    """Say what a student can do after a check: open a hint, or compare, use the piece, and start the next rung."""
    if not right:
        return [f"stuck? {folder / 'README.md'} has the rule; hints, one at a time: {folder / 'hints' / '1.txt'}"]
    found = [f"compare: transect learn show {rung.called} --dir {folder}"]
    if rung.live is not None and (rung.live.runs != "ops" or os.path.exists("/dev/nvidiactl")):
        found.append(f"run it inside the product: transect learn use {rung.name} --dir {folder}")
    state = {row["name"]: row["state"] for row in rows()}
    following = unlocks(rung.name)
    if now := [name for name in following if state[name] == "open"]:
        found.append(f"unlocked: {', '.join(now)}; next: transect learn start {now[0]} --dir {now[0]}")
    if later := [name for name in following if state[name] == "later"]:
        found.append(f"a step towards: {', '.join(later)}")
    return found


def map_page() -> str:
    """Write the table of all rungs for docs/learn/ladder.md, as Markdown."""
    lines = []
    for road in ROADS:
        lines += [
            f"### {road.capitalize()}",
            "",
            "| rung | exercise | minutes | after | unlocks |",
            "|---|---|---|---|---|",
        ]
        for rung in (each for each in all_rungs().values() if each.road == road):
            after, then = ", ".join(rung.after) or "-", ", ".join(unlocks(rung.name)) or "-"
            chapter = f"[`{rung.name}`](rungs/{road}.md#{rung.name})"
            lines.append(f"| {chapter} | {rung.title} | {rung.minutes} | {after} | {then} |")
        lines.append("")
    hours = sum(rung.minutes for rung in all_rungs().values()) / 60
    lines.append(f"{len(all_rungs())} rungs, about {hours:.0f} hours.")
    return "\n".join(lines)


def chapters(road: str) -> str:
    """Write a chapter for each rung of a road for docs/learn/rungs/, as Markdown."""
    lines = []
    for rung in (each for each in all_rungs().values() if each.road == road):
        after, then = (", ".join(map(_chapter, names)) for names in (rung.after, unlocks(rung.name)))
        lines += [f"## {rung.title} {{#{rung.name}}}", "", rung.page, ""]
        lines += [f"**Write it**, in about {rung.minutes} minutes:", ""]
        lines += ["```sh", f"transect learn start {rung.name} --dir {rung.name}", "```", ""]
        lines += [f"Tried on: {'; '.join(case.name for case in rung.cases)}.", ""]
        lines += [f"**Beyond it.** {rung.differences}", ""] if rung.differences else []
        shipped = f"Shipped code: `{rung.shipped}`. " if rung.shipped else ""
        lines += [f"{shipped}After: {after or 'nothing'}. Unlocks: {then or 'nothing more'}.", ""]
    return "\n".join(lines)


def _chapter(name: str) -> str:
    road = all_rungs()[name].road
    return f"[{name}]({road}.md#{name})"
