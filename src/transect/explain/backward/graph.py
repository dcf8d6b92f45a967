"""Record ``loss.backward()``: every node of autograd's graph in the order of execution, its saved tensors, its time.

The forward pass builds a graph: each operation that a gradient must go through leaves a node that knows how to go back
through it, keeps the tensors it will need for that, and points to the nodes that its inputs came from. The backward
pass starts at the loss. A node runs when everything that used its result has run, and of those that are ready the one
that was made last runs first. A leaf (a weight) ends a path: its node adds what arrives to ``weight.grad``. A node that
has run lets go of what it saved.

Memory is counted by storage: a view and its base are one, and count where they are met first. Weights exist anyway, so
a saved weight costs nothing. The rest is activations, which live until the last node that saved them has run. What a
``torch.autograd.Function`` keeps on its context without ``save_for_backward`` cannot be seen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

Storage = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Saved:
    """A tensor that a node saved. ``bytes``: the size of its storage, which may be larger than the view, or smaller."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    kind: Literal["weight", "activation"]
    counted: bool
    """True if the storage is counted here; False if a node that runs earlier holds it."""
    weight: str = ""
    """Name of the weight, if a module has a name for it."""


@dataclass(frozen=True, slots=True)
class Node:
    """One operation on the way back.

    ``module``: in whose forward pass it was made, or whose weight it is; "" for none. ``seconds``: on a GPU between two
    events. ``held``: bytes of activations that the graph holds when the node starts. ``feeds``: the nodes, by place in
    the order, that get its results. ``hidden``: tensors saved by hooks (recomputed or moved elsewhere), of a size
    that is not known.
    """

    name: str
    module: str
    saved: tuple[Saved, ...]
    seconds: float
    held: int
    feeds: tuple[int, ...]
    weight: str = ""
    """Weight whose gradient it adds to: by name, or the shape of a leaf without a module."""
    hidden: int = 0

    def bytes(self, kind: str) -> int:
        """Return the bytes of storage of a kind that are counted at this node."""
        return sum(saved.bytes for saved in self.saved if saved.counted and saved.kind == kind)


@dataclass(frozen=True, slots=True)
class Total:
    """Nodes of one kind."""

    name: str
    nodes: int
    seconds: float
    bytes: int
    """Bytes of activations counted at these nodes."""


@dataclass(frozen=True, slots=True)
class Backward:
    """A backward pass. ``seconds``: from the call to its end, including the overhead of measuring."""

    nodes: tuple[Node, ...]
    seconds: float

    @property
    def activation_bytes(self) -> int:
        return sum(node.bytes("activation") for node in self.nodes)

    @property
    def weight_bytes(self) -> int:
        return sum(node.bytes("weight") for node in self.nodes)

    @property
    def peak(self) -> int:
        """Most bytes of activations that the graph held at a time."""
        return max((node.held for node in self.nodes), default=0)

    def totals(self, key: Callable[[Node], str] = lambda node: node.name) -> list[Total]:
        """Sum nodes by kind, or by another key; the longest time first."""
        groups: dict[str, list[Node]] = {}
        for node in self.nodes:
            groups.setdefault(key(node), []).append(node)
        made = [
            Total(name, len(group), sum(n.seconds for n in group), sum(n.bytes("activation") for n in group))
            for name, group in groups.items()
        ]
        return sorted(made, key=lambda total: -total.seconds)


