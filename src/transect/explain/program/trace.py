"""The events of a trace as columns of numbers, and what they mean.

Times are seconds from the earliest event. Names and shapes are kept once each. An event keeps: kind, begin, duration,
thread or stream, the number of its name and shapes, and the number that ties a kernel to the operator that launched it.
"""

from __future__ import annotations

import sys
from array import array
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

OP, RANGE, PYTHON, RUNTIME, KERNEL, COPY, SET, OVERHEAD = range(8)
"""Kinds of events. RANGE: ``record_function``; RUNTIME: a call of the driver's interface; SET: a memset; OVERHEAD: what
the profiler says of itself and of the driver."""
KINDS = {
    "cpu_op": OP,
    "operator": OP,
    "user_annotation": RANGE,
    "python_function": PYTHON,
    "cuda_runtime": RUNTIME,
    "cuda_driver": RUNTIME,
    "runtime": RUNTIME,
    "kernel": KERNEL,
    "gpu_memcpy": COPY,
    "memcpy": COPY,
    "gpu_memset": SET,
    "memset": SET,
    "overhead": OVERHEAD,
}
"""By ``cat``, in the spellings of the versions that there were."""
NARROWEST = ("c10::half", "c10::bfloat16", "float", "double")
OPTIMIZERS = ("aten::_foreach", "aten::_fused_")
"""Operators whose lists are parameters, gradients and states."""
LARGEST = 1 << 62
"""No time and no number in a trace is larger."""


@dataclass(frozen=True, slots=True)
class Key:
    """Identity of an event: its name, and if recorded the shapes, types and plain arguments of its inputs.

    ``nodes`` is set if autograd recorded the event.
    """

    name: str
    shapes: Any = None
    types: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    nodes: bool = False
    bytes: int = 0
    """Those that a copy moves."""
    strides: Any = None
    """Those of its inputs, where one of them repeats numbers (a stride of 0) or, sparse, has none."""
    listed: str = ""
    """The type of the numbers in its lists of tensors, which no trace has: what other operators say of tensors of these
    shapes."""


