"""``transect trace``: follow a Triton kernel through the interpreter, at a size small enough to look at."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from .settings import output_file


def command(
    op: Annotated[str, typer.Argument(help="Operator, as `transect bench ops --list` names it.")],
    program: Annotated[
        int | None, typer.Option(min=0, help="The program to show in detail; default: the first of the busiest.")
    ] = None,
    row: Annotated[int, typer.Option(min=0, help="The row of the tile to show.")] = 0,
    plot: Annotated[Path | None, output_file(help="Also draw into this file (png; matplotlib).")] = None,
) -> None:
    """Trace an operator's kernel: tiles per program, one program's steps, and its running values."""
    if "triton" not in sys.modules:
        os.environ["TRITON_INTERPRET"] = "1"  # read once, when triton is imported
    import numpy
    from rich.console import Console

    from ..ops.registry import all_ops, get
    from ..ops.tools import trace_view as view
    from ..ops.tools.trace import follow

    all_ops()
    with numpy.errstate(invalid="ignore"):  # -inf minus -inf, in elements that are masked off
        chosen, launches = follow(get(op))
    most = max(len(launch.programs) for launch in launches) - 1
    if program is not None and program > most:
        raise ValueError(f"programs of this run are 0 to {most}; --program {program} is not one of them")
    console = Console()
    for launch in launches:
        console.print(f"{launch.kernel}, grid {list(launch.grid)}: {len(launch.programs)} programs", style="bold")
        for picture in view.written(launch):
            console.print(picture)
        wanted = view.busiest(launch) if program is None else program
        for who in [p for p in launch.programs if view.flat_program(launch, p) == wanted]:
            for picture in view.read_by(launch, who):
                console.print(picture)
            console.print(view.accesses(launch, who))
            table = view.steps(launch, who, row)
            if table is not None:
                console.print(table)
        if view.outside(launch):
            console.print(f"{len(view.outside(launch))} accesses are outside of every argument", style="red")
    if chosen.note:
        console.print(chosen.note, highlight=False)
    if plot is not None:
        view.plot(launches, program, plot)
        print(plot)
