"""``transect inspect``: what an operator's kernels become on a GPU that need not be there."""

from __future__ import annotations

from typing import Annotated

import typer


def command(
    op: Annotated[str, typer.Argument(help="Operator, as `transect bench ops --list` names it.")],
    target: Annotated[list[str] | None, typer.Option(help="sm_80, sm_90 or gfx942; may be given again.")] = None,
    stage: Annotated[str | None, typer.Option(help="Print this stage: ttir, ttgir, llir, ptx, sass or amdgcn.")] = None,
    kernel: Annotated[str, typer.Option(help="Only kernels whose name contains this.")] = "",
) -> None:
    """Registers, spills, shared memory, occupancy and memory accesses of an operator's kernels; no GPU needed."""
    from ..ops.registry import all_ops, get
    from ..ops.tools.compile import missing_tools
    from ..ops.tools.inspection import cells, inspect, stage_text

    all_ops()
    entry = get(op)
    known = ("sm_80", "sm_90", "gfx942")
    for name in target or ():
        if name not in known:
            raise ValueError(f"no target {name!r}; there are: {', '.join(known)}")
    found = list(inspect(entry, target or (("sm_90",) if stage and stage != "amdgcn" else ()), kernel))
    if not found:
        raise ValueError(f"{op} declares no kernel" + (f" called {kernel!r}" if kernel else "") + " for this target")
    if stage:
        print(stage_text(found, stage))
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("by", "kernel", "target"):
        table.add_column(column, overflow="fold")
    for column in ("registers", "stack B", "shared KiB", "occupancy"):
        table.add_column(column, justify="right")
    for column in ("loads", "stores", "matrix instructions"):
        table.add_column(column)
    for row in found:
        table.add_row(*cells(row))
    console = Console()
    console.print(table, highlight=False)
    for tool in missing_tools():
        console.print(f"{tool} was not found: no {'registers' if tool == 'cuobjdump' else 'SASS'}", highlight=False)
