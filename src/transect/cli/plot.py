"""``transect plot``: the curves of training runs, beside each other."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def command(
    runs: Annotated[list[Path], typer.Argument(help="Directories of runs.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="A .png, .svg or .pdf.")] = Path("curves.png"),
    window: Annotated[int, typer.Option(help="Steps to average the loss over.", min=1)] = 1,
    by: Annotated[str, typer.Option(help="Horizontal axis: step, tokens or time.")] = "step",
    bits: Annotated[bool, typer.Option("--bits", help="Bits per byte in place of nats per token.")] = False,
    level: Annotated[list[str] | None, typer.Option(help="NAME=VALUE: a reference line; repeatable.")] = None,
) -> None:
    """Draw losses and speeds of runs."""
    from ..train.loop.curves import draw

    for line in draw(runs, output, window=window, by=by, bits=bits, levels=dict(map(_level, level or ()))):
        print(line)
    print(f"drawn in {output}")


def _level(text: str) -> tuple[str, float]:
    name, _, value = text.rpartition("=")
    try:
        return name, float(value)
    except ValueError:
        raise ValueError(f"--level is NAME=VALUE with a number, such as nanoGPT=2.12, not {text!r}") from None
