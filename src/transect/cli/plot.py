"""``transect plot``: the curves of training runs, beside each other."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def command(
    runs: Annotated[list[Path], typer.Argument(help="Directories of runs.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="A .png, .svg or .pdf.")] = Path("curves.png"),
    window: Annotated[int, typer.Option(help="Steps to average the loss over.", min=1)] = 1,
    by: Annotated[str, typer.Option(help="What to draw over: step, tokens or time.")] = "step",
) -> None:
    """Draw losses and speeds of runs."""
    from ..train.curves import draw

    for line in draw(runs, output, window=window, by=by):
        print(line)
    print(f"drawn in {output}")
