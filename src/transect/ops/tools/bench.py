"""Times every implementation and peer of an operator at its real shapes, beside the floor of the device.

Each contender is captured in one CUDA graph of several calls on different inputs, together larger than the L2 cache,
whose results are all kept, so that nothing is read from or left in a cache. The time is the median over replays. The
floor is ``Op.cost`` over the ceilings of ``hardware/``: FLOPs by the rate of the dtype, bytes by the copy bandwidth
(the read bandwidth where less than a tenth of the bytes is written). On a processor the operator's small examples take
the place of its cases, and a clock that of the graph.

What fails, or does not take a shape, is a row with its reason.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...costs.ceilings import Ceilings
from ...costs.work import Cost
from ..lang.jit import INTERPRETED, triton
from ..registry import Case, Implementation, OnHost, Op, Unavailable
from . import accuracy, timing

ROTATE_BYTES = 400 * 2**20
MOST_COPIES = 16
REST_SECONDS = 0.1
HEAVY = 300
"""FLOPs for each byte above which a case is timed after a pause: work before it can leave a GPU at its power limit, and
the next contender would be slower for it."""
EXPECTED: tuple[type[Exception], ...] = (
    RuntimeError, ValueError, TypeError, AttributeError, NotImplementedError, KeyError, IndexError, OSError,
    *(() if triton is None else (triton.errors.TritonError,)),
)  # fmt: skip
"""Exceptions of a contender that cannot run a case. RuntimeError includes errors of CUDA and of memory, TritonError too
much shared memory."""


@dataclass(frozen=True, slots=True)
class Timing:
    """One contender at one shape in one direction; ``reason`` says why it has no time."""

    op: str
    case: str
    direction: str
    contender: str
    is_peer: bool
    bytes: float = 0.0
    flops: float = 0.0
    floor_seconds: float | None = None
    seconds: float | None = None
    fastest: float | None = None
    slowest: float | None = None
    runs: int = 0
    method: str = ""
    """``graph``, ``eager`` (where a graph could not be captured; launches count) or ``host``."""
    peak_bytes: int | None = None
    """Memory allocated in one run in addition to the inputs; ``result_bytes`` of it are the results."""
    result_bytes: int | None = None
    error: float | None = None
    """Against float64, as in ``accuracy.py``; None where that was not asked for or is too large."""
    torch_error: float | None = None
    allowed_error: float | None = None
    reason: str = ""
    note: str = ""
    wrong: bool = False
    """It raised while it ran, or its error is larger than allowed; never set for a peer."""

    @property
    def of_floor(self) -> float | None:
        """Floor over time: 1 is all that the device can do."""
        return None if self.seconds is None or self.floor_seconds is None else self.floor_seconds / self.seconds


def floor_seconds(cost: Cost, ceilings: Ceilings, dtype: str) -> float:
    """Return the least time for this work: arithmetic or bytes, whichever takes longer."""
    reading = cost.bytes_written < 0.1 * cost.bytes
    bandwidth = ceilings.read_bytes_per_second if reading else ceilings.copy_bytes_per_second
    return cost.floor(ceilings.rate(dtype), bandwidth)


@dataclass(frozen=True, slots=True)
class Contender:
    """One entry of a race: the plain callable, the one with gradients (or None), or why there is neither."""

    name: str
    is_peer: bool
    plain: Callable[..., Any] | None
    differentiable: Callable[..., Any] | None
    reason: str = ""
    interpreted: Implementation | None = None
    """A Triton implementation that runs in the interpreter: it is compared, not timed."""


def contenders(
    op: Op, case: Case, inputs: Mapping[str, Any], device: torch.device, *, interpreter: bool = False
) -> Iterator[Contender]:
    """List who runs at this case: implementations for this kind of device, the reference on a processor, and peers;
    with ``interpreter`` Triton's on a processor too."""
    host = device.type == "cpu"
    backends = ("torch", "cpu", *(["triton"] if interpreter else [])) if host else ("triton", "cuda")
    taken = set()
    for name, made in op.implementations.items():
        if made.backend not in backends or (case.only and name not in case.only):
            continue
        reason = (made.refusal(**inputs) if made.refusal else None) or ""
        if not reason and not _takes(made.dtypes, op, inputs):
            reason = f"computes in {', '.join(made.dtypes)}"
            if not case.only:
                continue
        plain = differentiable = None
        try:
            if not reason:
                plain = made.load()
                differentiable = made.autograd() if made.autograd else None
        except EXPECTED as error:
            reason = sentence(error)
        taken.add(name)
        interpreted = made if host and made.backend == "triton" else None
        yield Contender(name, False, plain, differentiable, reason, interpreted)
    if host:
        yield Contender("reference", False, op.reference, op.reference)
    for name, peer in op.peers.items():
        if name in case.only if case.only or isinstance(peer, OnHost) else True:
            label = f"{name} (peer)" if name in taken else name
            yield Contender(label, True, peer, None if isinstance(peer, OnHost) else peer)


