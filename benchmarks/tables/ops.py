"""Tables and pictures of ``transect bench ops`` results, for the pages that show them.

python benchmarks/tables/ops.py    draws docs/images/ops/ from benchmarks/results/h200/ops.json
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import _paths  # noqa: F401
from benchmarks import record
from transect.costs.ceilings import Ceilings
from transect.ops.registry import all_ops
from transect.ops.tools import plots, results
from transect.ops.tools.bench import Timing

RESULT = record.RESULTS / "h200" / "ops.json"
MANY_ROWS = record.RESULTS / "h200" / "ops_many_rows.json"
MANY_ROWS_ALONE = MANY_ROWS.with_name("ops_many_rows_alone.json")
IMAGES = record.ROOT / "docs" / "images" / "ops"


def _names(rows: Sequence[Timing]) -> list[tuple[str, bool]]:
    """List every contender with a time, ours first."""
    names = dict.fromkeys((row.contender, row.is_peer) for row in rows if row.seconds)
    return sorted(names, key=lambda name: name[1])


def table(rows: Sequence[Timing]) -> str:
    """Format one operator: a line for each case and direction, a column for every contender that ran, the worst error
    of ours."""
    names = _names(rows)
    head = ["case", "direction", "floor µs", *(f"{n} (peer)" if peer else n for n, peer in names), "error / torch's"]
    lines = ["| " + " | ".join(head) + " |", "|---|---|" + "---:|" * (len(head) - 2)]
    for case, direction in dict.fromkeys((row.case, row.direction) for row in rows):
        own = {(r.contender, r.is_peer): r for r in rows if (r.case, r.direction) == (case, direction)}
        floors = [r.floor_seconds for r in own.values() if r.floor_seconds is not None]
        cells = [case, direction, results.microseconds_text(floors[0]) if floors else ""]
        for name in names:
            row = own.get(name)
            if row is None or not row.seconds:
                cells.append("")
            else:
                share = "" if row.of_floor is None else f" ({row.of_floor:.0%})"
                cells.append(results.microseconds_text(row.seconds) + share + " †" * (row.method == "eager"))
        ratios = [r.error / r.torch_error for r in own.values() if r.error is not None and r.torch_error]
        cells.append(f"{max(ratios):.2f}" if ratios else "")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def failures(rows: Sequence[Timing]) -> str:
    """Format the contenders without a time, with the reasons."""
    missing = dict.fromkeys((row.contender or "inputs", row.case, row.reason) for row in rows if not row.seconds)
    return "\n".join(f"* {who}, {case}: {reason}" for who, case, reason in missing)


def origin(runs: Iterable[dict[str, Any]]) -> str:
    """Format the origin of these runs: each machine and its software once, with all of its commits."""
    machines: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for run in runs:
        packages = run["environment"]["packages"]
        versions = ", ".join(f"{name} {version}" for name, version in packages.items())
        machines[f"{run['device']['name']}, driver {run['device']['driver']}, {versions}"].append(run)
    return "; ".join(
        f"{machine}, {record.made_at(run['environment'] for run in runs)}" for machine, runs in machines.items()
    )


def runs_of(kept: dict[str, Any], rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """List the runs that these rows of a file belong to."""
    return [kept["runs"][number] for number in dict.fromkeys(row["run"] for row in rows)]


def page() -> str:
    """Format every operator with results: table, picture, origin.

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
            parts.append(f"![{op}: share of the floor](../images/ops/{op}.png)")
        if any(row.method == "eager" for row in rows):
            parts.append("† not in a CUDA graph, which could not capture it: launches count.")
        parts.append(f"Measured on {origin(runs_of(kept, own))}; median of {rows[0].runs or 15} replays.")
    if (IMAGES / "roofline.png").exists():
        parts += ["## Roofline", "![roofline](../images/ops/roofline.png)"]
    return "\n\n".join(parts) + "\n"


def memory_bound_short() -> str:
    """Format a line for each operator of ``memory_bound``: the forward case that moves most bytes.

    Raises:
        FileNotFoundError: nothing is recorded.
    """
    return memory_bound(one_each=True)


