"""Measures which kernel runs a weight's products of up to 256 rows quickest on this GPU: ``transect tune MODEL``.

Every launch follows another of its kind, on weights that the L2 cache no longer holds, and asks for its weights before
that one has ended, as in a decode step. A contender is left out if it is further from float32 sums than rounding to
bfloat16 goes, or if two runs differ. The first trial is one of milliseconds, at the full clock. Steps of many rows run
at the board's limit of power, where another kernel may win. So where a race under load is asked for
(``ops/tools/under_load.py``), what runs today, the quickest of each kind and the quickest of all are timed again there,
and those times count. What runs today is kept unless another takes at least ``WORTH`` less time: less is within the
spread.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...tuning import file_name, user_folder
from . import choices, cuda, hopper
from .choices import FOLDER, Choice
from .cuda import CudaTiling
from .hopper import HopperTiling
from .triton import TritonTiling

WORTH = 1.02
REPLAYS = 9
FINALISTS = 2
"""Number of the fastest that are timed again, beside the fastest of each kind and the present choice."""
NEAR = 1.15
"""Ratio to the fastest time in the first trial above which a contender is not timed again."""
SHARED = 220 * 1024
"""Bytes of shared memory that a ring may take."""
TURN = 300_000_000
"""Bytes of weights that calls go through in turn."""
FAR = 0.02
"""Largest relative difference of a result from float32 sums."""
SMALL, MOST_COMPILED = 1 << 23, 12
"""Largest weight for which Triton's tilings are tried, in numbers, and the most of its tilings to compile."""
Multiply = Callable[[Choice, Tensor, Tensor, bool], Tensor]
"""(choice, x, weight, whether it has a gate) -> the result."""
Calls = Sequence[Callable[[], Any]]


class Product(NamedTuple):
    """A weight's product."""

    name: str
    n: int
    """Rows of the weight; with a gate both halves'."""
    k: int
    gated: bool = False


@dataclass(frozen=True, slots=True)
class Final:
    """A contender that was timed under load."""

    choice: Choice
    trial_seconds: float
    """In the first trial, at the full clock."""
    seconds: float


@dataclass(frozen=True, slots=True)
class ProductTimes:
    """Result for one product and number of rows; seconds are those under load, if several contenders were timed
    under load."""

    product: Product
    rows: int
    before: Choice
    before_seconds: float
    choice: Choice
    seconds: float
    tried: int
    """Contenders that ran."""
    finals: Sequence[Final] = ()
    """Times under load, the present choice first; empty if no contender was near it, or there was no race."""


