"""Tilings of ``--deterministic`` on one Hopper GPU, chosen where they run: in a chain of whole layers.

    python benchmarks/engine/invariant_layers.py [SECTION ...] [--rows 1,16,256,64] [--out FILE]
    [--replays 6]

Sections: products, attention, layers. ``products`` chooses for each number of rows, one product after another, by the
time of whole layers: what a launch fetches while others end depends on the shared memory that they leave. ``attention``
has every way to share decode rows of few items among warps and blocks. All tilings must have the same bits. ``layers``
is that of ``invariant.py``, with the choices made before it. Times in microseconds; ``invariant.py`` says how they are
taken.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import _paths  # noqa: F401
from benchmarks import record
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
                ways += [decode_spans.SpansHopperTiling(ranks, warps, 8 if warps == 1 else 3)]
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    timed: dict[str, Callable[[int], Iterator[dict[str, Any]]]] = {
        "products": products,
        "attention": clusters,
        "layers": invariant_times.layers,
    }
    parser.add_argument("sections", nargs="*", default=list(timed))
    parser.add_argument("--out", type=Path, default=Path("invariant_layers.json"))
    parser.add_argument("--rows", default="")
    parser.add_argument("--replays", type=int, default=6)
    options = parser.parse_args()
    if options.rows:
        timed["products"] = partial(products, rows_tried=[int(rows) for rows in options.rows.split(",")])
    options.out.parent.mkdir(parents=True, exist_ok=True)
    environment = record.environment(("torch", "triton"))
    result: dict[str, Any] = {"environment": {**environment, "gpu": torch.cuda.get_device_name()}}
    torch.manual_seed(0)
    with torch.inference_mode():
        for section in options.sections:
            began = time.monotonic()
            result[section] = []
            try:
                for row in timed[section](options.replays):
                    result[section].append(row)
                    options.out.write_text(json.dumps(result, indent=1) + "\n")
                    print(" ".join(f"{key}={value}" for key, value in row.items()), flush=True)
            except Exception:
                traceback.print_exc()
            print(f"-- {section}: {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
