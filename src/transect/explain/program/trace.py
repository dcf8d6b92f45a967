"""The events of a trace as columns of numbers, and their meanings.

Times are seconds from the earliest event. Names and shapes are kept once each. An event keeps: kind, begin, duration,
thread or stream, the number of its name and shapes, and the number that ties a kernel to the operator that launched it.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

OP, RANGE, PYTHON, RUNTIME, KERNEL, COPY, SET, OVERHEAD = range(8)
"""Kinds of events. RANGE: ``record_function``; RUNTIME: a driver call; SET: a memset; OVERHEAD: own work of profiler
and driver."""
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
"""Kinds by ``cat``, in the spellings of all versions."""
NARROWEST = ("c10::half", "c10::bfloat16", "float", "double")
OPTIMIZERS = ("aten::_foreach", "aten::_fused_")
"""Operators whose lists are parameters, gradients and states."""
COPIES = 4
"""Fewest copies that show a GPU at work."""
LARGEST = 1 << 62
"""Upper bound of times and numbers in a trace."""


class WrittenArgs(msgspec.Struct, gc=False):
    """Arguments of an event as torch's profiler writes them; shapes and types stay JSON until they are new."""

    dims: msgspec.Raw = msgspec.field(name="Input Dims", default=msgspec.Raw(b""))
    types: msgspec.Raw = msgspec.field(name="Input type", default=msgspec.Raw(b""))
    values: msgspec.Raw = msgspec.field(name="Concrete Inputs", default=msgspec.Raw(b""))
    strides: msgspec.Raw = msgspec.field(name="Input Strides", default=msgspec.Raw(b""))
    sequence: int = msgspec.field(name="Sequence number", default=-1)
    link: int = msgspec.field(name="External id", default=-1)
    bytes: int = 0


class WrittenEvent(msgspec.Struct, gc=False):
    """An event as torch's profiler writes it. Reading many of these takes a tenth of the time of ``dict``."""

    ph: str
    cat: str = ""
    name: str = ""
    pid: int | str = 0
    tid: int | str = 0
    ts: float = -1.0
    dur: float = -1.0
    args: WrittenArgs = msgspec.field(default_factory=WrittenArgs)


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
    """Bytes moved by a copy."""
    strides: Any = None
    """Strides of the inputs, if one of them repeats numbers (a stride of 0) or, being sparse, has none."""
    listed: str = ""
    """Type of the numbers in its lists of tensors, inferred from other operators on tensors of these shapes, because no
    trace records it."""