class Trace:
    """Filled by ``add``; ``close`` makes the columns arrays."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.head: dict[str, Any] = {}
        self.truncated = False
        self.other: dict[str, int] = {}
        """Events of kinds that are not looked at, by kind."""
        self.sequence: tuple[int, int] | None = None
        """The lowest and the highest number that autograd had given to a node when an operator was called."""
        self.keys: list[Key] = []
        self._numbers: dict[Any, int] = {}
        self._columns: dict[str, Any] = {
            "kind": array("b"),
            "ts": array("d"),
            "dur": array("d"),
            "lane": array("q"),
            "key": array("i"),
            "link": array("q"),
        }
        self._lanes: dict[Any, int] = {}
        self._ends: np.ndarray | None = None

    @property
    def size(self) -> int:
        """Events that are kept."""
        return len(self._columns["ts"])

    def add(self, event: Any) -> None:
        """Take in one event as JSON has it; what is no complete event of a known kind is counted and left."""
        if not isinstance(event, dict):
            self.other["things that are no events"] = self.other.get("things that are no events", 0) + 1
            return
        kind = KINDS.get(str(event.get("cat", "")).lower())
        begin: Any = event.get("ts")
        length: Any = event.get("dur")
        if kind is None or event.get("ph") != "X" or not _number(begin) or not _number(length):
            if event.get("ph") == "X":
                name = str(event.get("cat", "events without a kind"))
                self.other[name] = self.other.get(name, 0) + 1
            return
        found = event.get("args")
        args: dict[str, Any] = found if isinstance(found, dict) else {}
        lane = repr((event.get("pid"), event.get("tid")))
        self._count(kind, args.get("Sequence number"))
        link = args.get("External id", args.get("external id", -1))
        columns = self._columns
        columns["kind"].append(kind)
        columns["ts"].append(float(begin) * 1e-6)
        columns["dur"].append(max(0.0, float(length)) * 1e-6)
        columns["lane"].append(self._lanes.setdefault(lane, len(self._lanes)))
        columns["key"].append(self._key(kind, str(event.get("name", "")), args))
        columns["link"].append(int(link) if _number(link) else -1)

    def _count(self, kind: int, number: Any) -> None:
        if kind != OP or not _number(number) or number < 0:
            return
        low, high = self.sequence or (int(number), int(number))
        self.sequence = min(low, int(number)), max(high, int(number))

    @property
    def recorded(self) -> int:
        """Operators that autograd recorded, at most. While nothing needs a gradient its numbers stand still."""
        return 0 if self.sequence is None else self.sequence[1] - self.sequence[0]

    def _key(self, kind: int, name: str, args: dict[str, Any]) -> int:
        shapes = args.get("Input Dims", args.get("Input dims")) if kind == OP else None
        shapes = shapes if isinstance(shapes, list) else None
        types = args.get("Input type", ()) if kind == OP else ()
        values = args.get("Concrete Inputs", ()) if kind == OP and ("conv" in name or "attention" in name) else ()
        size: Any = args.get("bytes") if kind in (COPY, SET) else 0
        counted = int(size) if _number(size) else 0
        nodes = "Sequence number" in args and kind == OP and not name.endswith(("Backward0", "AccumulateGrad"))
        strides = args.get("Input Strides")
        strides = strides if shapes is not None and _unusual(shapes, strides) else None
        mark = (name, repr(shapes), repr(types), repr(values), counted, nodes, repr(strides))
        number = self._numbers.get(mark)
        if number is None:
            number = self._numbers[mark] = len(self.keys)
            listed = types if isinstance(types, (list, tuple)) else ()
            plain = tuple(each.lower() if "c10" in each else each for each in map(_printable, listed))
            concrete = tuple(str(each) for each in values) if isinstance(values, (list, tuple)) else ()
            self.keys.append(Key(sys.intern(_printable(name)), shapes, plain, concrete, nodes, counted, strides))
        return number

    def close(self) -> None:
        """Make the columns arrays, in the order of their begins; times count from the first."""
        self.kind = np.frombuffer(self._columns["kind"], dtype=np.int8)
        self.ts = np.frombuffer(self._columns["ts"], dtype=np.float64)
        order = np.lexsort((-np.frombuffer(self._columns["dur"], dtype=np.float64), self.ts))
        self.origin = float(self.ts.min())
        self.ts = self.ts[order] - self.origin
        self.kind = self.kind[order]
        self.dur = np.frombuffer(self._columns["dur"], dtype=np.float64)[order]
        self.lane = np.frombuffer(self._columns["lane"], dtype=np.int64)[order]
        self.key = np.frombuffer(self._columns["key"], dtype=np.int32)[order]
        self.link = np.frombuffer(self._columns["link"], dtype=np.int64)[order]
        self._columns = {name: array(column.typecode) for name, column in self._columns.items()}
        self.size_kept = len(self.ts)
        self._numbers.clear()
        self._type_lists()

    def _type_lists(self) -> None:
        """Give lists of tensors the narrowest floating-point type that other operators have for tensors of their
        shapes; of an optimizer's lists, what gradients of these shapes have."""
        seen: dict[bool, dict[str, set[str]]] = {True: {}, False: {}}
        for key in self.keys:
            gradient = key.name == "torch::autograd::AccumulateGrad"
            for shape, kind in zip(key.shapes if isinstance(key.shapes, list) else (), key.types, strict=False):
                if shape and kind in NARROWEST:
                    seen[gradient].setdefault(repr(shape), set()).add(kind)
        for number, key in enumerate(self.keys):
            if "TensorList" not in key.types or not isinstance(key.shapes, list):
                continue
            lists = [each for each, kind in zip(key.shapes, key.types, strict=False) if kind == "TensorList"]
            shapes = {repr(shape) for each in lists if isinstance(each, list) for shape in each}
            first = key.name.startswith(OPTIMIZERS)
            for kinds in [seen[True]] * first + [seen[False]]:
                if found := set().union(*(kinds.get(shape, ()) for shape in shapes)):
                    self.keys[number] = replace(key, listed=min(found, key=NARROWEST.index))
                    break

    def drop_before(self, moment: float) -> None:
        """Forget the events that ended before a moment; times stay as they are."""
        kept = self.ts + self.dur > moment
        for name in ("kind", "ts", "dur", "lane", "key", "link"):
            setattr(self, name, getattr(self, name)[kept])
        self.size_kept = len(self.ts)
        self._ends = None

    def where(self, kind: int) -> np.ndarray:
        """Indices of the events of a kind, in the order of their begins."""
        return np.flatnonzero(self.kind == kind)

    def key_of(self, index: int) -> Key:
        """Return the identity of an event."""
        return self.keys[self.key[index]]

    def latest_ends(self) -> np.ndarray:
        """For each event the latest end of it and all before it, in seconds; it never falls."""
        if self._ends is None:
            self._ends = np.maximum.accumulate(self.ts + self.dur)
        return self._ends

    @property
    def on_gpu(self) -> bool:
        """True if kernels ran."""
        return bool((self.kind == KERNEL).any())


def _unusual(shapes: list[Any], strides: Any) -> bool:
    """Return True if a tensor, or one in a list of them, repeats elements or has no strides."""
    if not isinstance(strides, list):
        return False
    for shape, steps in zip(shapes, strides, strict=False):
        if not isinstance(shape, list) or not isinstance(steps, list):
            continue
        if shape and isinstance(shape[0], list):
            if _unusual(shape, steps):
                return True
        elif shape and (0 in steps or not steps):
            return True
    return False


def _number(value: Any) -> bool:
    """Return True if a JSON value is a usable number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -LARGEST < value < LARGEST


def _printable(value: Any) -> str:
    """Text that a terminal and a page can show: names may hold what is no character at all."""
    text = str(value)
    return text if text.isprintable() else "".join(each if each.isprintable() else "?" for each in text)
