"""Every kernel of the registry against float64 on its small and odd examples, as a ratio to the error of torch's own.

python benchmarks/checks/numerics.py OUT.json [--workers 8]    exit 1 where one is further off than its operator allows
python benchmarks/checks/numerics.py OUT.json --merge NEW.json    rows of a later run take the place of those kept

The inputs, the comparison and what is allowed are those of ``tests/ops/test_numerics.py``: outputs and gradients for
random upstream gradients, three layouts in memory, each dtype that an implementation has. A row keeps the worst.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import _paths  # noqa: F401
from benchmarks import record
from transect.ops.registry import Unavailable, all_ops, get
from transect.ops.tools import accuracy

RESULT = record.RESULTS / "h200" / "numerics.json"
SANITIZER = record.RESULTS / "h200" / "sanitizer.json"


def implementations(device: str) -> list[tuple[str, str, str]]:
    """List (operator, implementation, dtype) of every kernel for a kind of device."""
    backends = ("triton", "cuda") if device == "cuda" else ("cpu",)
    return [
        (op.name, name, dtype)
        for op in all_ops()
        for name, made in op.implementations.items()
        if made.backend in backends
        for dtype in made.dtypes
    ]


def measure(which: tuple[str, str, str], device: str) -> dict[str, Any]:
    """Measure the worst error of one implementation in one dtype. ``ratio``: its error over that of torch's operator,
    or of rounding the exact answer; ``Op.error_ratio`` is allowed."""
    all_ops()
    name, label, dtype = which
    op = get(name)
    row: dict[str, Any] = {"op": name, "implementation": label, "dtype": dtype, "allowed_ratio": op.error_ratio}
    try:
        findings = list(accuracy.check(op, op.implementations[label], getattr(torch, dtype), device))
    except Unavailable as error:
        return row | {"compared": 0, "reason": str(error)}
    row["compared"] = len(findings)
    if not findings:
        return row | {"reason": "it takes none of the examples"}

    def ratio(finding: accuracy.Comparison) -> float:
        if not finding.same_special:
            return float("inf")
        return op.error_ratio * finding.error / finding.allowed if finding.allowed else finding.error

    worst = max(findings, key=ratio)
    return row | {
        "ratio": ratio(worst),
        "error": worst.error,
        "torch_error": worst.torch_error,
        "of": f"{worst.quantity}, example {worst.example}, {worst.layout}",
        "passed": all(finding.passed for finding in findings),
    }


def merge(kept: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the new rows with the kept rows of kernels that the new run did not measure; each names its commit."""
    rows: dict[tuple[str, str, str], dict[str, Any]] = {}
    for made in (kept, new):
        for row in made["rows"]:
            where = made["environment"]
            named = {"commit": where["commit"], "version": where.get("version"), **row}
            rows[row["op"], row["implementation"], row["dtype"]] = named
    known = [which for which in implementations("cuda") if which in rows]
    return {**new, "rows": [rows[which] for which in known]}


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format a line for each implementation, a column for each dtype, and the reason if more than twice torch's error
    is allowed."""
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    lines = [f"| operator | implementation | {' | '.join(dtypes)} | why above 2 |", "|---|---|" + "---:|" * len(dtypes)]
    lines[1] += "---|"
    for name, label in dict.fromkeys((row["op"], row["implementation"]) for row in rows):
        own = {row["dtype"]: row for row in rows if (row["op"], row["implementation"]) == (name, label)}
        cells = [f"{own[d]['ratio']:.2f}" if "ratio" in own.get(d, {}) else "" for d in dtypes]
        above = any(row.get("ratio", 0.0) > 2 for row in own.values())
        lines.append(f"| {name} | {label} | {' | '.join(cells)} | {get(name).error_note if above else ''} |")
    return "\n".join(lines)


def page() -> str:
    """Format the recorded table, and the sanitizer's findings.

    Raises:
        FileNotFoundError: nothing is recorded.
    """
    all_ops()
    made, sanitizer = (json.loads(path.read_text()) for path in (RESULT, SANITIZER))
    rows = [row for row in made["rows"] if row["compared"]]
    compared = sum(row["compared"] for row in rows)
    where = made["environment"]
    at = record.made_at(row if "commit" in row else where for row in rows)
    versions = ", ".join(f"{name} {version}" for name, version in where["packages"].items())
    found = "; ".join(f"{tool}: {of['summary'].lower()}" for tool, of in sanitizer["tools"].items())
    runs = sum(int(line.rpartition(": ")[2].split()[0]) for line in sanitizer["tools"]["memcheck"]["runs"])
    return (
        f"{table(rows)}\n\n`{made['command']}` on one {made['device']}, {versions}, {at}: "
        f"{compared} results and gradients compared, the worst of each in the table.\n\n"
        f"`{sanitizer['command']}`, {runs} runs of the CUDA C++ kernels under compute-sanitizer at "
        f"{record.made_at([sanitizer['environment']])}: {found}.{controls(sanitizer)}\n"
    )


def controls(sanitizer: dict[str, Any]) -> str:
    """Format racecheck's findings for rings that are correct by construction, beside those in which it found
    something."""
    raced = ", ".join(f"`{name}`" for name in sanitizer["tools"]["racecheck"]["races"])
    if not raced or not sanitizer.get("controls"):
        return ""
    rows = "\n".join(
        f"| {kind} | {said['summary'].removeprefix('RACECHECK SUMMARY: ')} |"
        for kind, said in sanitizer["controls"].items()
    )
    return (
        f" racecheck reports hazards in {raced}, whose ring slots are reused: a warp's reads against the copy "
        "that refills the slot, although all its lanes have passed `__syncwarp` before one of them releases the slot. "
        "Its reports for minimal rings, with CUDA's own library and with our helpers, correct and with a planted "
        "race:\n\n"
        f"| a ring of two slots (`benchmarks/checks/sanitizer_control.cu`) | racecheck |\n|---|---|\n{rows}\n"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--ops", default="", help="only these, separated by commas")
    parser.add_argument("--merge", type=Path, help="a file of a later run to put into OUT; nothing is measured")
    options = parser.parse_args()
    if options.merge is not None:
        all_ops()
        record.write(options.out, merge(*(json.loads(path.read_text()) for path in (options.out, options.merge))))
        return 0
    device = "cuda" if torch.cuda.is_available() else "cpu"
    only = set(filter(None, options.ops.split(",")))
    todo = [which for which in implementations(device) if not only or which[0] in only]
    result: dict[str, Any] = {
        "command": "python benchmarks/checks/numerics.py",
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "environment": record.environment(("torch", "triton")),
        "device": torch.cuda.get_device_name() if device == "cuda" else "the processor",
        "rows": [],
    }
    rows = result["rows"]
    with ProcessPoolExecutor(options.workers, multiprocessing.get_context("spawn")) as pool:
        for row in pool.map(measure, todo, [device] * len(todo)):
            rows.append(row)
            record.write(options.out, result)
    print(table(rows))
    failed = [row for row in rows if not row.get("passed", True)]
    for row in failed:
        print(f"too far off: {row}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