class Trace:
    """A trace in columns. Filled by ``add``; ``close`` makes the columns arrays."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.head: dict[str, Any] = {}
        self.truncated = False
        self.other: dict[str, int] = {}
        """Number of ignored events, by kind."""
        self.sequence: tuple[int, int] | None = None
        """Lowest and highest number of autograd's nodes when an operator was called."""
        self.keys: list[Key] = []
        self._numbers: dict[Any, int] = {}
        self._written: dict[Any, int] = {}
        self._columns: dict[str, Any] = {
            "kind": array("b"),
            "ts": array("d"),
            "dur": array("d"),
            "lane": array("q"),
            "key": array("i"),
            "link": array("q"),
        }
        self._lanes: dict[Any, int] = {}

    @property
    def size(self) -> int:
        """Number of kept events."""
        return len(self._columns["ts"])

    def add(self, event: Any) -> None:
        """Add an event decoded from JSON; an event that is incomplete or of an unknown kind is only counted."""
        if not isinstance(event, dict):
            self.other["entries that are not events"] = self.other.get("entries that are not events", 0) + 1
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
        place = event.get("pid"), event.get("tid")
        lane = place if all(isinstance(each, int | str) for each in place) else repr(place)
        self._count(kind, args.get("Sequence number"))
        link = args.get("External id", args.get("external id", -1))
        columns = self._columns
        columns["kind"].append(kind)
        columns["ts"].append(float(begin) * 1e-6)
        columns["dur"].append(max(0.0, float(length)) * 1e-6)
        columns["lane"].append(self._lanes.setdefault(lane, len(self._lanes)))
        columns["key"].append(self._key(kind, str(event.get("name", "")), args))
        columns["link"].append(int(link) if _number(link) else -1)

    def add_written(self, event: WrittenEvent) -> None:
        """Add an event that torch's profiler wrote, like ``add``."""
        kind, args = KINDS.get(event.cat, -1), event.args
        if kind < 0 or event.ph != "X" or event.ts < 0 or event.dur < 0:
            self.add({"ph": event.ph, "ts": event.ts, "dur": event.dur} | ({"cat": event.cat} if event.cat else {}))
            return
        raw = bytes(args.dims), bytes(args.types), bytes(args.values), bytes(args.strides)
        mark = kind, event.name, raw, args.sequence >= 0, args.bytes
        number = self._written.get(mark)
        if number is None:
            named = zip(("Input Dims", "Input type", "Concrete Inputs", "Input Strides"), raw, strict=True)
            plain: dict[str, Any] = {name: msgspec.json.decode(each) for name, each in named if each}
            plain |= {"bytes": args.bytes} | ({"Sequence number": args.sequence} if args.sequence >= 0 else {})
            number = self._written[mark] = self._key(kind, event.name, plain)
        self._count(kind, args.sequence)
        columns = self._columns
        columns["kind"].append(kind)
        columns["ts"].append(event.ts * 1e-6)
        columns["dur"].append(event.dur * 1e-6)
        lane = (event.pid, event.tid)
        columns["lane"].append(self._lanes.setdefault(lane, len(self._lanes)))
        columns["key"].append(number)
        columns["link"].append(args.link)

    def _count(self, kind: int, number: Any) -> None:
        if kind != OP or not _number(number) or number < 0:
            return
        low, high = self.sequence or (int(number), int(number))
        self.sequence = min(low, int(number)), max(high, int(number))

    @property
    def recorded(self) -> int:
        """Largest possible number of operators that autograd recorded. Its numbers are constant while nothing needs a
        gradient."""
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
        """Make the columns arrays, sorted by start; times count from the first event."""
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
        self._written.clear()
        self._type_lists()

    def _type_lists(self) -> None:
        """Set the type of lists of tensors to the narrowest floating-point type of other operators on tensors of these
        shapes; for an optimizer's lists, to that of gradients of these shapes."""
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
        """Drop the events that ended before a time; times are unchanged."""
        self._keep(self.ts + self.dur > moment)

    def crop(self, begin: float, end: float, marked: int) -> None:
        """Drop all events outside of a stretch, and set the event ``marked`` to that stretch."""
        kept = (self.ts + self.dur > begin) & (self.ts < end)
        kept[marked] = True
        self.ts, self.dur = self.ts.copy(), self.dur.copy()
        self.ts[marked], self.dur[marked] = begin, end - begin
        self._keep(kept)

    def _keep(self, kept: np.ndarray) -> None:
        for name in ("kind", "ts", "dur", "lane", "key", "link"):
            setattr(self, name, getattr(self, name)[kept])
        order = np.argsort(self.ts, kind="stable")
        if not (order[1:] > order[:-1]).all():
            for name in ("kind", "ts", "dur", "lane", "key", "link"):
                setattr(self, name, getattr(self, name)[order])
        self.size_kept = len(self.ts)

    def where(self, kind: int) -> np.ndarray:
        """Return the indices of the events of a kind, sorted by start."""
        return np.flatnonzero(self.kind == kind)

    def having(self, chosen: Callable[[Key], Any]) -> np.ndarray:
        """Return True for each event of whose identity ``chosen`` is true."""
        return np.array([bool(chosen(key)) for key in self.keys], bool)[self.key]

    def ops(self, lane: int) -> np.ndarray:
        """Return the indices of a thread's operators, sorted by start."""
        return np.flatnonzero((self.kind == OP) & (self.lane == lane))

    def outermost(self, lane: int) -> np.ndarray:
        """Return the indices of a thread's operators that are inside of no other, sorted by start."""
        ops = self.ops(lane)
        ends = np.maximum.accumulate(self.ts[ops] + self.dur[ops])
        return ops[self.ts[ops] >= np.append(-np.inf, ends[:-1])]

    def during(self, spans: np.ndarray, moments: Sequence[float] | np.ndarray) -> np.ndarray:
        """Return True for each of these times at which one of the events ``spans``, sorted by start, is in progress."""
        ends = np.append(-np.inf, np.maximum.accumulate(self.ts[spans] + self.dur[spans]))
        return ends[np.searchsorted(self.ts[spans], moments, side="right")] >= moments

    @property
    def launchers(self) -> dict[int, int]:
        """Operator of each number that ties kernels to it."""
        return {int(self.link[i]): int(i) for i in self.where(OP) if self.link[i] >= 0}

    def key_of(self, index: int) -> Key:
        """Return the identity of an event."""
        return self.keys[self.key[index]]

    @property
    def on_gpu(self) -> bool:
        """True if kernels ran, or several copies to or from a GPU."""
        return bool((self.kind == KERNEL).any() or (self.kind == COPY).sum() >= COPIES)


def kernel_name(name: str, *, templates: bool = False) -> str:
    """Return a kernel's name without its result, its namespaces and its parameters, and those of its template
    unless ``templates``; names that are none of C++ stay as they are.

    >>> kernel_name("void at::native::(anonymous namespace)::copy<float, 4>(int, f<float>)")
    'copy'
    """
    if not name.endswith(")") or name.startswith("Mem"):
        return name
    name = name.replace("(anonymous namespace)::", "")
    plain, depth = "", 0
    for letter in name:
        if letter == "(" and not depth:
            break
        depth += (letter == "<") - (letter == ">")
        if not depth and letter != ">":
            plain += letter
    word = plain.split()[-1] if plain.split() else name
    if not templates:
        return word.rpartition("::")[2] if "::kernel" not in word else word
    begin = name.find(word)
    depth = 0
    for end in range(begin, len(name)):
        depth += (name[end] == "<") - (name[end] == ">")
        if name[end] == "(" and not depth:
            return name[begin:end]
    return name


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
    """Replace unprintable characters: names may hold bytes that are not characters."""
    text = str(value)
    return text if text.isprintable() else "".join(each if each.isprintable() else "?" for each in text)