@dataclass
class ForwardRecord:
    """Records which module made which node, and the names of weights, from the forward passes inside a ``with``.

    Nodes carry numbers in the order in which they were made, so a module's are those between the numbers at its begin
    and end. Names are relative to the module that was called first.
    """

    spans: list[tuple[int, int, str]] = field(default_factory=list)
    """First number, number after the last, module."""
    weights: dict[int, str] = field(default_factory=dict)
    """Names of parameters by ``id``."""
    storages: dict[Storage, str] = field(default_factory=dict)
    """Names of parameters by storage."""
    _names: dict[int, str] = field(default_factory=dict)
    _open: list[tuple[int, str]] = field(default_factory=list)

    def __enter__(self) -> ForwardRecord:
        hooks = nn.modules.module
        self._handles = [
            hooks.register_module_forward_pre_hook(self._begin),
            hooks.register_module_forward_hook(self._end, always_call=True),
        ]
        return self

    def __exit__(self, *exception: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._open.clear()

    def module_of(self, number: int) -> str:
        """Return the innermost module that was running when node ``number`` was made."""
        around = [(first, name) for first, last, name in self.spans if first <= number < last]
        return max(around, default=(0, ""))[1]

    def _begin(self, module: nn.Module, inputs: Any) -> None:
        if not self._open:
            self._names = {id(part): name for name, part in module.named_modules()}
            for name, weight in module.named_parameters():
                self.weights[id(weight)] = name
                self.storages[storage_of(weight)] = name
        self._open.append((_next_number(), self._names.get(id(module), type(module).__name__)))

    def _end(self, module: nn.Module, inputs: Any, output: Any) -> None:
        first, name = self._open.pop()
        self.spans.append((first, _next_number(), name))


def explain(loss: Tensor, record: ForwardRecord | None = None) -> Backward:
    """Run ``loss.backward()`` and report what it did. Gradients stay in the leaves, as always.

    Args:
        loss: a scalar that came about by differentiable operations.
        record: made during the forward pass; gives the names of modules and weights.

    Raises:
        ValueError: not a scalar, or one that depends on no tensor that requires a gradient.
    """
    check(loss)
    record = record or ForwardRecord()
    graph = _reachable(loss.grad_fn)
    leaves: dict[Storage, str] = dict(record.storages)
    for node in graph:
        variable = getattr(node, "variable", None)
        if variable is not None:
            leaves.setdefault(storage_of(variable), "")
    saved = {node: _saved(node) for node in graph}
    timer = _Timer(loss.device)
    handles = [hook for node in graph for hook in timer.watch(node)]
    try:
        seconds = timer.run(loss)
    finally:
        for handle in handles:
            handle.remove()
    place = {node: index for index, node in enumerate(timer.order)}
    return Backward(tuple(_nodes(timer, place, saved, leaves, record)), seconds)


def check(loss: Any) -> None:
    """Check that ``loss.backward()`` can run. Raises ValueError."""
    if not isinstance(loss, Tensor):
        raise ValueError(f"the loss must be a tensor, not {type(loss).__name__}")
    if loss.numel() != 1:
        raise ValueError(f"the loss must be a single number, not of shape {list(loss.shape)}: take its mean or sum")
    if loss.grad_fn is None:
        raise ValueError(
            "the loss depends on no tensor that requires a gradient: use parameters, or tensors with "
            "requires_grad=True, and neither no_grad nor detach on the way"
        )


def storage_of(tensor: Tensor) -> Storage:
    """Return the storage of a tensor: equal for two tensors that share memory."""
    return str(tensor.device), tensor.untyped_storage().data_ptr()


def leaves_of(loss: Tensor) -> list[Tensor]:
    """Return the tensors whose gradient ``loss.backward()`` adds to."""
    return [node.variable for node in _reachable(loss.grad_fn) if hasattr(node, "variable")]


def _next_number() -> int:
    number: int = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
    return number


def _reachable(root: Any) -> list[Any]:
    """Return every node of the graph, each once."""
    found: dict[Any, None] = {}
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if node is None or node in found:
            continue
        found[node] = None
        waiting.extend(after for after, _ in node.next_functions)
    return list(found)


@dataclass(frozen=True, slots=True)
class _Raw:
    """A saved tensor as found at a node; ``storage`` is None if hooks replaced the tensor."""

    name: str
    shape: tuple[int, ...] = ()
    dtype: str = ""
    bytes: int = 0
    storage: Storage | None = None
    parameter: bool = False


def _saved(node: Any) -> list[_Raw]:
    found: list[_Raw | None] = []
    for attribute in dir(node):
        if attribute.startswith("_raw_saved_"):
            name = attribute.removeprefix("_raw_saved_")
            found.extend(_describe(name, each) for each in _flat(getattr(node, attribute)))
    return [each for each in found if each is not None]


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, (tuple, list)):
        for each in value:
            yield from _flat(each)
    elif value is not None:
        yield value