def _takes(dtypes: tuple[str, ...], op: Op, inputs: Mapping[str, Any]) -> bool:
    used = {
        str(value.dtype).removeprefix("torch.")
        for key, value in inputs.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point() and key not in op.keeps_dtype
    }
    return used <= set(dtypes)


def cases_on(op: Op, device: torch.device) -> list[Case]:
    """Return the operator's cases; on a processor its non-empty examples in float32, named by their shapes."""
    if device.type != "cpu":
        return list(op.cases())
    cases = []
    for index, example in enumerate(op.examples()):
        tensors = [value for value in example.values() if isinstance(value, torch.Tensor)]
        if not tensors or not all(tensor.numel() for tensor in tensors):
            continue
        shape = "x".join(str(side) for side in tensors[0].shape) or "scalar"

        def make(device: torch.device, seed: int, index: int = index) -> Mapping[str, Any]:
            return {
                key: accuracy.prepared(op, key, v, torch.float32, "cpu", seed)
                for key, v in op.examples()[index].items()
            }

        cases.append(Case(f"example {index}, {shape}", make, "float32"))
    return cases


def directions_of(op: Op, case: Case) -> list[str]:
    """List the directions to time at a case."""
    wanted = [d for d in op.directions if not case.directions or d in case.directions]
    return [d for d in wanted if d == "forward" or (op.gradient_cost is not None and op.differentiable)]


