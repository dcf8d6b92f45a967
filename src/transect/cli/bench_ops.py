"""``transect bench ops``: every operator's time beside its floor and its peers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .settings import output_file

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..costs.ceilings import Ceilings
    from ..hardware.device import Device
    from ..ops.registry import Op
    from ..ops.tools.bench import Timing


def command(
    names: Annotated[list[str] | None, typer.Argument(help="Operators; all of them by default.")] = None,
    ops: Annotated[str, typer.Option(help="The same, separated by commas.")] = "",
    case: Annotated[str, typer.Option(help="Only cases whose name contains this.")] = "",
    device: Annotated[str, typer.Option(help="auto (a GPU if there is one), cpu, cuda.")] = "auto",
    json: Annotated[Path | None, output_file(help="Add the rows to this file.")] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Skip cases that the file of --json has for this commit and device."),
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw into this directory (matplotlib).")] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Also compare results with float64, on a CPU in Triton's interpreter. Exit 1 if one is wrong.",
        ),
    ] = False,
    limit: Annotated[float, typer.Option(min=1, help="Time limit of a kernel per case, in seconds.")] = 30.0,
    workers: Annotated[int, typer.Option(min=0, help="Processes that compile kernels first, on a GPU.")] = 0,
    list_: Annotated[bool, typer.Option("--list", help="List operators and cases, without measuring.")] = False,
) -> int:
    """Measure operators at real shapes, and compare with the floor and with peers."""
    from ..hardware.device import detect
    from ..ops.registry import all_ops, get

    everything = all_ops()
    wanted = [get(name) for name in dict.fromkeys([*(names or ()), *filter(None, ops.split(","))])] or everything
    found = detect(device)
    if list_:
        _list(wanted, found)
        return 0
    from ..ops.cpu.ceilings import device_measurement
    from ..ops.tools import results

    limits = device_measurement(found).ceilings
    where = _run(limits, found)
    left_out: frozenset[tuple[str, str]] = frozenset()
    if resume:
        if json is None:
            raise ValueError("--resume continues a file of results: name the file with --json")
        left_out = results.measured(results.read(json), where) if json.is_file() else left_out
        print(f"{len(left_out)} cases in {json} are of this commit and stay")

    def keep(of_one_case: list[Timing]) -> None:
        if json is not None:
            results.merge(json, where, of_one_case)

    rows = _measure(wanted, limits, found, case, left_out, check, limit, workers, keep)
    if not rows and not left_out:
        raise ValueError(f"no case's name contains {case!r}; `transect bench ops --list` shows them")
    if json is not None and json.is_file():
        import torch

        from ..ops.tools.bench import cases_on

        places = torch.device("cpu"), torch.device("cuda")
        results.forget(json, {(op.name, c.name) for op in everything for place in places for c in cases_on(op, place)})
    if plot is not None:
        from ..ops.tools.plots import draw

        for path in draw(rows, limits, plot):
            print(path)
    named = len(wanted) < len(everything)
    return _verdict(rows, [op.name for op in wanted] if named and not left_out else []) if check else 0


def _verdict(rows: list[Timing], named: list[str]) -> int:
    """Print what ``--check`` found wrong, and return the exit code.

    Args:
        named: operators of which something must have been compared.
    """
    from ..ops.tools.results import error_text

    wrong = [row for row in rows if row.wrong]
    for row in wrong:
        why = f"error {row.error:.1e}, allowed {row.allowed_error:.1e}" if row.error is not None else row.reason
        print(f"transect: wrong: {row.op}, {row.case}, {row.contender} {row.direction}: {why}", file=sys.stderr)
    compared = {row.op for row in rows if row.wrong or error_text(row)}
    for name in [name for name in named if name not in compared]:
        reasons = dict.fromkeys(f"{row.contender}: {row.reason}" for row in rows if row.op == name and row.reason)
        why = "; ".join(reasons) or "no implementation runs on this device"
        print(f"transect: {name} was not compared with float64 ({why})", file=sys.stderr)
        wrong += [row for row in rows if row.op == name][:1]
    return int(bool(wrong))


def _list(wanted: list[Op], found: Device) -> None:
    import torch

    from ..ops.tools.bench import cases_on

    for op in wanted:
        cases = cases_on(op, torch.device("cpu" if found.kind == "cpu" else "cuda"))
        print(op.name + ("" if cases else ": no cases" + f" (see {', '.join(op.measured_as)})" * bool(op.measured_as)))
        for made in cases:
            print(f"  {made.name}")


def _run(limits: Ceilings, found: Device) -> dict[str, Any]:
    """Describe the machine and the software that measured the rows."""
    from dataclasses import asdict
    from datetime import UTC, datetime

    from ..hardware.environment import environment

    return {
        "command": " ".join(["transect", *sys.argv[1:]]),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "environment": environment(("torch", "triton", "numpy")),
        "device": asdict(found),
        "ceilings": asdict(limits),
    }


def _measure(
    wanted: list[Op],
    limits: Ceilings,
    found: Device,
    case: str,
    left_out: frozenset[tuple[str, str]],
    check: bool,
    limit: float,
    workers: int,
    keep: Callable[[list[Timing]], None],
) -> list[Timing]:
    """Run the cases; show each and ``keep`` it when it is done."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from ..ops.tools.bench_run import run
    from ..ops.tools.results import COLUMNS, cells

    console = Console()
    place = "cpu" if found.kind == "cpu" else f"cuda:{found.index}"
    rows: list[Timing] = []

    def show(group: list[Timing]) -> None:
        title = f"{group[0].op}: {group[0].case}"
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
        for column in COLUMNS:
            table.add_column(column, justify="left" if column in (COLUMNS[0], COLUMNS[1], "") else "right")
        for row in group:
            table.add_row(*cells(row))
        console.print(table, highlight=False)

    group: list[Timing] = []
    measured = run(
        wanted,
        limits,
        place,
        check=check,
        matching=case,
        left_out=left_out,
        limit=limit,
        warm_up_workers=0 if found.kind == "cpu" else workers,
        say=lambda line: console.print(line, style="red", highlight=False, soft_wrap=True),
    )
    for row in measured:
        rows.append(row)
        if group and (group[0].op, group[0].case) != (row.op, row.case):
            show(group)
            keep(group)
            group = []
        group.append(row)
    if group:
        show(group)
        keep(group)
    return rows
