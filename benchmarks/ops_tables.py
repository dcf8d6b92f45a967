"""Tables and pictures of ``transect bench ops`` results, for the pages that show them.

python benchmarks/ops_tables.py    draws docs/images/ops/ from benchmarks/results/h200/ops.json
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import record
from transect.hardware.ceilings import Ceilings
from transect.ops.tools import plots, results
from transect.ops.tools.bench import Timing

RESULT = record.RESULTS / "h200" / "ops.json"
IMAGES = record.ROOT / "docs" / "images" / "ops"


def _names(rows: Sequence[Timing]) -> list[tuple[str, bool]]:
    """Everybody with a time, ours first."""
    names = dict.fromkeys((row.contender, row.is_peer) for row in rows if row.seconds)
    return sorted(names, key=lambda name: name[1])


def table(rows: Sequence[Timing]) -> str:
    """One operator: a line for each case and direction, a column for everybody who ran, the worst error of ours."""
    names = _names(rows)
    head = ["case", "direction", "floor µs", *(f"{n} (peer)" if peer else n for n, peer in names), "error / torch's"]
    lines = ["| " + " | ".join(head) + " |", "|---|---|" + "---:|" * (len(head) - 2)]
    for case, direction in dict.fromkeys((row.case, row.direction) for row in rows):
        own = {(r.contender, r.is_peer): r for r in rows if (r.case, r.direction) == (case, direction)}
        floors = [r.floor_seconds for r in own.values() if r.floor_seconds is not None]
        cells = [case, direction, results.time_text(floors[0]) if floors else ""]
        for name in names:
            row = own.get(name)
            if row is None or not row.seconds:
                cells.append("")
            else:
                share = "" if row.of_floor is None else f" ({row.of_floor:.0%})"
                cells.append(results.time_text(row.seconds) + share + " †" * (row.method == "eager"))
        ratios = [r.error / r.torch_error for r in own.values() if r.error is not None and r.torch_error]
        cells.append(f"{max(ratios):.2f}" if ratios else "")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def failures(rows: Sequence[Timing]) -> str:
    """What has no time, and why."""
    missing = dict.fromkeys((row.contender or "inputs", row.case, row.reason) for row in rows if not row.seconds)
    return "\n".join(f"* {who}, {case}: {reason}" for who, case, reason in missing)


def origin(run: dict[str, Any]) -> str:
    """Where a run's rows are from."""
    where = run["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in where["packages"].items())
    device = run["device"]
    return f"{device['name']}, driver {device['driver']}, {versions}, commit {where['commit']}, {run['time'][:10]}"


def page() -> str:
    """Every operator with results: table, picture, where they are from.

    Raises:
        FileNotFoundError: nothing is recorded.
    """
    kept = results.read(RESULT)
    parts = []
    for op in dict.fromkeys(row["op"] for row in kept["rows"]):
        own = [row for row in kept["rows"] if row["op"] == op]
        rows = [results.timing_of(row) for row in own]
        parts += [f"## {op}", table(rows)]
        if failures(rows):
            parts.append("Without a time:\n\n" + failures(rows))
        if (IMAGES / f"{op}.png").exists():
            parts.append(f"![{op}: share of the floor](images/ops/{op}.png)")
        if any(row.method == "eager" for row in rows):
            parts.append("† not in a CUDA graph, which could not capture it: launches count.")
        origins = dict.fromkeys(origin(kept["runs"][row["run"]]) for row in own)
        parts.append("Measured on " + "; ".join(origins) + f"; median of {rows[0].runs or 15} replays.")
    if (IMAGES / "roofline.png").exists():
        parts += ["## Roofline", "![roofline](images/ops/roofline.png)"]
    return "\n\n".join(parts) + "\n"


def draw(folder: Path = IMAGES) -> None:
    """All pictures, from the recorded results."""
    kept = results.read(RESULT)
    rows = [results.timing_of(row) for row in kept["rows"]]
    newest = kept["runs"][max(kept["runs"], key=int)]
    plots.draw(rows, Ceilings(**newest["ceilings"]), folder)


if __name__ == "__main__":
    draw()
