"""The registry of operators: one ``Op`` entry for each operator file of this folder.

Tests, benchmarks, inspection and the reference page are all derived from these entries; no other place knows an
operator by name. An implementation is resolved to a plain callable once, when a model is built for a device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Cost:
    """The work that an operator must do at the least: each input read once, each output written once."""

    flops: float
    bytes_read: float
    bytes_written: float

    @property
    def bytes(self) -> float:
        return self.bytes_read + self.bytes_written

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / self.bytes if self.bytes else 0.0

    def floor(self, flops_per_second: float, bytes_per_second: float) -> float:
        """Seconds that a device with these two ceilings needs at the least."""
        return max(self.flops / flops_per_second, self.bytes / bytes_per_second)

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.flops + other.flops, self.bytes_read + other.bytes_read, self.bytes_written + other.bytes_written
        )


@dataclass(frozen=True, slots=True)
class Implementation:
    """One way to compute an operator.

    ``load`` returns the callable, or raises ``Unavailable`` with the reason; it may compile, so it is called once.
    ``targets`` names what it runs on: ``cpu``, ``sm_80``, ``sm_90``, ``gfx942``.
    """

    backend: str
    load: Callable[[], Callable[..., Any]]
    targets: tuple[str, ...]


class Unavailable(RuntimeError):
    """An implementation cannot run here; the message is the reason, in a sentence."""


@dataclass(frozen=True, slots=True)
class Op:
    """An operator: what it computes, how, at what cost, and how to try it."""

    name: str
    reference: Callable[..., Any]
    cost: Callable[..., Cost]
    implementations: Mapping[str, Implementation] = field(default_factory=dict)
    examples: Callable[[], Sequence[Mapping[str, Any]]] = lambda: ()
    """Small inputs as keyword arguments for ``reference`` and every implementation: odd shapes included."""
    peers: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    """Others' implementations to race (torch, cuBLAS, ...); never resolved to."""


_OPS: dict[str, Op] = {}


def register(op: Op) -> Op:
    """Enter an operator; called once at the end of its file."""
    if op.name in _OPS:
        raise ValueError(f"operator {op.name!r} is registered twice")
    _OPS[op.name] = op
    return op


def get(name: str) -> Op:
    """The entry called ``name``."""
    if name not in _OPS:
        raise ValueError(f"no operator {name!r}; there are: {', '.join(sorted(_OPS))}")
    return _OPS[name]


def all_ops() -> list[Op]:
    """Every entry, by name."""
    return [_OPS[name] for name in sorted(_OPS)]
