"""Rooflines (Williams, Waterman and Patterson 2009): FLOPs per byte against a device's ceilings.

A point is an operator: its FLOPs per byte, and the rate that the device allows at that intensity, or the rate that was
measured. Left of the ridge bytes bind, right of it arithmetic. ``points_of_*`` make points of a model's step, of an
operator's real shapes, or of a trace; ``roofline_svg.py`` draws them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..costs.ceilings import Ceilings
from ..costs.model import Row, step_cost
from ..costs.storage import Storage
from ..spec.model import ModelConfig
from ..spec.numbers.int4 import int4_format
from .program.op_floor import cost as op_cost
from .program.op_floor import dtype_of
from .program.split import OpStat, Split

CHIEF = 12
"""Number of points of a trace: the operators that take the most time."""


@dataclass(frozen=True, slots=True)
class Point:
    """One operator.

    Attributes:
        name, group: name of the point, and its series (``decode bf16``).
        flops, bytes: those of all its calls.
        roof: the fewest seconds that the device needs.
        seconds: measured, or None.
        dtype: whose matrix rate bounds it.
    """

    name: str
    group: str
    flops: float
    bytes: float
    roof: float
    dtype: str
    seconds: float | None = None

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / self.bytes if self.bytes else 0.0

    @property
    def rate(self) -> float:
        """FLOP/s: measured, else the roof's."""
        seconds = self.roof if self.seconds is None else self.seconds
        return self.flops / seconds if seconds else 0.0


@dataclass(frozen=True, slots=True)
class Roofline:
    """A device and points under its roofs."""

    device: str
    bytes_per_second: float
    flops_per_second: dict[str, float]
    points: Sequence[Point]
    source: str = ""

    def ridge(self, dtype: str) -> float:
        """Return the FLOPs per byte at which products in ``dtype`` turn from memory-bound to compute-bound."""
        return self.flops_per_second[dtype] / self.bytes_per_second

    def bound(self, point: Point) -> str:
        """Return the bound of a point: ``bytes`` or ``FLOPs``."""
        return "FLOPs" if point.intensity >= self.ridge(point.dtype) else "bytes"

    def to_dict(self) -> dict[str, Any]:
        """Return the figures for JSON; seconds, bytes, FLOP/s."""
        return {
            "device": self.device,
            "bytes_per_second": self.bytes_per_second,
            "flops_per_second": self.flops_per_second,
            "source": self.source,
            "points": [
                {
                    "name": point.name,
                    "group": point.group,
                    "flops": point.flops,
                    "bytes": point.bytes,
                    "intensity": point.intensity,
                    "floor_s": point.roof,
                    "measured_s": point.seconds,
                    "bound": self.bound(point),
                }
                for point in self.points
            ],
        }


def roofline(ceilings: Ceilings, points: Sequence[Point], source: str = "") -> Roofline:
    """Return the device of ``ceilings`` with the roofs that ``points`` need."""
    wanted = {point.dtype for point in points} or set(ceilings.flops_per_second)
    rates = {name: ceilings.rate(name) for name in sorted(wanted) if name in ceilings.flops_per_second}
    return Roofline(ceilings.device, ceilings.read_bytes_per_second, rates, tuple(points), source)


def points_of_model(
    config: ModelConfig, ceilings: Ceilings, *, batch: int, context: int, prompt: int, dtype: str = "bfloat16"
) -> list[Point]:
    """Return a model's operators in a decode step and in a prefill, with weights in 16 and in 4 bits.

    Args:
        batch: sequences that decode, each with ``context`` tokens.
        prompt: tokens of the prefill.
        dtype: that products are computed in.

    Raises:
        ValueError: no rate is known for ``dtype``, or the lengths exceed the model's context.
    """
    if max(context, prompt) > config.max_position:
        raise ValueError(f"the model has a context of {config.max_position} tokens: lower --context or --prompt")
    rate = ceilings.rate(dtype)
    steps = {"decode": [Row(1, context)] * batch, "prefill": [Row(prompt, prompt)]}
    formats = {"bf16": Storage(), "4-bit": Storage(linear=int4_format().bits)}
    return [
        Point(
            name,
            f"{step} {stored}",
            cost.flops,
            cost.bytes,
            cost.floor(rate, ceilings.read_bytes_per_second),
            dtype,
        )
        for step, rows in steps.items()
        for stored, storage in formats.items()
        for name, cost in step_cost(config, rows, storage=storage).items()
        if cost.flops and cost.bytes
    ]


def points_of_operator(name: str, ceilings: Ceilings) -> list[Point]:
    """Return an operator of the registry at its real shapes. Nothing is allocated.

    Raises:
        ValueError: there is no such operator, or it has no real shapes.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    from ..ops import registry

    registry.all_ops()
    op = registry.get(name)
    found = []
    for case in op.cases():
        with FakeTensorMode():
            cost = op.cost(**case.make("cpu", 0))
        dtype = case.dtype if case.dtype in ceilings.flops_per_second else "float32"
        floor = cost.floor(ceilings.rate(dtype), ceilings.read_bytes_per_second)
        found.append(Point(case.name, name, cost.flops, cost.bytes, floor, dtype))
    if not found:
        raise ValueError(
            f"operator {name!r} has no real shapes of its own: try {', '.join(op.measured_as) or 'linear'}"
        )
    return found


def points_of_trace(split: Split, ceilings: Ceilings) -> list[Point]:
    """Return the operators of a trace that took the most time, with their measured rates."""
    grouped: dict[str, list[OpStat]] = {}
    for op in split.ops:  # an operator's kernels are one point
        grouped.setdefault(repr((op.name, op.key.shapes, op.key.types)), []).append(op)
    points = []
    for ops in grouped.values():
        key, calls = replace(ops[0].key, name=ops[0].name), max(op.calls for op in ops)
        cost, seconds = op_cost(key), sum(op.seconds for op in ops)
        if cost is None or not cost.flops or not cost.bytes or not seconds:
            continue
        dtype = dtype_of(key, max(ops, key=lambda op: op.seconds).key.name)
        dtype = dtype if dtype in ceilings.flops_per_second else "float32"
        floor = calls * cost.floor(ceilings.rate(dtype), ceilings.read_bytes_per_second)
        name = f"{key.name} x{calls}"
        points.append(Point(name, "measured", calls * cost.flops, calls * cost.bytes, floor, dtype, seconds))
    return sorted(points, key=lambda point: -(point.seconds or 0.0))[:CHIEF]