def cuda_tilings(m: int, n: int, k: int, gated: bool, units: int = 132) -> list[Choice]:
    """List the tilings of ``small_matmul.cu`` that give every multiprocessor, or every half of one, a share."""
    found = []
    for columns, stages in cuda.KERNELS:
        for warps in (4, 8):
            for ranks in (1,) if gated else (1, 2, 4, 8):
                for blocks in (units, 2 * units):
                    per = max(1, -(-n // 16 * ranks // blocks))
                    tiling = CudaTiling(columns, stages, per, warps, ranks)
                    chunks = -(-k // 64 // (warps * ranks)) * -(-per // columns)  # that a warp takes
                    if columns <= per and stages <= chunks + 1 and cuda.shared_bytes(tiling, m) <= 200 * 1024:
                        found.append(Choice("cuda", tiling))
    return list(dict.fromkeys(found))


def hopper_tilings(m: int, n: int, k: int, gated: bool, units: int = 132) -> list[Choice]:
    """List the tilings of ``hopper.candidates``, and the same with smaller rings that leave shared memory to another
    kernel."""
    found = []
    columns = n // 2 if gated else n
    for tiling in hopper.candidates(m, columns, k, gated=gated, units=units):
        share = -(-k // hopper.CHUNK // max(1, abs(tiling.ranks)))
        half = min((hopper.SHARED // 2 - 2048) // (tiling.ring // tiling.stages), 16)
        for stages in {tiling.stages, min(tiling.stages, share), min(tiling.stages, half, share)}:
            tried = dataclasses.replace(tiling, stages=max(2, stages))
            if not tried.refusal(m, columns, k):
                found.append(Choice("hopper", tried))
    return list(dict.fromkeys(found))


def triton_tilings(m: int, n: int, k: int, gated: bool, units: int = 132) -> list[Choice]:
    """List the tilings of ``triton.py`` with about as many tiles as multiprocessors, or twice as many; for wide weights
    up to six times."""
    found = []
    outputs = n // 2 if gated else n
    for bm, bn, bk, split in itertools.product((64, 128, 256), (16, 32, 64, 128), (64, 128), (1, 2, 4)):
        width = 2 * bn if gated else bn  # columns of the product
        programs = -(-m // bm) * -(-outputs // bn) * split
        most = 2.05 * units if n < 16384 else 6 * units
        if bm >= 2 * m or not 0.45 * units <= programs <= most or (gated and split > 1):
            continue
        warps = 4 if bm * width <= 64 * 128 else 8
        steps, step = -(-k // bk // split), (bm + width) * bk * 2
        for swap in (False, True) if width >= 64 else (False,):
            if (width if swap else bm) < 16 * warps or bm * width > 256 * 128:
                continue
            for room in (SHARED // 2, SHARED):
                stages = min(room // step, steps, 6)
                if stages >= 2:
                    tiling = TritonTiling(bm, bn, bk, split, warps, stages, swap, True, True, gated)
                    found.append(Choice("triton", tiling))
    return list(dict.fromkeys(found))


def contenders(m: int, product: Product, before: Choice, units: int = 132) -> list[Choice]:
    """List the choices for a product of m rows, the present one first.

    Triton's tilings, each of which must be compiled, are tried only for small weights, where they are fastest.
    """
    _, n, k, gated = product
    found = [before, Choice("cublas")]
    if m <= cuda.CUDA_ROWS:
        found += cuda_tilings(m, n, k, gated, units)
    if m > 16:
        found += hopper_tilings(m, n, k, gated, units)
    if m > cuda.CUDA_ROWS and n * k < SMALL:
        found += triton_tilings(m, n, k, gated, units)[:MOST_COMPILED]
    return list(dict.fromkeys(found))


def in_use(m: int, product: Product, device: torch.device) -> Choice:
    """Return the present choice for a product; kernels' own rules by name.

    With a gate: one launch, or the choice for the product before a separate launch of the gate.
    """
    _, n, k, gated = product
    found = choices.chosen(m, n, k, device, gated=gated)
    if found is None or (gated and found.by == "cublas"):
        found = choices.chosen(m, n, k, device)
    if found is not None:
        return found
    if m > cuda.CUDA_ROWS:
        return Choice("cublas")
    return Choice("cuda") if cuda.quicker(m, n, k) else Choice("triton")


def gates(choice: Choice) -> bool:
    """Return True if a tiling applies the gate itself."""
    tiling = choice.tiling
    return isinstance(tiling, CudaTiling) or (isinstance(tiling, HopperTiling | TritonTiling) and bool(tiling.gated))


def multiplier() -> Multiply:
    """Return a function that runs a choice on the GPU, as a decode step does.

    Raises:
        Unavailable: no GPU with these kernels, or no nvcc.
    """
    from ..gate_up import gate_halves
    from .cuda import CudaRows
    from .triton import TritonRows

    rows, wide, triton = CudaRows(), hopper.HopperRows(), TritonRows()

    def multiply(choice: Choice, x: Tensor, weight: Tensor, gated: bool) -> Tensor:
        inside = gated and gates(choice)
        if choice.by == "hopper":
            y = wide(x, weight, dependent_launch=True, tiling=choice.tiling)
        elif choice.by == "cuda":
            y = rows(x, weight, dependent_launch=True, tiling=choice.tiling, gated=inside)
        elif choice.by == "triton":
            y = triton(x, weight, tiling=choice.tiling)
        else:
            y = F.linear(x, weight)
        return gate_halves(y, dependent_launch=True) if gated and not inside else y

    return multiply


def search(
    product: Product,
    rows: Iterable[int],
    multiply: Multiply,
    timer: Callable[[Calls, int], list[float]],
    race: Callable[[Sequence[Calls]], list[float]] | None,
    device: torch.device,
    units: int = 132,
) -> Iterator[ProductTimes]:
    """Find the fastest choice for each number of rows.

    Args:
        timer: measures seconds of a call in each of several replays of consecutive calls, as
            ``ops.tools.timing.time_graph``.
        race: measures seconds of a call of each of several contenders under load, as ``ops.tools.under_load.race``;
            None if the trials decide.
    """
    _, n, k, gated = product
    copies = max(2, min(16, -(-TURN // (2 * n * k)))) if device.type == "cuda" else 1
    made: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    generator = torch.Generator(device).manual_seed(0)
    weights = [torch.randn(n, k, generator=generator, **made) * k**-0.5 for _ in range(copies)]
    for m in rows:
        x = torch.randn(m, k, generator=generator, **made)
        wanted = (x.float() @ weights[0].float().T) if n * k < 1 << 28 else F.linear(x, weights[0]).float()
        if gated:
            gate, up = wanted.chunk(2, 1)
            wanted = F.silu(gate) * up
        before = in_use(m, product, device)
        times: dict[Choice, float] = {}
        for choice in contenders(m, product, before, units):
            try:
                y = multiply(choice, x, weights[0], gated)
                steady = torch.equal(y, multiply(choice, x, weights[0], gated))
                if not steady or (y.float() - wanted).norm() > FAR * wanted.norm():
                    continue

                times[choice] = statistics.median(timer(_calls(multiply, choice, x, weights, gated), REPLAYS))
            except (RuntimeError, ValueError):
                continue
        if before not in times:
            continue
        timed, finals = times, list[Final]()
        if race is not None and len(chosen := finalists(before, times)) > 1:
            timed = dict(zip(chosen, race([_calls(multiply, each, x, weights, gated) for each in chosen]), strict=True))
            finals = [Final(choice, times[choice], seconds) for choice, seconds in timed.items()]
        best = min(timed, key=lambda choice: timed[choice])
        best = best if timed[before] >= WORTH * timed[best] else before
        yield ProductTimes(product, m, before, timed[before], best, timed[best], len(times), finals)


def finalists(before: Choice, times: Mapping[Choice, float]) -> list[Choice]:
    """Choose the contenders to time under load, by their seconds in a first trial.

    These are the present choice, the fastest of each kind and the ``FINALISTS`` fastest of all, if they are ``NEAR``
    the fastest.
    """
    ordered = sorted(times, key=lambda choice: times[choice])
    leaders = {choice.by: choice for choice in reversed(ordered)}  # the quickest of its kind is the last to be entered
    quick = [choice for choice in ordered if choice in ordered[:FINALISTS] or leaders[choice.by] == choice]
    return list(dict.fromkeys([before, *(choice for choice in quick if times[choice] <= NEAR * times[ordered[0]])]))


def _calls(multiply: Multiply, choice: Choice, x: Tensor, weights: Iterable[Tensor], gated: bool) -> Calls:
    return [partial(multiply, choice, x, weight, gated) for weight in weights]


def entries(found: Iterable[ProductTimes]) -> dict[str, dict[str, Any]]:
    """Build the lines of a file of choices. A gate in its own launch belongs to the product that was measured with
    it."""
    lines: dict[str, dict[str, Any]] = {}
    for each in found:
        _, n, k, gated = each.product
        tiling = each.choice.tiling
        line = {"by": each.choice.by} | ({} if tiling is None else {"tiling": dataclasses.asdict(tiling)})
        if gated and not gates(each.choice):
            lines[choices.key(each.rows, n, k, gated=True)] = {"by": "cublas"}  # no launch with the gate inside
            lines[choices.key(each.rows, n, k)] = line
        else:
            lines[choices.key(each.rows, n, k, gated=gated)] = line
        if each.rows == 1 and isinstance(tiling, CudaTiling) and n % 16 == k % 64 == 0:  # with norms in it, too
            lines[choices.key(1, n, k, gated=gated, stream=True)] = line
    return lines


def save(device_name: str, lines: Mapping[str, Mapping[str, Any]], folder: Path | None = None) -> Path:
    """Add lines to the user's file of choices for a device (or to that of ``folder``); returns its path."""
    path = (folder or user_folder() / FOLDER.name) / file_name(device_name)
    path.parent.mkdir(parents=True, exist_ok=True)
    known = json.loads(path.read_text())["choices"] if path.is_file() else {}
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(
        json.dumps({"device": device_name, "choices": {**known, **lines}}, indent=1, sort_keys=True) + "\n"
    )
    temporary.replace(path)
    choices.choices.cache_clear()
    choices.chosen.cache_clear()
    return path
