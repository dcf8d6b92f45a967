"""Follows a Triton kernel through the interpreter: which program reads and writes which elements of which argument.

While ``recording()`` lasts, the memory functions of the interpreter's builder note every access with the program that
makes it, and a trace function notes chosen variables of one function inside the kernel. Both are taken back at the end.

Interpreted programs run one after another on the CPU, in numpy, the last axis of the grid fastest. A GPU starts them
with the first axis fastest, and runs as many at once as fit.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..lang.jit import INTERPRETED, MISSING, interpreter_refusal, triton
from ..registry import KernelTrace, Op, Unavailable

Program = tuple[int, int, int]
OUTSIDE = "outside of every argument"


@dataclass(slots=True)
class Argument:
    """One tensor that a kernel was given."""

    name: str
    shape: tuple[int, ...]
    offsets: np.ndarray
    """Bytes from the first element to each, in the tensor's order (flat)."""
    address: int
    value: torch.Tensor

    def elements(self, addresses: np.ndarray) -> np.ndarray:
        """Index (flat) of the element at each address; -1 where there is none."""
        order = np.argsort(self.offsets, kind="stable")
        sorted_offsets = self.offsets[order]
        at = addresses.astype(np.int64) - self.address
        place = np.searchsorted(sorted_offsets, at).clip(0, len(sorted_offsets) - 1)
        return np.where(sorted_offsets[place] == at, order[place], -1)


@dataclass(frozen=True, slots=True)
class Access:
    """One load or store of one program."""

    kind: str
    """``load``, ``store`` or ``atomic``."""
    program: Program
    argument: str
    elements: np.ndarray
    """Index (flat) in the argument of each element that was accessed; masked ones left out."""
    masked: int
    """Number of elements of the tile that the mask excludes."""


@dataclass(frozen=True, slots=True)
class TraceStep:
    """The watched variables at one moment, as numpy arrays or numbers."""

    program: Program
    values: Mapping[str, Any]


@dataclass(slots=True)
class Launch:
    """One launch of one kernel."""

    kernel: str
    arguments: dict[str, Argument]
    grid: Program = (1, 1, 1)
    accesses: list[Access] = field(default_factory=list)
    steps: list[TraceStep] = field(default_factory=list)

    @property
    def programs(self) -> list[Program]:
        """The programs, in the order in which they ran."""
        x, y, z = self.grid
        return [(i, j, k) for i in range(x) for j in range(y) for k in range(z)]

    def stored(self) -> list[str]:
        """List the arguments that some program wrote."""
        return list(dict.fromkeys(a.argument for a in self.accesses if a.kind != "load" and a.argument != OUTSIDE))

    def of(self, program: Program) -> list[Access]:
        """Return the accesses of one program, in order."""
        return [access for access in self.accesses if access.program == program]


@contextmanager
def recording(watch: Sequence[str] = ()) -> Iterator[list[Launch]]:
    """Note every kernel launched inside the block.

    Args:
        watch: a function inside the kernel, then its variables to note each time that the last of them is assigned.

    Raises:
        Unavailable: Triton is missing, or its interpreter is off.
    """
    if triton is None:
        raise Unavailable(MISSING)
    if not INTERPRETED:
        raise Unavailable("following a kernel needs Triton's interpreter: set TRITON_INTERPRET=1")
    if reason := interpreter_refusal(triton.__version__, np.__version__):
        raise Unavailable(reason)
    from triton.runtime import interpreter

    builder, executor = interpreter.interpreter_builder, interpreter.GridExecutor
    launches: list[Launch] = []
    run = executor.__call__

    def launch(self: Any, *arguments: Any, **named: Any) -> Any:
        given = {**dict(zip(self.arg_names, arguments, strict=False)), **named}
        found = {name: _argument(name, value) for name, value in given.items()}
        launches.append(Launch(self.fn.__name__, {name: value for name, value in found.items() if value is not None}))
        made = run(self, *arguments, **named)
        launches[-1].grid = tuple(builder.grid_dim)
        return made

    def noting(name: str, kind: str) -> Callable[..., Any]:
        original = getattr(builder, name)

        def function(*arguments: Any, **named: Any) -> Any:
            pointers, mask = _pointers(name, arguments, named)
            _note(launches[-1], kind, tuple(builder.grid_idx), pointers, mask)
            return original(*arguments, **named)

        return function

    kinds = {"create_masked_load": "load", "create_masked_store": "store"}
    kinds |= {"create_atomic_rmw": "atomic", "create_atomic_cas": "atomic"}
    wrapped = {name: noting(name, kind) for name, kind in kinds.items()}
    before = sys.gettrace()
    try:
        executor.__call__ = launch
        for name, function in wrapped.items():
            setattr(builder, name, function)
        if watch:
            sys.settrace(_watcher(watch, launches, builder))
        yield launches
    finally:
        sys.settrace(before)
        executor.__call__ = run
        for name in wrapped:
            delattr(builder, name)


