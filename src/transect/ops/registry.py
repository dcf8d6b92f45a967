"""The registry of operators: one ``Op`` entry for each operator file of this folder.

Tests, benchmarks, inspection and the reference page are all derived from these entries; no other place knows an
operator by name. An implementation is resolved to a plain callable once, when a model is built for a device.
"""

from __future__ import annotations

import difflib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from ..costs.work import Cost
from ..hardware.targets import TARGETS


@dataclass(frozen=True, slots=True)
class Implementation:
    """One way to compute an operator.

    ``load`` returns the callable, or raises ``Unavailable`` with the reason; it may compile, so it is called once.
    ``targets`` names what it runs on: targets of ``hardware/targets.py``, ``cpu``, or ``any``.
    """

    backend: str
    load: Callable[[], Callable[..., Any]]
    targets: tuple[str, ...]
    batch_invariant: bool = False
    """In float32, the result of a token (or sequence) is the same to the bit whatever else is in the batch."""
    autograd: Callable[[], Callable[..., Any]] | None = None
    """Loads the ``torch.library`` operator over this implementation: same arguments, gradients, ``torch.compile``."""
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    """The dtypes that it computes in, by name."""
    refusal: Callable[..., str | None] | None = None
    """A function of the operator's arguments: a sentence that says why this implementation does not take them, or
    None."""
    source: str = ""
    """The ``.cu`` file of a ``cuda`` implementation."""


def in_torch(call: Callable[..., Any], *, batch_invariant: bool = False) -> Implementation:
    """Describe an implementation in plain torch, which runs on any target."""
    return Implementation("torch", lambda: call, ("any",), batch_invariant)


@dataclass(frozen=True, slots=True)
class Kernel:
    """Description of one device function for compilation ahead of time (``tools/compile.py`` and its tests).

    ``arguments`` gives the type of every run-time argument as Triton writes it (``*bf16``, ``i32``, ``fp32``), in the
    function's order; ``constants`` the compile-time ones. Pointers and the integers named in ``divisible`` are taken to
    be multiples of 16, as they are for real shapes.
    """

    name: str
    function: Any
    arguments: Mapping[str, str]
    constants: Mapping[str, Any]
    divisible: tuple[str, ...] = ()
    warps: int = 4
    stages: int = 3
    targets: tuple[str, ...] = tuple(TARGETS)
    implementation: str = "triton"
    """Name of the implementation in ``Op.implementations`` that launches it."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further compiler options, by Triton's names (``maxnreg``, ``launch_pdl``, ...)."""


@dataclass(frozen=True, slots=True)
class Case:
    """One real shape to measure: a name for the table, and a function that makes the arguments on a device.

    ``make(device, seed)`` returns random inputs as keyword arguments, different for every seed.
    """

    name: str
    make: Callable[[Any, int], Mapping[str, Any]]
    dtype: str = "bfloat16"
    """The matrix rate for the floor (``bfloat16``, ``float16``, ``float32``, ``tf32``)."""
    directions: tuple[str, ...] = ()
    """The directions of ``Op.directions`` to measure at this shape; empty: all of them."""
    only: tuple[str, ...] = ()
    """Names of the implementations and peers to race at this shape; empty: all that take it."""


@dataclass(frozen=True, slots=True)
class Knobs:
    """The knobs of one launcher, declared beside it. Its result must be the same to the bit in every run.

    ``launch`` takes the arguments that ``prepare`` makes from a case's, and ``config``: one value for each name in
    ``choices``. ``heuristic`` looks at the size that the launcher keys on: a row width, a number of elements, or a
    tuple of sizes (``(rows, columns, inner)``), which is bucketed element by element.
    """

    name: str
    choices: Mapping[str, tuple[Any, ...]]
    heuristic: Callable[[Any], Mapping[str, Any]]
    launch: Callable[..., Any]
    prepare: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    size: Callable[[Mapping[str, Any]], Any]
    """The size that the launcher keys its choice on, from a case's arguments."""
    valid: Callable[[Mapping[str, Any], Any], bool] | None = None
    """Predicate of configurations that are valid at a size; others are not tried."""
    applies: Callable[[Mapping[str, Any]], bool] | None = None
    """Predicate of arguments on which this launcher runs; None if it always runs."""


