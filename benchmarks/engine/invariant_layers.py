"""Tilings of ``--deterministic`` on one Hopper GPU, chosen where they run: in a chain of whole layers.

    python benchmarks/engine/invariant_layers.py [SECTION ...] [--rows 1,16,256,64] [--out FILE]
    [--replays 6]

Sections: products, attention, layers; swaps if asked for. ``products`` chooses for each number of rows, one product
after another, by the time of whole layers: what a launch fetches while others end depends on the shared memory that
they leave. ``attention`` has every way to share decode rows of few items among warps and blocks. All tilings must have
the same bits. ``layers`` is that of ``invariant.py``, with the choices made before it. ``swaps`` times layers of one
mode with operators of the other. Times in microseconds; ``invariant.py`` says how they are taken.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import _paths  # noqa: F401
from benchmarks.engine import invariant as invariant_times
from benchmarks.engine.decoder_layer import Chain
from benchmarks.ops.graph_time import graph_times
from transect.engine.executors.gpu.setup import gpu_ops
from transect.ops.attention.paged import decode_spans
from transect.ops.linear import fixed_order
from transect.ops.linear.few_rows import choices, invariant
from transect.ops.linear.few_rows.choices import Choice
from transect.ops.linear.few_rows.cuda import CudaTiling
from transect.ops.opset import OpSet

ROWS = (1, 16, 256, 64)
"""Numbers of rows without ``--rows``, in this order."""
CONTEXTS = ((1, 256), (1, 512), (1, 1024), (2, 1024), (4, 1024), (8, 1024), (1, 4096), (4, 4096), (1, 8192))
"""Decode rows, and positions of each."""


def layer_seconds(chain: Chain, ops: OpSet, expected: Tensor, key: str, choice: Choice, replays: int) -> float:
    """Measure a layer with a choice for one product; infinite if a bit differs."""
    invariant_times.MEASURED[key] = choice
    invariant.tiling_of.cache_clear()
    call = chain.stack(ops=ops)
    if not torch.equal(call(), expected):
        print(f"DIFF {key}: {choice}", flush=True)
        return float("inf")
    return statistics.median(graph_times([call], replays)) / chain.config.n_layers


def products(replays: int, rows_tried: Sequence[int] = ROWS) -> Iterator[dict[str, Any]]:
    """Yield for every product the tilings with which a layer takes the least time, of which the first is
    kept; the other products have those chosen so far. A tiling that changes a bit of the result fails."""
    invariant_times.use_measured()
    for rows in rows_tried:
        torch.cuda.empty_cache()
        chain = Chain("llama-3.1-8b", rows)
        ops = gpu_ops(torch.device("cuda"), deterministic=True)
        chain.context.ops = ops
        expected = chain.stack(ops=ops)()
        for name in ("gate_up", "down", "qkv", "o"):
            n, k, gated = invariant_times.SIZES[f"8B {name}"]
            parts = 1 if gated else fixed_order.parts_on_hopper(n, k)
            key = choices.key(rows, n, k, gated, invariant=True)
            before = invariant.tiling_of(rows, n, k, parts, gated, torch.device("cuda"))
            tried: dict[str, Choice] = {}
            seconds = partial(layer_seconds, chain, ops, expected, key)
            times: dict[str, float] = {}
            for tiling in dict.fromkeys([before, *invariant.candidates(rows, n, k, parts, gated=gated)]):
                by = "cuda" if isinstance(tiling, CudaTiling) else "hopper"
                label = f"{by} {' '.join(str(v) for v in dataclasses.astuple(tiling))}"
                tried[label] = Choice(by, tiling)
                times[label] = seconds(tried[label], 2)
            best = sorted(times, key=lambda label: times[label])[:5]
            first = next(iter(times))
            again = {label: seconds(tried[label], replays) * 1e6 for label in dict.fromkeys([first, *best])}
            fastest = min(again, key=lambda label: again[label])
            invariant_times.MEASURED[key] = tried[fastest]
            invariant.tiling_of.cache_clear()
            yield {
                "size": name, "rows": rows, "before": again[first], "fastest": again[fastest], "by": tried[fastest].by,
                "tiling": dataclasses.asdict(tried[fastest].tiling), "key": key, "tried": len(times), "best": again,
            }  # fmt: skip


def clusters(replays: int) -> Iterator[dict[str, Any]]:
    """Yield times of decode rows by every way to share them among warps and blocks; all must have the same bits."""
    kernel, default = decode_spans.PagedSpans(), gpu_ops(torch.device("cuda"))
    for rows, context in CONTEXTS:
        keys, values, tables = invariant_times.cache_of(rows, context)
        batch = invariant_times.prompt_batch(tables, context - 1, context)
        inputs = (torch.randn(rows, 32, 128, **invariant_times.BF16), keys, values, batch, 128**-0.5)
        spans = -(-context // decode_spans.SPAN)
        ways = [decode_spans.SpansHopperTiling()]
        for ranks in (2, 4, 8):
            if ranks < 2 * spans and (warps := -(-spans // ranks)) <= decode_spans.MOST_WARPS:
                ways += [decode_spans.SpansHopperTiling(ranks, warps)]
            if ranks < 2 * spans or ranks == 2:
                ways += [decode_spans.SpansHopperTiling(ranks, 1, together=True)]
        whole = kernel(*inputs)
        calls = {"default": [partial(default.paged_attention, *inputs)] * 8}
        for way in ways:
            if not torch.equal(kernel(*inputs, tiling=way), whole):
                print(f"DIFF {rows} x {context}: {way}", flush=True)
            shared = "together" if way.together else "warp each"
            calls[f"{way.ranks} {shared}" if way.ranks else "even"] = [partial(kernel, *inputs, tiling=way)] * 8
        yield {"rows": rows, "context": context} | invariant_times.medians(calls, replays)


SIDES = ("qkv", "o", "down", "gate_up", "paged_attention", "add_rms_norm", "rotary_kv_write")
"""Operators of a layer that ``swaps`` takes from the other mode; the first three are products of ``linear``."""


def with_parts(base: OpSet, names: Sequence[str], other: Callable[[str], Callable[..., Any]]) -> OpSet:
    """Return ``base`` with some of ``SIDES`` replaced by what ``other`` returns for their operators."""
    sizes = {invariant_times.SIZES[f"8B {name}"][:2]: name for name in SIDES[:3]}

    taken = set(names) & set(SIDES[:3])
    of_taken = other("linear") if taken else None

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        size = (weight.shape[0], weight.shape[1])
        return (of_taken if of_taken and sizes.get(size) in taken else base.linear)(x, weight, bias)

    return dataclasses.replace(base, linear=linear, **{name: other(name) for name in names if name not in taken})


def swaps(replays: int, rows_tried: Sequence[int] = (256, 16)) -> Iterator[dict[str, Any]]:
    """Yield times of layers in which some operators are those of the other mode, by which the cost is found, and the
    kernels of a layer of each mode with their beginnings and ends."""
    for rows in rows_tried:
        torch.cuda.empty_cache()
        chain = Chain("llama-3.1-8b", rows)
        usual = dataclasses.replace(chain.ops, stream_products=None)
        fixed = gpu_ops(torch.device("cuda"), deterministic=True)

        def late(name: str, fixed: OpSet = fixed) -> Callable[..., Any]:
            return partial(getattr(fixed, name), dependent_launch=False)

        def by_triton(name: str) -> Callable[..., Any]:
            return fixed_order.product if name == "linear" else lambda x, weight, bias: fixed_order.gated(x, weight)

        several = (("qkv", "o"), ("qkv", "o", "down"), ("qkv", "o", "down", "gate_up"))
        ways = {"usual": usual, "fixed": fixed}
        for names in [*((name,) for name in SIDES), *several]:
            label = " ".join(names)
            ways[f"fixed, usual {label}"] = with_parts(fixed, names, partial(getattr, usual))
            ways[f"usual, fixed {label}"] = with_parts(usual, names, partial(getattr, fixed))
        ways["fixed, late rotary, attention"] = with_parts(fixed, ("paged_attention", "rotary_kv_write"), late)
        for name in SIDES:
            ways[f"fixed, late {name}"] = with_parts(fixed, (name,), late)
        for name in SIDES[:4]:
            ways[f"fixed, triton {name}"] = with_parts(fixed, (name,), by_triton)
        times: dict[str, list[float]] = {}
        for label in [*ways] * 3:
            chain.context.ops = ways[label]
            try:
                each = graph_times([chain.stack(ops=ways[label])], replays)
                times.setdefault(label, []).extend(each)
            except Exception as error:
                print(f"FAILED {label}: {error!r:.300}", flush=True)
        layers = chain.config.n_layers
        for label, found in times.items():
            yield {"rows": rows, "way": label, "us": statistics.median(found) * 1e6 / layers}
        for label in ("usual", "fixed"):
            chain.context.ops = ways[label]
            yield {"rows": rows, "kernels of": label, "us": kernels_of(chain.stack(ops=ways[label]), layers)}


def kernels_of(call: Callable[[], Any], layers: int) -> list[tuple[str, float, float]]:
    """Return (name, beginning, end) of a layer's kernels in the middle of a graph, in microseconds."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
    events = [
        (event.start_ns(), event.start_ns() + event.duration_ns(), event.name()[:70])
        for event in trace.profiler.kineto_results.events()
        if event.device_type() == torch.autograd.DeviceType.CUDA
    ]
    events.sort()
    replayed = events[-(len(events) // 3) :]
    some = replayed[len(replayed) * 2 // layers : len(replayed) * 2 // layers + len(replayed) // layers + 2]
    return [(name, (begin - some[0][0]) / 1e3, (end - some[0][0]) / 1e3) for begin, end, name in some]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    timed: dict[str, Callable[[int], Iterator[dict[str, Any]]]] = {
        "products": products,
        "attention": clusters,
        "layers": invariant_times.layers,
        "swaps": swaps,
    }
    parser.add_argument("sections", nargs="*", default=["products", "attention", "layers"])
    parser.add_argument("--out", type=Path, default=Path("invariant_layers.json"))
    parser.add_argument("--rows", default="")
    parser.add_argument("--replays", type=int, default=6)
    options = parser.parse_args()
    if options.rows:
        rows_tried = [int(rows) for rows in options.rows.split(",")]
        timed |= {"products": partial(products, rows_tried=rows_tried), "swaps": partial(swaps, rows_tried=rows_tried)}
    work = {section: partial(rows, options.replays) for section, rows in timed.items()}
    invariant_times.write(options.sections, work, options.out)


if __name__ == "__main__":
    main()