def bench_case(
    op: Op,
    case: Case,
    ceilings: Ceilings,
    device: str = "cuda",
    *,
    check: bool = False,
    skip: frozenset[tuple[str, str]] = frozenset(),
    started: Callable[[str, str], None] = lambda contender, direction: None,
    failed: Callable[[], None] = lambda: None,
) -> Iterator[Timing]:
    """Time every contender at one shape.

    Args:
        check: also compare each implementation's results with float64, those of Triton's interpreter on a processor.
        skip: (contender, direction) pairs to leave out.
        started: called before a pair is run, so that a watcher knows who hangs.
        failed: called after the row of a pair that the device, or its memory, did not get through.
    """
    place = torch.device(device)
    first = case.make(place, 0)
    cost = op.cost(**first)
    copies = 1 if place.type == "cpu" else max(2, min(MOST_COPIES, -(-ROTATE_BYTES // max(1, int(cost.bytes)))))
    inputs = [first, *(case.make(place, seed) for seed in range(1, copies))]
    directions = directions_of(op, case)
    for entry in contenders(op, case, first, place, interpreter=check and INTERPRETED):
        for direction in directions:
            if (entry.name, direction) in skip:
                continue
            work = cost if direction == "forward" else _work(op, first, direction, cost)
            floor = floor_seconds(work, ceilings, case.dtype)
            row = Timing(op.name, case.name, direction, entry.name, entry.is_peer, work.bytes, work.flops, floor)
            if entry.reason:
                yield replace(row, reason=entry.reason)
                break
            call = entry.plain if direction == "forward" else entry.differentiable
            if call is None:
                continue
            started(entry.name, direction)
            try:
                yield _measure(op, entry, direction, call, inputs, row, place, check)
            except EXPECTED as error:
                wrong = not (entry.is_peer or isinstance(error, Unavailable))
                yield replace(row, reason=sentence(error), wrong=wrong)
                if isinstance(error, RuntimeError) and not isinstance(error, Unavailable):
                    failed()
            if place.type == "cuda":
                torch.cuda.synchronize()  # an error that the device reports late belongs to this contender
                torch.cuda.empty_cache()


def _work(op: Op, inputs: Mapping[str, Any], direction: str, forward: Cost) -> Cost:
    assert op.gradient_cost is not None
    backward = op.gradient_cost(**inputs)
    return forward + backward if direction == "both" else backward


def _measure(
    op: Op,
    entry: Contender,
    direction: str,
    call: Callable[..., Any],
    inputs: list[Mapping[str, Any]],
    row: Timing,
    place: torch.device,
    check: bool,
) -> Timing:
    if entry.interpreted is not None:
        row = _compared(row, *accuracy.at_example(op, entry.interpreted, inputs[0], direction))
        return replace(row, reason="interpreted: not timed")
    if isinstance(call, OnHost):
        on_host = {key: _to(value, "cpu") for key, value in inputs[0].items()}
        return _with_times(row, timing.time_host([lambda: call(**on_host)], 5, 5.0), "host")
    if place.type == "cpu":
        calls = [_call(op, call, values, direction, seed) for seed, values in enumerate(inputs)]
        many = calls * max(1, int(2e-4 / max(1e-7, _once(calls[0]))))
        row = _with_times(row, timing.time_host(many), "host")
        made = op.implementations.get(entry.name) if check and not entry.is_peer else None
        return row if made is None else _compared(row, *accuracy.at_example(op, made, inputs[0], direction))
    with timing.own_stream():
        calls = [_call(op, call, values, direction, seed) for seed, values in enumerate(inputs)]
        peak, result = _memory(calls[0])
    row = replace(row, peak_bytes=peak, result_bytes=result)
    if row.flops > HEAVY * row.bytes:
        time.sleep(REST_SECONDS)
    try:
        row = _with_times(row, timing.time_graph(calls), "graph")
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        torch.cuda.synchronize()
        row = _with_times(row, timing.time_eager(calls), "eager")
    del calls
    if check and not entry.is_peer:
        off, theirs, allowed = accuracy.at_case(op, call, inputs[0], direction)
        row = _compared(row, off, theirs, allowed)
    return row


def _compared(row: Timing, off: float | None, theirs: float | None, allowed: float | None) -> Timing:
    """Return a row with the errors that ``accuracy`` found."""
    if off is None or allowed is None:
        return replace(row, note="not compared: float64 at this shape takes more memory than there is")
    return replace(row, error=off, torch_error=theirs, allowed_error=allowed, wrong=not off <= allowed)


def _with_times(row: Timing, times: list[float], method: str) -> Timing:
    median = statistics.median(times)
    return replace(row, seconds=median, fastest=min(times), slowest=max(times), runs=len(times), method=method)


def run_once(op: Op, call: Callable[..., Any], inputs: Mapping[str, Any], direction: str) -> None:
    """Run once without timing."""
    with timing.own_stream():
        _call(op, call, inputs, direction, 0)()
    torch.cuda.synchronize()


def _once(call: Callable[[], Any]) -> float:
    call()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _memory(call: Callable[[], Any]) -> tuple[int, int]:
    """Measure (most bytes allocated above those before, bytes of the result) of one run, the second one."""
    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = call()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    tensors = [result] if isinstance(result, torch.Tensor) else list(result or ())
    return peak, sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor))


def _to(value: Any, device: str) -> Any:
    return value.to(device) if hasattr(value, "to") else value


def _call(op: Op, call: Callable[..., Any], inputs: Mapping[str, Any], direction: str, seed: int) -> Callable[[], Any]:
    """Bind one run of one direction to one set of inputs, as a function without arguments."""
    if direction == "forward":
        return lambda: call(**inputs)
    given = {k: v for k, v in inputs.items() if k in op.differentiable and isinstance(v, torch.Tensor)}
    leaves = {**inputs, **{k: v.detach().requires_grad_() for k, v in given.items()}}
    wanted = [leaves[k] for k in given]

    def listed(made: Any) -> list[torch.Tensor]:
        return [made] if isinstance(made, torch.Tensor) else list(made)

    def upstream(made: list[torch.Tensor]) -> list[torch.Tensor]:
        generator = torch.Generator(made[0].device).manual_seed(seed)
        return [torch.randn(o.shape, device=o.device, dtype=o.dtype, generator=generator) for o in made]

    if direction == "backward":
        outputs = listed(call(**leaves))
        given_upstream = upstream(outputs)
        return lambda: torch.autograd.grad(outputs, wanted, given_upstream, retain_graph=True)
    drawn = upstream(listed(call(**leaves)))
    return lambda: torch.autograd.grad(listed(call(**leaves)), wanted, drawn)


def sentence(error: BaseException) -> str:
    """Describe an error on one line of at most 200 characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    kind = "" if isinstance(error, Unavailable | ValueError) else f"{type(error).__name__}: "
    return (kind + text)[:200]
