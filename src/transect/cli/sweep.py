"""``transect sweep``: train one run for each point of a grid of settings, and compare them."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..train.loop.sweep import Outcome


def command(
    grid: Annotated[Path, typer.Argument(help="A TOML file with base and [grid]; see docs/train/training.md.")],
) -> int:
    """Train a run for each point of a grid and print a table, best first. Run it again to resume.
    Exit 1 if a run failed."""
    from ..parallel.gathering import under_torchrun
    from ..train.loop.sweep import read_grid, sweep

    if under_torchrun():
        raise ValueError("a sweep starts the ranks of each run by itself: start it once, without torchrun")
    points = read_grid(grid)
    asked: list[int] = []

    def stop(signum: int, _frame: Any) -> None:
        asked.append(signum)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        tell = lambda line: print(f"transect: {line}", file=sys.stderr)  # noqa: E731 (one line)
        outcomes = list(sweep(points, tell, lambda: bool(asked)))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    _print(outcomes)
    if asked:
        print(f"stopped after {len(outcomes)} of {len(points)} runs; continue with transect sweep {grid}")
        return 128 + asked[0]
    return int(any(found.problem for found in outcomes))


def _print(outcomes: Sequence[Outcome]) -> None:
    from rich.console import Console
    from rich.table import Table

    if not outcomes:
        return
    ordered = sorted(outcomes, key=lambda found: found.rank)
    keys = list(ordered[0].point.settings)
    table = Table(*keys, "validation loss", "last loss", "steps", "seconds", "run")
    for found in ordered:
        numbers = ["" if value is None else f"{value:.4f}" for value in (found.validation, found.loss)]
        table.add_row(
            *(str(found.point.settings[key]) for key in keys), *numbers, str(found.steps), f"{found.seconds:.1f}",
            found.problem or found.point.config.run_dir,
        )  # fmt: skip
    console = Console()
    console.print(table, markup=False)