def memory_bound(one_each: bool = False) -> str:
    """Format the operators bound by memory, at 200 MB and more: the fastest of ours beside its floor and torch.

    Args:
        one_each: show only the forward case that moves most bytes, for each operator.

    Raises:
        FileNotFoundError: nothing is recorded.
    """
    kept = results.read(RESULT)
    large = [row for row in kept["rows"] if row["seconds"] and row["bytes"] > 2e8 and row["flops"] < 20 * row["bytes"]]
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in large:
        groups[row["op"], row["case"], row["direction"]].append(row)
    lines = [
        "| operator | shape | direction | by | µs | TB/s | of floor | torch µs |",
        "|---|---|---|---|---|---|---|---|",
    ]
    by_bytes = sorted(groups, key=lambda group: groups[group][0]["bytes"])
    largest = {(op, direction): case for op, case, direction in by_bytes if direction == "forward"}
    shown = []
    for (op, case, direction), rows in groups.items():
        if one_each and largest.get((op, direction)) != case:
            continue
        ours = [row for row in rows if not row["is_peer"] and row["contender"] not in ("torch", "reference")]
        if not ours:
            continue
        row = min(ours, key=lambda row: row["seconds"])
        torch = next((row["seconds"] for row in rows if row["contender"] == "torch"), None)
        lines.append(
            f"| {op} | {case} | {direction} | {row['contender']} | {row['seconds'] * 1e6:.0f} | "
            f"{row['bytes'] / row['seconds'] / 1e12:.2f} | {row['of_floor']:.0%} | "
            f"{'' if torch is None else f'{torch * 1e6:.0f}'} |"
        )
        shown.append(row)
    return "\n".join(lines) + f"\n\nMeasured by `transect bench ops` on {origin(runs_of(kept, shown))}.\n"


def many_rows(path: Path = MANY_ROWS, counts: Sequence[int] = ()) -> str:
    """Format products of ``counts`` rows (of all that were measured): the fastest kernel of ours beside cuBLAS, a line
    for each weight.

    Raises:
        FileNotFoundError: nothing is recorded.
    """
    kept = json.loads(path.read_text())
    names: dict[tuple[int, int], str] = {}
    products = next(op for op in all_ops() if op.name == "small_matmul")
    for case in products.cases():
        what, _, size = case.name.rpartition(": ")
        _, k, n = size.replace(" by ", " x ").split(" x ")
        names[int(k), int(n)] = what
    times: dict[tuple[int, int, bool], dict[int, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in kept["rows"]:
        who = row["name"].split()[0].rstrip(",")
        found = times[row["k"], row["n"], row["gated"]][row["rows"]]
        found[who] = min(row["us"], found.get(who, row["us"]))
    counts = counts or sorted({row["rows"] for row in kept["rows"]})
    lines = ["| weight | " + " | ".join(f"{m} rows" for m in counts) + " |", "|---|" + "---|" * len(counts)]
    for (k, n, gated), by_rows in times.items():
        cells = []
        for m in counts:
            cublas = by_rows[m]["cublas"]
            us, who = min((us, who) for who, us in by_rows[m].items() if who != "cublas")
            cells.append(f"{us:.1f} ({who}), {cublas:.1f}: {cublas / us:.2f}")
        gate = ", and the gate" if gated else ""
        lines.append(f"| {names[k, n]}: {k} by {n}{gate} | " + " | ".join(cells) + " |")
    versions = ", ".join(f"{name} {version}" for name, version in kept["packages"].items())
    return "\n".join(lines) + (
        f"\n\n`{kept['command']}` on {kept['machine']}, {versions}, {record.made_at([kept])}; {kept['method']}.\n"
    )


def many_rows_alone() -> str:
    """Format the same for products called by themselves, 64 to 256 rows; errors as in ``many_rows``."""
    return many_rows(MANY_ROWS_ALONE, (64, 128, 256))


def draw(folder: Path = IMAGES) -> None:
    """Draw all pictures, from the recorded results."""
    kept = results.read(RESULT)
    rows = [results.timing_of(row) for row in kept["rows"]]
    newest = kept["runs"][max(kept["runs"], key=int)]
    plots.draw(rows, Ceilings(**newest["ceilings"]), folder)


if __name__ == "__main__":
    draw()
