"""Changes that can be made to a PyTorch script from outside, while it runs: each a context manager.

Three reach into the calls of the outermost module (``calls_by``): ``compiled``, ``graphed`` and ``Batched``. They count
what they need once, before they gain anything (``setup_s``): a compiler's time, a capture, the batch that is computed
beforehand. Where a script does what a change cannot have, an error says so, and the script is left as it is.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ...hardware.cores import usable_cores

Call = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]
RELATIVE, ABSOLUTE = 1e-3, 1e-5
"""Tolerances for the results of a changed script, relative and absolute."""
LEAST_BYTES = 1 << 16
MOST_MODULES = 8
"""Number of modules whose calls are inspected."""
MOST_PINNED = 1 << 30
"""Least bytes of a host tensor that is pinned, and most bytes of all pinned copies."""


class NotPossible(RuntimeError):
    """A change is impossible for this script; the message gives the reason."""


@dataclass(slots=True)
class Running:
    """Progress of a change."""

    setup_s: float = 0.0
    """Seconds spent once, however long the script runs."""


@contextmanager
def calls_by(way: Call) -> Iterator[None]:
    """Replace calls of an outermost module by ``way(module, args, kwargs)``, which calls the module itself as usual.

    Calls of other threads stay, and those that are being compiled; hooks would be compiled with the module.
    """
    plain, thread, inside = nn.Module.__call__, threading.get_ident(), False

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        if inside or torch.compiler.is_compiling() or threading.get_ident() != thread:
            return plain(module, *args, **kwargs)
        inside = True
        try:
            return way(module, args, kwargs)
        finally:
            inside = False

    nn.Module.__call__ = call  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__call__ = plain  # type: ignore[method-assign]


@contextmanager
def inference() -> Iterator[Running]:
    """Disable the recording of gradients."""
    with torch.inference_mode():
        yield Running()


@contextmanager
def all_threads() -> Iterator[Running]:
    """Let torch use all cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(usable_cores())
    try:
        yield Running()
    finally:
        torch.set_num_threads(before)