def _pointers(name: str, arguments: Sequence[Any], named: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Return addresses and mask of a call of one of the builder's memory functions."""
    place = {"create_masked_load": (0, 1), "create_masked_store": (0, 2), "create_atomic_rmw": (1, 3)}
    at, mask_at = place.get(name, (0, -1))
    pointers = arguments[at].data
    mask = arguments[mask_at] if 0 <= mask_at < len(arguments) else named.get("mask")
    everything = np.ones(pointers.shape, bool)
    return pointers, everything if mask is None else np.broadcast_to(mask.data, pointers.shape).astype(bool)


def _argument(name: str, value: Any) -> Argument | None:
    tensor = getattr(value, "base", value)  # a descriptor holds its tensor
    if not isinstance(tensor, torch.Tensor):
        return None
    index = torch.zeros((), dtype=torch.int64)
    for side, stride in zip(tensor.shape, tensor.stride(), strict=True):
        index = index[..., None] + torch.arange(side) * stride
    offsets = index.reshape(-1).numpy() * tensor.element_size()
    return Argument(name, tuple(tensor.shape), offsets, tensor.data_ptr(), tensor)


def _note(launch: Launch, kind: str, program: Program, pointers: np.ndarray, mask: np.ndarray) -> None:
    flat, used = pointers.reshape(-1), mask.reshape(-1)
    addresses = flat[used]
    masked = int(flat.size - used.sum())
    if not addresses.size:
        name = next((a.name for a in launch.arguments.values() if (a.elements(flat) >= 0).any()), OUTSIDE)
        launch.accesses.append(Access(kind, program, name, np.empty(0, np.int64), masked))
        return
    for argument in launch.arguments.values():
        elements = argument.elements(addresses) if argument.offsets.size else np.full(addresses.shape, -1)
        if (elements >= 0).all():
            launch.accesses.append(Access(kind, program, argument.name, elements, masked))
            return
    launch.accesses.append(Access(kind, program, OUTSIDE, np.full(addresses.shape, -1), masked))


def _watcher(watch: Sequence[str], launches: list[Launch], builder: Any) -> Callable[..., Any]:
    """Return a trace function that notes ``watch[1:]`` in the function ``watch[0]`` whenever the last is assigned
    again."""
    function, *names = watch
    last = names[-1]
    held: dict[int, Any] = {}  # frame -> the value last seen: kept alive, so that identity means the same value

    def local(frame: Any, event: str, argument: Any) -> Any:
        value = frame.f_locals.get(last)
        if value is not None and value is not held.get(id(frame)):
            held[id(frame)] = value
            values = {name: _plain(frame.f_locals.get(name)) for name in names}
            launches[-1].steps.append(TraceStep(tuple(builder.grid_idx), values))
        if event == "return":
            held.pop(id(frame), None)
        return local

    def outer(frame: Any, event: str, argument: Any) -> Any:
        if frame.f_code.co_name != function:
            return None
        if last in frame.f_locals:  # an argument: its first value is not an assignment
            held[id(frame)] = frame.f_locals[last]
        return local

    return outer


def _plain(value: Any) -> Any:
    handle = getattr(value, "handle", None)
    if handle is None:
        return getattr(value, "value", value)
    data = np.array(handle.data)
    return data.item() if data.size == 1 else data


def trace_of(op: Op) -> KernelTrace:
    """Return the trace that ``op`` declares, else its smallest non-empty example through the first of its Triton
    implementations that runs here.

    Raises:
        ValueError: it has no Triton implementation.
        Unavailable: none of them runs here.
    """
    if op.trace is not None:
        return op.trace()

    def size(example: Mapping[str, Any]) -> int:
        return sum(value.numel() for value in example.values() if isinstance(value, torch.Tensor))

    def filled(example: Mapping[str, Any]) -> bool:
        return all(value.numel() for value in example.values() if isinstance(value, torch.Tensor))

    launch = _launcher(op)
    examples = sorted((e for e in op.examples() if filled(e)), key=size)
    example = next((e for e in examples if size(e) >= 16), examples[-1])
    return KernelTrace(lambda: example, launch)


def _launcher(op: Op) -> Callable[..., Any]:
    reasons = {}
    for name, made in op.implementations.items():
        if made.backend == "triton":
            try:
                return made.load()
            except Unavailable as reason:
                reasons[name] = str(reason)
    if not reasons:
        raise ValueError(f"{op.name} has no Triton kernel to follow")
    raise Unavailable("; ".join(f"{op.name} ({name}): {reason}" for name, reason in reasons.items()))


def follow(op: Op) -> tuple[KernelTrace, list[Launch]]:
    """Run an operator's trace; errors as in ``recording`` and ``trace_of``."""
    chosen = trace_of(op)
    arguments = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in chosen.arguments().items()}
    with recording(chosen.watch) as launches:
        chosen.launch(**arguments)
    return chosen, launches
