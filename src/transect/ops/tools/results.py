"""Benchmark results as a file that grows operator by operator, and as a table.

The file holds ``runs`` (where and with what rows were measured: machine, versions, commit, ceilings, command) and
``rows`` (one ``Timing`` each, with the number of its run). Measuring an operator again replaces its rows. Runs without
rows are dropped. So several runs may fill a file, and each row still tells its commit. A source that changes afterwards
makes a row older, never wrong.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from .bench import Timing

Row = dict[str, Any]
_FIELDS = {field.name for field in fields(Timing)}


def timing_of(row: Mapping[str, Any]) -> Timing:
    """Return the ``Timing`` of a row of a file."""
    return Timing(**{key: value for key, value in row.items() if key in _FIELDS})


def read(path: Path) -> dict[str, Any]:
    """Return a result file.

    Raises:
        ValueError: it is not one.
    """
    try:
        found = json.loads(path.read_text())
        assert isinstance(found["runs"], dict) and isinstance(found["rows"], list)
    except (json.JSONDecodeError, KeyError, TypeError, AssertionError) as error:
        raise ValueError(f"{path} is not a result file of `transect bench ops`; name another, or remove it") from error
    return found


def merge(path: Path, run: Mapping[str, Any], rows: Sequence[Timing]) -> None:
    """Put the rows of one run into a file: they replace all rows of the same operator and case."""
    known = read(path) if path.is_file() else {"runs": {}, "rows": []}
    measured = {(row.op, row.case) for row in rows}
    number = next((n for n, made in known["runs"].items() if made == dict(run)), "")
    number = number or str(1 + max((int(n) for n in known["runs"]), default=0))
    kept = [row for row in known["rows"] if (row["op"], row["case"]) not in measured]
    fresh = [{**asdict(row), "of_floor": row.of_floor, "run": number} for row in rows]
    everything = sorted([*kept, *fresh], key=lambda row: row["op"])  # stable: cases stay in their order
    used = {row["run"] for row in everything}
    runs = {n: made for n, made in {**known["runs"], number: dict(run)}.items() if n in used}
    _write(path, runs, everything)


def measured(kept: Mapping[str, Any], run: Mapping[str, Any]) -> frozenset[tuple[str, str]]:
    """Return the (operator, case) pairs that a file holds from the same commit, device and versions as ``run``.

    Args:
        kept: a result file, as ``read`` gives it.
        run: machine, versions and commit of a new run, as they will be recorded.
    """

    def place(made: Mapping[str, Any]) -> tuple[Any, ...]:
        return made["device"]["name"], made["environment"]["packages"], made["environment"]["commit"]

    same = {number for number, made in kept["runs"].items() if place(made) == place(run)}
    older = {(row["op"], row["case"]) for row in kept["rows"] if row["run"] not in same}
    return frozenset((row["op"], row["case"]) for row in kept["rows"]) - older


def forget(path: Path, known: Collection[tuple[str, str]]) -> int:
    """Drop the rows of (operator, case) pairs that are not ``known`` any more; returns how many."""
    kept = read(path)
    rows = [row for row in kept["rows"] if (row["op"], row["case"]) in known]
    dropped = len(kept["rows"]) - len(rows)
    if dropped:
        used = {row["run"] for row in rows}
        _write(path, {number: made for number, made in kept["runs"].items() if number in used}, rows)
    return dropped


def _write(path: Path, runs: Mapping[str, Any], rows: Iterable[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(_dumps(runs, rows))
    temporary.replace(path)


def _dumps(runs: Mapping[str, Any], rows: Iterable[Row]) -> str:
    """Format JSON with one row a line."""
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    head = json.dumps(runs, indent=1).replace("\n", "\n ")
    return f'{{\n "runs": {head},\n "rows": [\n{lines}\n ]\n}}\n'


def rate(row: Timing) -> str:
    """Work per second: bytes where they bound it, else FLOPs."""
    if not row.seconds:
        return ""
    if row.flops > 100 * row.bytes:
        return f"{row.flops / row.seconds / 1e12:.0f} TFLOP/s"
    return f"{row.bytes / row.seconds / 1e9:.0f} GB/s"


def microseconds_text(seconds: float) -> str:
    """Format microseconds with their significant digits."""
    us = seconds * 1e6
    return f"{us:.2f}" if us < 10 else f"{us:.1f}" if us < 100 else f"{us:.0f}"


def cells(row: Timing) -> tuple[str, ...]:
    """Return a row of the table: contender, direction, time, spread, floor, % of floor, rate, error over torch's,
    remarks."""
    who = f"{row.contender}{' *' if row.is_peer else ''}"
    floor = "" if row.floor_seconds is None else microseconds_text(row.floor_seconds)
    if row.seconds is None or row.fastest is None or row.slowest is None:
        return (who, row.direction, "", "", floor, "", "", error_text(row), row.reason)
    return (
        who,
        row.direction,
        microseconds_text(row.seconds),
        f"{microseconds_text(row.fastest)} - {microseconds_text(row.slowest)}",
        floor,
        "" if row.of_floor is None else f"{row.of_floor:.0%}",
        rate(row),
        error_text(row),
        row.note if row.method != "eager" else f"no graph; {row.note}".strip("; "),
    )


def error_text(row: Timing) -> str:
    """Return the error against float64 as a multiple of torch's error, marked if it exceeds the allowed one."""
    if row.error is None or row.torch_error is None:
        return ""
    text = f"{row.error / row.torch_error:.2f}x" if row.torch_error else f"{row.error:.1e}"
    return text + (" TOO LARGE" if row.allowed_error is not None and row.error > row.allowed_error else "")


COLUMNS = ("by (* peer)", "direction", "us", "spread", "floor us", "of floor", "rate", "error / torch's", "")
