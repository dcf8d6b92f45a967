"""Inspect the compiled kernels of an operator on each target: one row for each, or the text of one stage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..registry import Op, Unavailable
from .compile import STAGES, Compiled, compile_cuda, compile_kernel

CUDA_STAGES = ("ptx", "sass")
"""The stages of CUDA C++; Triton's kernels have all of ``STAGES``."""


@dataclass(frozen=True, slots=True)
class Inspected:
    """One kernel of one implementation for one target, or the reason why there is none."""

    op: str
    implementation: str
    kernel: str
    target: str
    made: Compiled | None
    reason: str = ""


def inspect(op: Op, targets: Sequence[str] = (), kernel: str = "", stage: str = "") -> Iterator[Inspected]:
    """Compile every kernel that ``op`` declares, for ``targets`` (all that each has, when empty).

    ``kernel`` keeps those whose name contains it. CUDA C++ is left out where only a ``stage`` of Triton's is wanted. A
    kernel that cannot be compiled here gives its reason.
    """
    for declared in op.kernels():
        if kernel not in declared.name:
            continue
        for target in [t for t in declared.targets if not targets or t in targets]:
            made, reason = None, ""
            try:
                made = compile_kernel(declared, target)
            except Unavailable as error:
                reason = str(error)
            yield Inspected(op.name, declared.implementation, declared.name, target, made, reason)
    if stage and stage not in CUDA_STAGES:
        return
    for source in dict.fromkeys(made.source for made in op.implementations.values() if made.source):
        names = [name for name, made in op.implementations.items() if made.source == source]
        for target in [t for t in op.implementations[names[0]].targets if not targets or t in targets]:
            label = source if len(names) > 1 else names[0]
            try:
                compiled = compile_cuda(source, target)
            except Unavailable as error:
                yield Inspected(op.name, label, source, target, None, str(error))
                continue
            for made in compiled:
                if kernel in made.name:
                    yield Inspected(op.name, label, made.name, target, made)


def stage_text(found: Sequence[Inspected], stage: str) -> str:
    """Return the text of ``stage`` for every kernel, each under a line that names it.

    Raises:
        ValueError: no kernel has this stage.
    """
    if stage not in STAGES:
        raise ValueError(f"no stage {stage!r}; there are: {', '.join(STAGES)}")
    parts = [
        f"// {row.op}, {row.kernel}, {row.target}\n{row.made.stages[stage]}"
        for row in found
        if row.made is not None and row.made.stages.get(stage)
    ]
    if not parts:
        have = sorted({name for row in found if row.made for name in row.made.stages if name in STAGES})
        reasons = sorted({row.reason for row in found if row.reason})
        raise ValueError(
            f"nothing here has the stage {stage!r}"
            + (f"; there are: {', '.join(have)}" if have else "")
            + (f" ({'; '.join(reasons)})" if reasons else "")
        )
    return "\n".join(parts)


def widths(counts: dict[int, int]) -> str:
    """Format ``{16: 8, 2: 1}`` as ``16 B x8, 2 B x1``; width 0 is a bulk copy."""
    return ", ".join(f"{f'{width} B' if width else 'bulk'} x{n}" for width, n in sorted(counts.items(), reverse=True))


def cells(row: Inspected) -> tuple[str, ...]:
    """Return a row of the table: names, target, registers, stack, shared memory, occupancy, accesses, matrix
    instructions."""
    made = row.made
    if made is None:
        return (row.implementation, row.kernel, row.target, row.reason, "", "", "", "", "", "")
    share = made.occupancy
    return (
        row.implementation,
        row.kernel,
        row.target,
        "?" if made.registers is None else str(made.registers),
        "?" if made.spilled_bytes is None else str(made.spilled_bytes),
        f"{made.shared_bytes / 1024:.1f}",
        "?" if share is None else f"{share:.0%}",
        widths(made.access_bytes["load"]),
        widths(made.access_bytes["store"]),
        ", ".join(f"{name} x{n}" for name, n in made.matrix_instructions.items()),
    )
