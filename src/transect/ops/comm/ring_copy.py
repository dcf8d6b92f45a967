"""Copy the current row of a ring to or from memory with a fixed address: a step's inputs and results, inside its graph.

    into a buffer: target = source[turn]        out of one: target[turn] = source        then turn = (turn + 1) mod rows

The ring is pinned host memory, which kernels reach over the bus; the turn is a number on the device. A CUDA graph
replays the same launches on the same addresses, and yet each replay finds another row. So the host can write the next
rows meanwhile. A copy by the copy engine would stand outside of the graph, and a GPU idles while its engines hand over
to each other, about 5 us each time.

Shapes: a ring ``[rows, n]`` or wider and a vector ``[n]``, one of them the source, the other the target; turn int32
``[1]``. Any dtype; rows and vector contiguous. The target and the turn change in place.

Bound by bytes: the n elements cross the bus once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...costs.work import Cost
from ..lang.jit import INTERPRETED, in_triton, kernel, tl
from ..lang.tiles import let_next_begin, wait_for_previous
from ..numerics import sample
from ..registry import Case, Kernel, Op, in_torch, register


def reference(source: Tensor, target: Tensor, turn: Tensor, advance: bool = False) -> None:
    """Copy one row; with ``advance`` the turn moves on to the next row. The turn is read on the host."""
    row = int(turn)
    if source.dim() == 2:
        target.copy_(source[row, : len(target)])
    else:
        target[row, : len(source)].copy_(source)
    if advance:
        turn.fill_((row + 1) % len(source if source.dim() == 2 else target))


@kernel
def _copy_row(
    source_ptr, target_ptr, turn_ptr, n, source_row, target_row, rows,
    BLOCK: tl.constexpr, ADVANCE: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr,
):  # fmt: skip
    """Copy BLOCK elements at a time. With ADVANCE there is one program of one warp, so the turn is read before it is
    changed."""
    wait_for_previous(DEPENDENT_LAUNCH)
    let_next_begin(DEPENDENT_LAUNCH)
    turn = tl.load(turn_ptr)
    source_ptr += turn.to(tl.int64) * source_row
    target_ptr += turn.to(tl.int64) * target_row
    for start in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(target_ptr + at, tl.load(source_ptr + at, mask=at < n), mask=at < n)
    if ADVANCE:
        tl.store(turn_ptr, (turn + 1) % rows)


def refusal(source: Tensor, target: Tensor, turn: Tensor, advance: bool = False) -> str | None:
    """Return the reason, as a sentence, why the kernel does not take these arguments; None if it does."""
    ring, vector = (source, target) if source.dim() == 2 else (target, source)
    if ring.dim() != 2 or vector.dim() != 1 or ring.dtype != vector.dtype or len(vector) > ring.shape[1]:
        return (
            "ring_copy: a ring [rows, n] and a vector of at most n elements of its dtype are needed; got "
            f"{list(ring.shape)} {ring.dtype} and {list(vector.shape)} {vector.dtype}"
        )
    if ring.stride(1) != 1 or vector.stride(0) != 1:
        return "ring_copy: elements of a row must lie side by side, and those of the vector"
    if turn.shape != (1,) or turn.dtype != torch.int32:
        return f"ring_copy: turn must be int32 [1], not {turn.dtype} {list(turn.shape)}"
    return None


def triton_ring_copy(
    source: Tensor, target: Tensor, turn: Tensor, advance: bool = False, *, dependent_launch: bool = False
) -> None:
    """Compute ``reference`` in one launch, which a CUDA graph can capture. The ring may be pinned host memory.

    ``dependent_launch``: begin while the kernel before still runs (Hopper), and let the next one begin when that one
    has ended.

    Raises:
        ValueError: ``refusal`` gives the reason.
    """
    reason = refusal(source, target, turn, advance)
    if reason:
        raise ValueError(reason)
    into = source.dim() == 2
    ring, vector = (source, target) if into else (target, source)
    count = len(vector)
    # A program's share is what its threads read at once; one warp changes the turn.
    block, warps = (1024, 1) if advance else (256 if not INTERPRETED else 4096, 4)
    _copy_row[(1 if advance else max(1, -(-count // block)),)](
        source, target, turn, count, ring.stride(0) if into else 0, 0 if into else ring.stride(0), len(ring),
        BLOCK=block, ADVANCE=advance, DEPENDENT_LAUNCH=dependent_launch, num_warps=warps,
        **({"launch_pdl": True} if dependent_launch else {}),
    )  # fmt: skip


def cost(source: Tensor, target: Tensor, turn: Tensor, advance: bool = False) -> Cost:
    """Count the vector's bytes, read and written."""
    vector = target if source.dim() == 2 else source
    return Cost(0, vector.nbytes, vector.nbytes)


def _examples() -> Sequence[dict[str, Any]]:
    def turn(row: int) -> Tensor:
        return torch.tensor([row], dtype=torch.int32)

    return [
        {"source": sample(3, 40), "target": sample(33, seed=1), "turn": turn(1)},
        {"source": sample(33), "target": sample(3, 33, seed=1), "turn": turn(2), "advance": True},
        {"source": sample(1, 5), "target": sample(5, seed=1), "turn": turn(0), "advance": True},
        {"source": sample(1300), "target": sample(2, 1400, seed=1), "turn": turn(0), "advance": True},
        {"source": sample(0), "target": sample(2, 8, seed=1), "turn": turn(1)},
    ]


def _cases() -> Sequence[Case]:
    def case(rows: int, kib: int) -> Case:
        def make(device: torch.device, seed: int) -> Mapping[str, Any]:
            generator = torch.Generator(device).manual_seed(seed)
            ring = torch.randint(0, 99, (3, kib * 128), device=device, generator=generator)
            turn = torch.ones(1, dtype=torch.int32, device=device)
            return {"source": ring, "target": torch.zeros_like(ring[0]), "turn": turn}

        return Case(f"inputs of {rows} sequences, {kib} KiB, all on the device", make)

    return [case(64, 24), case(256, 88)]


def _by_copy_engine(source: Tensor, target: Tensor, turn: Tensor, advance: bool = False) -> None:
    """Copy row 0, regardless of the turn."""
    if source.dim() == 2:
        target.copy_(source[0, : len(target)], non_blocking=True)
    else:
        target[0, : len(source)].copy_(source, non_blocking=True)


def _kernels() -> Sequence[Kernel]:
    arguments = {"source_ptr": "*i64", "target_ptr": "*i64", "turn_ptr": "*i32"}
    numbers = ("n", "source_row", "target_row")
    arguments |= dict.fromkeys((*numbers, "rows"), "i32")
    return [
        Kernel("in", _copy_row, arguments, {"BLOCK": 256, "ADVANCE": False, "DEPENDENT_LAUNCH": False}, numbers),
        Kernel(
            "out", _copy_row, arguments, {"BLOCK": 1024, "ADVANCE": True, "DEPENDENT_LAUNCH": False}, numbers, warps=1
        ),
    ]


register(
    Op(
        name="ring_copy",
        reference=reference,
        cost=cost,
        implementations={
            "torch": in_torch(reference, batch_invariant=True),
            "triton": in_triton(triton_ring_copy, batch_invariant=True, refusal=refusal),
        },
        examples=_examples,
        peers={"torch, by the copy engine": _by_copy_engine},
        mutates=("target", "turn"),
        directions=("forward",),
        cases=_cases,
        kernels=_kernels,
    )
)
