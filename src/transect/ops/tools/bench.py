"""Times every implementation and peer of an operator at its real shapes, beside the floor of the device.

Each contender is captured in one CUDA graph of several calls on different inputs, together larger than the L2 cache,
whose results are all kept, so that nothing is read from or left in a cache. The time is the median over replays. The
floor is ``Op.cost`` over the ceilings of ``hardware/``: FLOPs by the rate of the dtype, bytes by the copy bandwidth
(the read bandwidth where less than a tenth of the bytes is written).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ...hardware.ceilings import Ceilings
from ..registry import Case, Cost, Op, Unavailable

ROTATE_BYTES = 400 * 2**20
REPLAYS = 15


@dataclass(frozen=True, slots=True)
class Timing:
    """One contender at one shape, forward or backward."""

    op: str
    case: str
    direction: str
    contender: str
    is_peer: bool
    seconds: float
    fastest: float
    slowest: float
    runs: int
    bytes: float
    flops: float
    floor_seconds: float

    @property
    def of_floor(self) -> float:
        """Floor over time: 1 is all that the device can do."""
        return self.floor_seconds / self.seconds


def floor_seconds(cost: Cost, ceilings: Ceilings, dtype: str) -> float:
    """The least time for this work: arithmetic or bytes, whichever takes longer."""
    reading = cost.bytes_written < 0.1 * cost.bytes
    bandwidth = ceilings.read_bytes_per_second if reading else ceilings.copy_bytes_per_second
    return cost.floor(ceilings.flops_per_second[dtype], bandwidth)


def time_graph(calls: list[Callable[[], Any]], replays: int = REPLAYS) -> list[float]:
    """Seconds of one call, for each replay of a graph that holds ``calls`` one after another."""
    kept: list[Any] = []
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            calls[0]()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="relaxed"):
        kept.extend(call() for call in calls)
    times = []
    for replay in range(replays + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if replay >= 2:
            times.append(start.elapsed_time(end) * 1e-3 / len(calls))
    return times


def contenders(op: Op) -> Iterator[tuple[str, bool, Callable[..., Any], Callable[..., Any] | None]]:
    """(name, is a peer, plain callable, callable with gradients)."""
    for name, made in op.implementations.items():
        if made.backend == "torch":
            continue
        try:
            yield name, False, made.load(), made.autograd() if made.autograd else None
        except Unavailable:
            continue
    for name, peer in op.peers.items():
        yield name, True, peer, peer


def bench_case(op: Op, case: Case, ceilings: Ceilings, *, backward: bool = True) -> Iterator[Timing]:
    """Time every contender at one shape, on the current CUDA device."""
    first = case.make(torch.device("cuda"), 0)
    cost = op.cost(**first)
    copies = max(2, min(16, -(-ROTATE_BYTES // int(cost.bytes))))
    inputs = [first, *(case.make(torch.device("cuda"), seed) for seed in range(1, copies))]
    for name, is_peer, plain, differentiable in contenders(op):
        yield _timing(op, case, "forward", name, is_peer, [_bind(plain, i) for i in inputs], cost, ceilings)
        if not (backward and op.gradient_cost and op.differentiable and differentiable):
            continue
        calls = [_backward_call(op, differentiable, i, seed) for seed, i in enumerate(inputs)]
        yield _timing(op, case, "backward", name, is_peer, calls, op.gradient_cost(**first), ceilings)


def _bind(call: Callable[..., Any], inputs: Mapping[str, Any]) -> Callable[[], Any]:
    return lambda: call(**inputs)


def _backward_call(op: Op, call: Callable[..., Any], inputs: Mapping[str, Any], seed: int) -> Callable[[], Any]:
    leaves = {k: v.detach().requires_grad_() if k in op.differentiable else v for k, v in inputs.items()}
    made = call(**leaves)
    outputs = [made] if isinstance(made, torch.Tensor) else list(made)
    generator = torch.Generator("cuda").manual_seed(seed)
    upstream = [torch.randn(o.shape, device=o.device, dtype=o.dtype, generator=generator) for o in outputs]
    wanted = [leaves[k] for k in op.differentiable]
    return lambda: torch.autograd.grad(outputs, wanted, upstream, retain_graph=True)


def _timing(
    op: Op,
    case: Case,
    direction: str,
    name: str,
    is_peer: bool,
    calls: list[Callable[[], Any]],
    cost: Cost,
    ceilings: Ceilings,
) -> Timing:
    times = time_graph(calls)
    return Timing(
        op.name,
        case.name,
        direction,
        name,
        is_peer,
        statistics.median(times),
        min(times),
        max(times),
        len(times),
        cost.bytes,
        cost.flops,
        floor_seconds(cost, ceilings, case.dtype),
    )
