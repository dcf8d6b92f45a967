"""``transect inspect``: compiled forms of an operator's kernels, for a GPU that need not be present."""

from __future__ import annotations

from typing import Annotated

import typer


def command(
    op: Annotated[str, typer.Argument(help="Operator, as `transect bench ops --list` names it.")],
    target: Annotated[
        list[str] | None, typer.Option(help="sm_80, sm_86, sm_89, sm_90, sm_100, sm_120 or gfx942; repeatable.")
    ] = None,
    stage: Annotated[str | None, typer.Option(help="Print this stage: ttir, ttgir, llir, ptx, sass or amdgcn.")] = None,
    kernel: Annotated[str, typer.Option(help="Only kernels whose name contains this.")] = "",
) -> None:
    """Show registers, spills, shared memory, occupancy and memory accesses of an operator's kernels, without a GPU."""
    from ..hardware.targets import compiled_as, target_named
    from ..ops.registry import all_ops, get
    from ..ops.tools.compile import missing_tools
    from ..ops.tools.inspection import cells, inspect, stage_text

    all_ops()
    entry = get(op)
    targets = tuple(compiled_as(target_named(name).name) for name in target or ())
    if not targets and stage and stage != "amdgcn":
        targets = ("sm_90",)
    found = list(inspect(entry, targets, kernel, stage or ""))
    if not found:
        raise ValueError(f"{op} declares no kernel" + (f" called {kernel!r}" if kernel else "") + " for this target")
    if stage:
        print(stage_text(found, stage))
        return
    rows = [cells(row) for row in found]
    head = ("by", "kernel", "target", "registers", "stack B", "shared KiB", "occupancy")
    widths = [max(len(line[i]) for line in (head, *rows)) for i in range(len(head))]
    for line in (head, *rows):
        left = "  ".join(cell.ljust(width) for cell, width in zip(line[:3], widths, strict=False))
        print(left, *(cell.rjust(width) for cell, width in zip(line[3:7], widths[3:], strict=True)), sep="  ")
        accesses = [f"{name} {cell}" for name, cell in zip(("loads", "stores", ""), line[7:], strict=False) if cell]
        if accesses:
            print("   ", "; ".join(accesses).replace(";  ", "; "))
    for tool in missing_tools():
        print(f"{tool} was not found: no {'registers' if tool == 'cuobjdump' else 'SASS'}")