def _describe(name: str, saved: Any) -> _Raw | None:
    if saved.unpack_hook is not None:  # unpacking might compute the tensor again: leave it alone
        return _Raw(name)
    tensor = saved.data
    if tensor is None:
        return None
    return _Raw(
        name,
        tuple(tensor.shape),
        str(tensor.dtype).removeprefix("torch."),
        tensor.untyped_storage().nbytes(),
        storage_of(tensor),
        isinstance(tensor, nn.Parameter),
    )


class _Timer:
    """Records when nodes run, and in which order."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.order: list[Any] = []
        self._marks: dict[Any, list[Any]] = {}

    def watch(self, node: Any) -> tuple[Any, Any]:
        """Return hooks to call before and after a node."""

        def begin(gradients: Any) -> None:
            self.order.append(node)
            self._marks[node] = [self._now()]

        def end(gradients_in: Any, gradients_out: Any) -> None:
            self._marks[node].append(self._now())

        return node.register_prehook(begin), node.register_hook(end)

    def run(self, loss: Tensor) -> float:
        """Run the backward pass; returns its seconds."""
        first = self._now()
        loss.backward()  # type: ignore[no-untyped-call]
        last = self._now()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return self._between(first, last)

    def seconds(self, node: Any) -> float:
        """Return the time of a node that has run, in seconds."""
        first, last = self._marks[node]
        return self._between(first, last)

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _between(self, first: Any, last: Any) -> float:
        if self.device.type != "cuda":
            return float(last - first)
        return float(first.elapsed_time(last)) / 1e3


def _nodes(
    timer: _Timer,
    place: Mapping[Any, int],
    saved: Mapping[Any, list[_Raw]],
    leaves: Mapping[Storage, str],
    record: ForwardRecord,
) -> Iterator[Node]:
    weights = dict(leaves)
    last_use: dict[Storage, int] = {}
    for index, node in enumerate(timer.order):
        for raw in saved[node]:
            if raw.storage is not None:
                last_use[raw.storage] = index
                if raw.parameter:
                    weights.setdefault(raw.storage, "")
    size = {raw.storage: raw.bytes for node in timer.order for raw in saved[node] if raw.storage is not None}
    held = sum(nbytes for storage, nbytes in size.items() if storage not in weights)
    seen: set[Storage] = set()
    for index, node in enumerate(timer.order):
        entries = []
        for raw in saved[node]:
            if raw.storage is None:
                continue
            is_weight = raw.storage in weights
            entries.append(
                Saved(
                    name=raw.name,
                    shape=raw.shape,
                    dtype=raw.dtype,
                    bytes=raw.bytes,
                    kind="weight" if is_weight else "activation",
                    counted=raw.storage not in seen,
                    weight=weights.get(raw.storage, ""),
                )
            )
            seen.add(raw.storage)
        variable = getattr(node, "variable", None)
        weight = "" if variable is None else record.weights.get(id(variable), _leaf_name(variable))
        yield Node(
            name=_plain_name(node.name()),
            module=record.module_of(node._sequence_nr()) if variable is None else weight.rpartition(".")[0],
            saved=tuple(entries),
            seconds=timer.seconds(node),
            held=held,
            feeds=tuple(place[after] for after, _ in node.next_functions if after in place),
            weight=weight,
            hidden=sum(raw.storage is None for raw in saved[node]),
        )
        done = {raw.storage for raw in saved[node] if raw.storage is not None and last_use[raw.storage] == index}
        held -= sum(size[storage] for storage in done if storage not in weights)


def _leaf_name(leaf: Tensor) -> str:
    return f"leaf {'x'.join(map(str, leaf.shape)) or 'scalar'}"


def _plain_name(name: str) -> str:
    """Shorten a node's name: ``AccumulateGrad`` for torch's own; ``transect_gelu`` for an operator with a gradient from
    torch.library."""
    name = name.removeprefix("torch::autograd::")
    if name.startswith("GeneratedBackwardFor_"):
        name = name.removeprefix("GeneratedBackwardFor_").removesuffix("Backward").removesuffix("_default")
    return name