@contextmanager
def one_thread() -> Iterator[Running]:
    """Let torch use one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield Running()
    finally:
        torch.set_num_threads(before)


@contextmanager
def tf32() -> Iterator[Running]:
    """Compute float32 products on tensor cores, with 10 bits of each factor."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield Running()
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def bfloat16() -> Iterator[Running]:
    """Compute products in bfloat16 by autocast; the weights keep their dtype."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.autocast(kind, torch.bfloat16):
        yield Running()


@contextmanager
def compiled() -> Iterator[Running]:
    """Compile each outermost module with ``torch.compile``."""
    running = Running()
    ways: dict[int, tuple[nn.Module, Any]] = {}

    def way(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if id(module) not in ways:
            ways[id(module)] = module, torch.compile(module)
        began, graphs = time.perf_counter(), _graphs()
        result = ways[id(module)][1](*args, **kwargs)
        if _graphs() > graphs or not graphs:
            running.setup_s += time.perf_counter() - began
        return result

    try:
        with calls_by(way):
            yield running
    finally:
        torch.compiler.reset()  # or the next run would meet guards of modules that are gone


def _graphs() -> int:
    """Return the number of graphs that torch.compile has made."""
    import torch._dynamo.utils  # takes a second

    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@dataclass(slots=True)
class _Graph:
    module: nn.Module
    """Module, kept alive so that no other module gets its id or its memory."""
    inputs: list[Tensor]
    graph: torch.cuda.CUDAGraph
    output: Any


@contextmanager
def graphed() -> Iterator[Running]:
    """Run each outermost module captured in a CUDA graph for each set of shapes, and replayed."""
    if not torch.cuda.is_available():
        raise NotPossible("there is no CUDA GPU")
    running = Running()
    graphs: dict[Any, _Graph] = {}

    def way(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs or not all(isinstance(each, Tensor) and each.is_cuda for each in args):
            raise NotPossible("a module is called with something else than tensors on the GPU")
        key = id(module), *((each.shape, each.stride(), each.dtype) for each in args)
        if key not in graphs:
            began = time.perf_counter()
            graphs[key] = _captured(module, args)
            running.setup_s += time.perf_counter() - began
        held = graphs[key]
        for mine, given in zip(held.inputs, args, strict=True):
            mine.copy_(given)
        held.graph.replay()
        return torch.utils._pytree.tree_map_only(Tensor, Tensor.clone, held.output)

    with torch.no_grad(), calls_by(way):
        yield running


def _captured(module: nn.Module, args: tuple[Any, ...]) -> _Graph:
    inputs = [each.clone() for each in args]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            wanted = module(*inputs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = module(*inputs)
    graph.replay()
    if not _close(output, wanted):
        raise NotPossible("a module gives other numbers when it is called again: it keeps state, or draws")
    return _Graph(module, inputs, graph, output)


@dataclass(slots=True)
class Batched:
    """Computes the calls of each outermost module in one batch. The script runs once to record the inputs of its
    modules; the batch is computed; then the script runs again, and calls return their parts of it. This equals batching
    the loop by hand, and is possible if no call depends on the result of another."""

    calls: dict[int, list[tuple[tuple[Any, ...], Any]]] = field(default_factory=dict)
    """Arguments and result of each call, by the order in which modules are first called."""

    def record(self) -> contextlib.AbstractContextManager[None]:
        """Record the calls during the first run of the script."""
        order: dict[int, int] = {}
        held: list[nn.Module] = []

        def way(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if kwargs or not all(isinstance(each, Tensor) for each in args):
                raise NotPossible("a module is called with something else than tensors")
            if id(module) not in order:
                order[id(module)] = len(order)
                held.append(module)  # so that no other module gets its number
            result = module(*args)
            if not isinstance(result, Tensor):
                raise NotPossible("a module returns something else than a tensor")
            taken = tuple(each.detach().clone() for each in args)
            self.calls.setdefault(order[id(module)], []).append((taken, result.detach()))
            return result

        return calls_by(way)

    @contextmanager
    def check(self, module: int, changed: set[int]) -> Iterator[None]:
        """Check, during another run, that batches give the same numbers, and which modules get other inputs
        (``changed``) if module number ``module`` returns zeros."""

        def look(number: int, index: int, args: tuple[Any, ...], result: Tensor) -> Tensor:
            taken, wanted = self.calls[number][index]
            if len(args) != len(taken) or not all(map(_close, args, taken)):
                changed.add(number)
            if not _close(result, wanted):
                raise NotPossible("a module gives other numbers for a batch")
            return torch.zeros_like(result) if number == module else result

        with torch.no_grad(), calls_by(self._way(look)):
            yield

    @contextmanager
    def apply(self) -> Iterator[Running]:
        """Return parts of the batch from the script's calls, during the next run."""
        with torch.no_grad(), calls_by(self._way(lambda number, index, args, result: result)):
            yield Running()

    def _way(self, give: Callable[[int, int, tuple[Any, ...], Tensor], Tensor]) -> Call:
        order: dict[int, int] = {}
        results: dict[int, Iterator[tuple[int, Tensor]]] = {}
        held: list[nn.Module] = []

        def way(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if id(module) not in order:
                number = order[id(module)] = len(order)
                held.append(module)
                before = self.calls.get(number)
                if before is None:
                    raise NotPossible("the script calls other modules when it runs again")
                results[number] = iter(self._together(module, before))
            number = order[id(module)]
            found = next(results[number], None)
            if found is None:
                raise NotPossible("the script calls a module more often when it runs again")
            return give(number, found[0], args, found[1])

        return way

    def _together(self, module: nn.Module, calls: list[tuple[tuple[Any, ...], Any]]) -> Iterator[tuple[int, Tensor]]:
        """Yield (number, result) of each call; calls of equal shapes are computed at once."""
        groups: dict[Any, list[int]] = {}
        for index, (args, _) in enumerate(calls):
            groups.setdefault(tuple((each.shape, each.dtype) for each in args), []).append(index)
        found: dict[int, Tensor] = {}
        for members in groups.values():
            stacked = [torch.stack([calls[i][0][place] for i in members]) for place in range(len(calls[members[0]][0]))]
            if stacked and stacked[0].ndim > 2 and stacked[0].shape[1] >= 1:
                rows = stacked[0].shape[1]
                joined = module(*(each.flatten(0, 1) for each in stacked))
                parts = joined.unflatten(0, (len(members), rows))
            else:
                parts = module(*stacked)
            found.update(zip(members, parts, strict=True))
        return iter(sorted(found.items()))


@contextmanager
def pinned() -> Iterator[Running]:
    """Copy tensors from the host to a GPU through pinned memory, in parallel with computation.

    A tensor that is copied repeatedly gets a pinned copy, and a ``DataLoader`` pins its batches.
    """
    running = Running()
    kept: dict[Any, tuple[Tensor, Tensor]] = {}
    room = MOST_PINNED
    plain_to, plain_cuda = Tensor.to, Tensor.cuda
    loader = torch.utils.data.DataLoader
    plain_init = loader.__init__

    def moved(tensor: Tensor) -> Tensor:
        nonlocal room
        if tensor.device.type != "cpu" or tensor.is_pinned() or tensor.nbytes < LEAST_BYTES or tensor.requires_grad:
            return tensor
        key = tensor.data_ptr(), tensor._version, tensor.shape, tensor.stride(), tensor.dtype
        if key not in kept:
            if tensor.nbytes > room:
                return tensor
            began = time.perf_counter()
            kept[key] = tensor, tensor.contiguous().pin_memory()
            room -= tensor.nbytes
            running.setup_s += time.perf_counter() - began
        return kept[key][1]

    def to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not any(map(_on_gpu, (*args, kwargs.get("device"), kwargs.get("other")))):
            return plain_to(self, *args, **kwargs)
        return plain_to(moved(self), *args, **_beside(args, kwargs))

    def cuda(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return plain_cuda(moved(self), *args, **_beside(args, kwargs))

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        plain_init(self, *args, **{"pin_memory": True} | kwargs)

    Tensor.to, Tensor.cuda, loader.__init__ = to, cuda, init  # type: ignore[method-assign,assignment]
    try:
        yield running
    finally:
        Tensor.to, Tensor.cuda, loader.__init__ = plain_to, plain_cuda, plain_init  # type: ignore[method-assign]


@contextmanager
def loader_workers() -> Iterator[Running]:
    """Give workers to each ``DataLoader`` that would load in the main process, and keep them."""
    loader = torch.utils.data.DataLoader
    plain = loader.__init__

    def init(self: Any, dataset: Any, *args: Any, **kwargs: Any) -> None:
        alone = len(args) < 5 and not kwargs.get("num_workers")  # the sixth parameter
        if alone and not isinstance(dataset, torch.utils.data.IterableDataset):
            kwargs |= {"num_workers": max(1, usable_cores() - 1), "persistent_workers": True}
        plain(self, dataset, *args, **kwargs)

    loader.__init__ = init  # type: ignore[method-assign]
    try:
        yield Running()
    finally:
        loader.__init__ = plain  # type: ignore[method-assign]


@contextmanager
def fused_optimizers() -> Iterator[Running]:
    """Update all parameters in one kernel per type in Adam, AdamW and SGD."""
    kinds = torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD
    plain: dict[type, Any] = {kind: kind.__init__ for kind in kinds}

    def replaced(kind: type) -> Callable[..., None]:
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            inside = type(self) is not kind  # AdamW calls Adam's
            plain[kind](self, *args, **kwargs if inside else kwargs | {"fused": True, "foreach": None})

        return init

    for kind in kinds:
        kind.__init__ = replaced(kind)  # type: ignore[method-assign]
    try:
        yield Running()
    finally:
        for kind in kinds:
            kind.__init__ = plain[kind]  # type: ignore[method-assign]


def _on_gpu(target: Any) -> bool:
    """Return True if an argument of ``Tensor.to`` names a GPU."""
    if isinstance(target, Tensor):
        return target.is_cuda
    if isinstance(target, int):
        return not isinstance(target, bool)
    return isinstance(target, str | torch.device) and str(target).startswith("cuda")


def _beside(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return keywords that make a copy asynchronous, unless the call sets that by position."""
    return kwargs if any(isinstance(each, bool) for each in args) else kwargs | {"non_blocking": True}


def _close(one: Any, other: Any) -> bool:
    """Return True if two results are close, tensor by tensor if they hold several."""
    leaves, structure = torch.utils._pytree.tree_flatten(one)
    others, same = torch.utils._pytree.tree_flatten(other)
    return structure == same and all(map(_near, leaves, others))


def _near(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        if not one.is_floating_point():
            return torch.equal(one, other)
        rounding = 2 * torch.finfo(one.dtype).eps  # of bfloat16 more than ``RELATIVE``
        return torch.allclose(one, other, max(RELATIVE, rounding), ABSOLUTE)
    return type(one) is type(other)


CHANGES: dict[str, Callable[[], contextlib.AbstractContextManager[Running]]] = {
    "inference mode": inference,
    "threads": all_threads,
    "one thread": one_thread,
    "tf32": tf32,
    "bfloat16": bfloat16,
    "compile": compiled,
    "CUDA graph": graphed,
    "pinned memory": pinned,
    "loader workers": loader_workers,
    "fused optimizer": fused_optimizers,
}
"""Changes by the names in ``Finding.apply``, except ``batching``, which needs a run before."""