@dataclass(frozen=True, slots=True)
class KernelTrace:
    """A run of a kernel small enough to look at, for ``transect trace`` (Triton's interpreter, on the CPU).

    ``launch(**arguments())`` runs it with tiles of a few elements. ``watch`` names a function inside the kernel and
    the variables in it to show each time that the last of them is assigned: ``("_walk_keys", "start", "l", "m")``.
    """

    arguments: Callable[[], Mapping[str, Any]]
    launch: Callable[..., Any]
    watch: tuple[str, ...] = ()
    note: str = ""
    """A sentence under the picture that says what to look for."""


@dataclass(frozen=True, slots=True)
class OnHost:
    """A peer that runs on the processor beside a GPU's row; raced only at cases that name it in ``Case.only``."""

    call: Callable[..., Any]

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self.call(*arguments, **named)


class Unavailable(RuntimeError):
    """An implementation cannot run here; the message is the reason, in a sentence."""


@dataclass(frozen=True, slots=True)
class Op:
    """An operator: its reference, implementations, cost and example inputs.

    The reference, each implementation, each peer and ``cost`` take the same keyword arguments.
    """

    name: str
    reference: Callable[..., Any]
    cost: Callable[..., Cost]
    """Looks at shapes and dtypes only."""
    implementations: Mapping[str, Implementation] = field(default_factory=dict)
    examples: Callable[[], Sequence[Mapping[str, Any]]] = lambda: ()
    """Small inputs as keyword arguments for ``reference`` and every implementation: odd shapes included."""
    peers: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    """Others' implementations to race (torch, cuBLAS, ...); never resolved to."""
    differentiable: tuple[str, ...] = ()
    """Arguments that the reference and every implementation with a gradient give one for."""
    mutates: tuple[str, ...] = ()
    """Arguments that are written in place, in addition to the results."""
    keeps_dtype: tuple[str, ...] = ()
    """Floating-point arguments that stay float32 whatever dtype the operator is tried in."""
    gradient_cost: Callable[..., Cost] | None = None
    """The work of the backward pass, from the arguments of the forward pass."""
    cases: Callable[[], Sequence[Case]] = lambda: ()
    """Real shapes, from ``shapes.py``."""
    kernels: Callable[[], Sequence[Kernel]] = lambda: ()
    knobs: Callable[[], Sequence[Knobs]] = lambda: ()
    trace: Callable[[], KernelTrace] | None = None
    """Run that ``transect trace`` shows; None for the smallest example, through the Triton implementation."""
    directions: tuple[str, ...] = ("forward", "backward")
    """The directions to time: ``forward``; ``backward`` alone, after a forward pass; ``both`` together, where an
    implementation does part of the backward pass's work in the forward pass."""
    exact: Callable[..., Any] | None = None
    """``reference`` for real shapes: float64 on any arguments, but without its large temporaries."""
    measured_as: tuple[str, ...] = ()
    """Other operators whose cases measure this operator's kernels, if it has no cases."""
    error_ratio: float = 2.0
    """The largest error allowed, as a multiple of what torch's own operator makes in the same dtype."""
    error_note: str = ""
    """Reason why ``error_ratio`` is not 2, if it is not."""


NOT_FAMILIES = ("cpu", "lang", "tools")
"""Folders beside the families, which have no operators."""

_OPS: dict[str, Op] = {}


def register(op: Op) -> Op:
    """Enter an operator; called once at the end of its file."""
    if op.name in _OPS:
        raise ValueError(f"operator {op.name!r} is registered twice")
    _OPS[op.name] = op
    return op


def get(name: str) -> Op:
    """Return the entry called ``name``."""
    if name not in _OPS:
        near = difflib.get_close_matches(name, _OPS, n=1, cutoff=0.75)
        hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(sorted(_OPS))}"
        raise ValueError(f"no operator {name!r}; {hint}")
    return _OPS[name]


def all_ops() -> list[Op]:
    """List every entry, by name; imports each file of the families, which are the folders beside this file."""
    for family in pkgutil.iter_modules([str(Path(__file__).parent)]):
        if family.ispkg and family.name not in NOT_FAMILIES:
            package = import_module(f".{family.name}", __package__)
            for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
                import_module(module.name)
    return [_OPS[name] for name in sorted(_OPS)]
