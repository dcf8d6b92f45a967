"""``transect tune`` without names: tune the kernels of a serving step on any GPU in under a minute, and report them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..ops.registry import Case, Knobs, Op
    from ..ops.tools.search import Found

UNITS = (
    ("paged_attention", "paged_attention", "decode, 8 rows at 1024"),
    ("paged_attention", "paged_attention", "decode, 64 rows at 1024"),
    ("int4_matmul", "int4_matmul", ": 64 x 4096 by 28672"),
    ("matmul", "matmul", "square: 4096"),
    ("matmul", "matmul.gated", "SiLU gate"),
)
"""Operator, launcher and a part of a case's name: most of a step's time where the kernels of Hopper do not run."""
SECONDS, LEAST_SECONDS = 45.0, 2.0
"""Time of all searches, and least time of one."""
MOST_WORKERS = 8


def tune(seconds: float | None, keep: bool, report: Path | None, show: Callable[[Found], None]) -> None:
    """Search ``UNITS`` for ``seconds`` in total, ``show`` and keep the fastest, and write a report of the card.

    Raises:
        ValueError: there is no GPU, or no kernels for it.
    """
    import torch

    from ..hardware import gpu
    from ..hardware.cores import usable_cores
    from ..hardware.device import detect, target_of
    from ..hardware.targets import TARGETS, compiled_as
    from ..ops import tuning
    from ..ops.registry import all_ops
    from ..ops.tools import search, search_worker

    if not torch.cuda.is_available():
        raise ValueError("tuning measures on the GPU, and torch finds none here; the rules of thumb stay in use")
    device, target, name = detect("cuda"), target_of(), tuning.device_name()
    if compiled_as(target.name) not in TARGETS:
        raise ValueError(f"no kernels are compiled for {target.name}; there are: {', '.join(TARGETS)}")
    print(state(name, target.name), flush=True)
    began = time.monotonic()
    ceilings = gpu.measure()
    print(f"reads {ceilings.read_bytes_per_second / 1e9:.0f} GB/s, multiplies bfloat16 at "
          f"{ceilings.flops_per_second['bfloat16'] / 1e12:.0f} TFLOP/s", flush=True)  # fmt: skip
    all_ops()
    units = [unit for unit in map(find, UNITS) if unit is not None]
    limit = SECONDS if seconds is None else seconds
    workers = min(MOST_WORKERS, usable_cores() // 2)
    if workers > 1:
        names = [(op.name, knobs.name, case.name) for op, knobs, case in units]
        search_worker.start(names, workers, limit / 3)
    found: list[Found] = []
    for number, (_, knobs, case) in enumerate(units):
        left = limit - (time.monotonic() - began)
        share = max(LEAST_SECONDS, left / (len(units) - number))
        chosen = tuning.choices(name).get(knobs.name, {})

        def in_use(launcher: str, size: tuning.Size, chosen: Any = chosen) -> tuning.Config | None:
            return chosen.get(tuning.bucket_name(size))

        found.append(search.search(knobs, case, seconds=share, in_use=in_use))
        show(found[-1])
        torch.cuda.empty_cache()
    if keep:
        path = tuning.save(name, gathered(found))
        print(f"kept in {path}")
    if report is not None:
        write(report, {"device": vars_of(device), "target": target.name, "ceilings": vars_of(ceilings)}, found)
        print(f"report in {report}: please attach it to an issue, so that the table of cards gets a row")
    print(f"{time.monotonic() - began:.0f} s")


def state(name: str, target: str) -> str:
    """Return a sentence that says if this project has recorded choices of a card."""
    from ..ops import tuning

    if (tuning.SHIPPED / tuning.file_name(name)).is_file():
        return f"{name} ({target}): measured; its choices are shipped, and yours win"
    rules = "kernels are compiled for it in the tests, and cut by rules from other cards"
    return f"{name} ({target}): not measured by this project; {rules}"


def find(unit: tuple[str, str, str]) -> tuple[Op, Knobs, Case] | None:
    """Return the operator, launcher and case of one of ``UNITS``; None if its launcher does not run here."""
    from ..ops.registry import get
    from ..ops.tools import search

    name, launcher, part = unit
    op = get(name)
    knobs = next(each for each in op.knobs() if each.name == launcher)
    case = next(iter(search.cases_of(knobs, op.cases(), "cuda", part)), None)
    return None if case is None else (op, knobs, case)


def gathered(found: list[Found]) -> dict[str, dict[str, Any]]:
    """Return the choices of searches by launcher and size."""
    made: dict[str, dict[str, Any]] = {}
    for each in found:
        made.setdefault(each.launcher, {})[each.bucket] = dict(each.choice)
    return made


def vars_of(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass, without what names one machine."""
    from dataclasses import asdict

    return {name: field for name, field in asdict(value).items() if name != "uuid"}


def write(path: Path, facts: dict[str, Any], found: list[Found]) -> None:
    """Write the report: the card, its ceilings, versions and every trial."""
    from dataclasses import asdict
    from json import dumps

    from ..hardware.environment import environment

    searches = [{**asdict(each), "choice": dict(each.choice), "gain": each.gain} for each in found]
    text = dumps({**facts, "environment": environment(("torch", "triton")), "searches": searches}, indent=1)
    path.write_text(text + "\n")
