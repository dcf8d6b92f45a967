"""The cost of ``--deterministic`` on one Hopper GPU: products, attention and whole layers, and their bits.

    python benchmarks/engine/invariant.py [SECTION ...] [--out FILE] [--replays 6]

Sections: bits, products, cuts, layers, attention, prefill. ``bits`` counts, for every tiling, the outputs that differ
from those of ``fixed_order.py`` and the like: all must be 0; ``codes`` and ``spans`` are its parts of packed weights
and of attention. Products run in chains of launches on weights past the L2 cache, with every tiling and with that of
the rule; the fastest become choices in FILE, which ``layers`` uses after ``products``. ``layers`` also has the time of
each operator by itself. ``cuts`` compares numbers of parts of K. Times are medians in microseconds; variants of a size
alternate. A section that fails does not stop the others. All kernels are compiled first, by as many processes as there
are tiles and variants.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import _paths  # noqa: F401
from benchmarks import record
from benchmarks.engine.decoder_layer import Chain
from benchmarks.ops.graph_time import graph_times
from transect.engine.executors.gpu.setup import gpu_ops
from transect.hardware.device import target_of
from transect.ops.attention.paged import decode_spans, dispatch, prefill
from transect.ops.attention.paged.batch import PagedBatch
from transect.ops.lang import cuda_build
from transect.ops.linear import fixed_order
from transect.ops.linear.few_rows import choices, invariant
from transect.ops.linear.few_rows.choices import Choice
from transect.ops.linear.few_rows.cuda import CudaRows, CudaTiling
from transect.ops.linear.few_rows.hopper import HopperRows
from transect.ops.linear.packed import block_tiles
from transect.ops.linear.packed.eight_bit import scaled8_hopper, scaled8_rounding, scaled8_tiles
from transect.ops.linear.packed.int4 import int4_invariant, int4_matmul, int4_tiles
from transect.ops.linear.packed.int4.int4_packing import arrange_codes
from transect.ops.linear.packed.int4.triton import rebuild

BF16 = {"device": "cuda", "dtype": torch.bfloat16}
SIZES = {
    "8B qkv": (6144, 4096, False), "8B o": (4096, 4096, False), "8B gate_up": (28672, 4096, True),
    "8B down": (4096, 14336, False), "8B head": (128256, 4096, False), "7B qkv": (4608, 3584, False),
    "7B o": (3584, 3584, False), "7B gate_up": (37888, 3584, True), "7B down": (3584, 18944, False),
}  # fmt: skip
"""N, K, and if it has a gate."""
PARTS = (1, 2, 4)
TILES = {f"{name}, {parts}": (name, parts) for name in ("8B qkv", "8B head") for parts in PARTS}
TILES["8B gate_up, 1"] = ("8B gate_up", 1)
"""Sizes and parts of K that have all of Triton's tiles."""
SOURCES = ("small_matmul", "small_matmul_hopper", "paged_decode_hopper", "paged_spans_hopper")
Calls = dict[str, Callable[[], Any]]


def medians(variants: dict[str, Sequence[Callable[[], Any]]], replays: int, rounds: int = 3) -> dict[str, float]:
    """Measure the median microseconds of a call of each variant, alternating."""
    found: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, calls in variants.items():
            try:
                found[name] += graph_times(calls, max(2, replays // rounds))
            except Exception as error:
                print(f"    {name}: {error!r:.200}", flush=True)
                found[name].append(float("inf"))
    return {name: statistics.median(times) * 1e6 for name, times in found.items()}


def weights_of(n: int, k: int) -> list[Tensor]:
    """Return copies of a weight that together do not fit into the L2 cache."""
    return [torch.randn(n, k, **BF16) / k**0.5 for _ in range(max(2, min(12, int(4e8 / (2 * n * k)))))]


# ---------------------------------------------------------------------------------------------------------------- bits


def bits() -> Iterator[tuple[str, int, int]]:
    """Yield (name, checked, differing) for every group of kernels."""
    kernels = CudaRows(), HopperRows()
    for name, (n, k, gated) in SIZES.items():
        if name == "8B head":
            n = 4096 * 4
        weight, bias = torch.randn(n, k, **BF16) / k**0.5, torch.randn(n, **BF16)
        x = torch.randn(1024, k, **BF16)
        for parts in (1,) if gated else PARTS:
            if gated:
                whole = fixed_order.gated(x, weight)
            else:
                whole = fixed_order.product(x, weight, bias, parts=parts)
            checked, wrong = 0, []
            for m in (1, 3, 16, 17, 32, 48, 64, 96, 128, 160, 200, 256):
                for tiling in invariant.candidates(m, n, k, parts, gated=gated):
                    y = invariant.run(*kernels, x[:m], weight, None if gated else bias, tiling, parts, gated=gated)
                    checked += 1
                    if not torch.equal(y, whole[:m]):
                        wrong.append((m, dataclasses.astuple(tiling), int((y != whole[:m]).sum())))
            yield f"{name}, {parts} parts: few rows", checked, len(wrong)
            if wrong:
                print("    ", wrong[:6], flush=True)
            sizes, differing = (1, 40, 64, 65, 128, 129, 300, 512, 513), 0
            for m in sizes:
                call = fixed_order.gated if gated else partial(fixed_order.product, bias=bias, parts=parts)
                differing += not torch.equal(call(x[:m], weight), whole[:m])
            yield f"{name}, {parts} parts: triton", len(sizes), differing
    yield from bits_of_codes()
    yield from bits_of_attention()


def codes_in_4_bits(n: int, k: int, group: int = 128) -> Tensor:
    codes = torch.randint(0, 16, (n, k), device="cuda", dtype=torch.uint8)
    scale = (torch.rand(n, k // group, device="cuda") + 0.5) / 400
    zero = -8 * scale + torch.randn(n, k // group, device="cuda") / 1000
    zero[:, 0] = 1e-12 * zero[:, 0].sign()  # lost in a sum in float32, but for its side of a half
    return arrange_codes(codes, scale.bfloat16(), zero.bfloat16())


def bits_of_codes() -> Iterator[tuple[str, int, int]]:
    call, tiles = int4_invariant.InvariantCodes("cuda"), int4_tiles.Int4Tiles()
    for name in ("8B o", "8B down", "8B qkv"):
        n, k, _ = SIZES[name]
        weight, bias = codes_in_4_bits(n, k), torch.randn(n, **BF16)
        x = torch.randn(600, k, **BF16)
        wide = rebuild(weight, n, torch.bfloat16)
        mantissa, exponent = torch.frexp(int4_matmul.dense(weight, n, torch.float64))
        exact = torch.ldexp((mantissa * 256).round(), exponent - 8).bfloat16()  # rounded once
        yield f"{name} int4: rebuilt", 1, int((wide != exact).sum())
        for parts in PARTS:
            whole, differing = fixed_order.product(x, wide, bias, parts=parts), 0
            for m in (1, 16, 17, 64, 65, 128, 129, 256, 512):
                tiling = block_tiles.choose_tiling(int4_tiles.unit_of(128), m, n, k, 132)
                tiling = block_tiles.in_parts(tiling, m, n, parts)
                differing += not torch.equal(tiles(x[:m], weight, n, bias, tiling=tiling), whole[:m])
            yield f"{name} int4, {parts} parts: tiles", 9, differing
        whole = call(x, weight, n, bias)
        yield f"{name} int4: the product", 1, int((call(x[:33], weight, n, bias) != whole[:33]).sum())
    for kind in (scaled8_hopper.FP8, scaled8_hopper.WHOLE, scaled8_hopper.BLOCKS):
        fp8 = kind is not scaled8_hopper.WHOLE
        n, k, _ = SIZES["8B qkv"]
        values, x, bias = torch.randn(n, k, device="cuda"), torch.randn(600, k, **BF16), torch.randn(n, **BF16)
        codes, scale = scaled8_rounding.rounded(values, fp8)
        if kind is scaled8_hopper.BLOCKS:
            scale = torch.rand(-(-n // 128), -(-k // 128), device="cuda") / 64 + 1e-3
        product = scaled8_tiles.Tiles8(hopper=scaled8_hopper.HopperRows8(kind=kind), unsplit=True)
        whole = product(x, codes, scale, bias, fp8)
        differing = sum(
            not torch.equal(product(x[:m].contiguous(), codes, scale, bias, fp8), whole[:m])
            for m in (1, 16, 17, 32, 64, 128, 200, 256, 257, 512)
        )
        yield f"8B qkv {kind.name}", 10, differing


DECODES: dict[str, dict[str, Any]] = {
    "streamed": {},
    "triton, few rows": {"spans": decode_spans.TILING},
    "triton, many rows": {"spans": decode_spans.NARROW},
}
"""Kernels of decode rows: ``paged_spans_hopper.cu`` where nothing is said."""
PROMPTS = {"128 rows": {}, "64 rows": {"bm": 64, "warps": 4}}
"""Tilings of prompts."""
CONTEXTS = ((1, 1024), (16, 1024), (32, 1024), (64, 1024), (256, 640))
"""Decode rows, and positions of each."""
CHUNKS = ((16, 0, 512), (4, 0, 2048))
"""Prompts, first and last position of each."""


def decodes(name: str) -> dispatch.PagedTriton:
    usual: Any = dispatch.uniform_on_hopper()
    return dataclasses.replace(usual, decode=None, **DECODES[name]) if DECODES[name] else usual


def prompting(name: str) -> dispatch.PagedTriton:
    return dispatch.PagedTriton(dataclasses.replace(prefill.SPAN_TILING, **PROMPTS[name]), in_spans=True)


def cache_of(rows: int, context: int, kv_heads: int = 8, d: int = 128) -> tuple[Tensor, Tensor, Tensor]:
    blocks = rows * -(-context // 16)
    caches = [torch.randn(blocks, kv_heads, 16, d, **BF16) for _ in range(2)]
    tables = torch.randperm(blocks, device="cuda", dtype=torch.int32).view(rows, -1)
    return (*caches, tables)


def prompt_batch(tables: Tensor, first: int, last: int) -> PagedBatch:
    rows = len(tables)
    starts = torch.arange(rows + 1, device="cuda", dtype=torch.int32) * (last - first)
    return PagedBatch(tables, starts, torch.full((rows,), last, device="cuda", dtype=torch.int32), 16)


def bits_of_attention() -> Iterator[tuple[str, int, int]]:
    """Compare decode rows and prompts of every tiling with prompts of the same spans; also with rows of no position,
    with rows of several queries beside them, and with rows kept whole by a warp."""
    context = 1500
    at = sorted({0, 15, 63, 64, 255, 256, 257, 700, 1023, 1024, 1499} | set(range(1, context, 3)))
    lengths = torch.tensor([*(i + 1 for i in at), 0, 0], device="cuda", dtype=torch.int32)
    starts = torch.arange(len(lengths) + 1, device="cuda", dtype=torch.int32)
    for kv_heads, group, d, names in (
        (8, 4, 128, tuple(DECODES)),
        (4, 7, 128, ("streamed",)),
        (8, 4, 64, ("streamed",)),
    ):
        keys, values, tables = cache_of(1, context, kv_heads, d)
        q = torch.randn(context, kv_heads * group, d, **BF16)
        batch = PagedBatch(tables.expand(len(lengths), -1).contiguous(), starts, lengths, 16)
        tail, some = prompt_batch(tables.expand(3, -1).contiguous(), context - 100, context), at[:100]
        mixed = PagedBatch(
            torch.cat([tail.block_tables, batch.block_tables[: len(some)]]),
            torch.cat([tail.query_starts, tail.query_starts[-1] + starts[1 : len(some) + 1]]),
            torch.cat([tail.seq_lens, lengths[: len(some)]]), 16, chunk_rows=3,
        )  # fmt: skip
        whole = prompting("64 rows")(q, keys, values, prompt_batch(tables, 0, context), d**-0.5, None)
        rows = torch.cat([q[at], q[:2]])
        for name in names:
            size = f"{name}, {kv_heads} x {group} heads of {d}"
            call = decodes(name)
            found = call(rows, keys, values, batch, d**-0.5, None)
            yield f"attention, {size}", len(at), int((found[:-2] != whole[at]).flatten(1).any(1).sum())
            yield f"attention, {size}, no position", 2, int((found[-2:] != 0).flatten(1).any(1).sum())
            found = call(torch.cat([*[q[-100:]] * 3, q[some]]), keys, values, mixed, d**-0.5, None)
            expected = torch.cat([*[whole[-100:]] * 3, whole[some]])
            yield f"attention, {size}, mixed", len(found), int((found != expected).flatten(1).any(1).sum())
            if isinstance(call.decode, decode_spans.PagedSpans):
                for count, width in (
                    (1, 64),
                    (2, 32),
                    (8, 64),
                    (16, 64),
                    (16, 16),
                    (3, 94),
                ):
                    last = [i for i in at if i < 16 * width][-count:]
                    ends = torch.tensor([i + 1 for i in last], device="cuda", dtype=torch.int32)
                    few = PagedBatch(tables[:, :width].expand(count, -1).contiguous(), starts[: count + 1], ends, 16)
                    found = call(q[last], keys, values, few, d**-0.5, None)
                    differing = int((found != whole[last]).flatten(1).any(1).sum())
                    yield f"attention, {size}, {count} rows of {16 * width}", count, differing
                call.decode.ROOM = 0
                found = call(rows, keys, values, batch, d**-0.5, None)
                yield f"attention, {size}, whole", len(at), int((found[:-2] != whole[at]).flatten(1).any(1).sum())
    found = prompting("128 rows")(q, keys, values, prompt_batch(tables, 0, context), d**-0.5, None)
    yield "attention, prompts of 128 rows", 1, int((found != whole).sum())


# --------------------------------------------------------------------------------------------------------------- times


def in_order(x: Tensor, weight: Tensor, gated: bool) -> Tensor:
    return fixed_order.gated(x, weight) if gated else fixed_order.product(x, weight)


def products(replays: int) -> Iterator[dict[str, Any]]:
    """Yield for every size and number of rows: the default, the rule's tiling and the fastest, which is kept."""
    default, kernels = gpu_ops(torch.device("cuda")), (CudaRows(), HopperRows())
    for name, (n, k, gated) in SIZES.items():
        weights, all_rows = weights_of(n, k), torch.randn(choices.MOST_ROWS, k, **BF16)
        whole = in_order(all_rows, weights[0], gated)
        for m in choices.ROWS:
            x = all_rows[:m]
            op = default.gate_up if gated else default.linear
            parts = 1 if gated else fixed_order.parts_of(x, n)
            calls = {"default": [partial(op, x, weight) for weight in weights]}
            by_rule = invariant.by_rule(m, n, k, parts, gated)
            tilings = {str(i): tiling for i, tiling in enumerate(invariant.candidates(m, n, k, parts, gated=gated))}
            for label, tiling in tilings.items():
                own = partial(invariant.run, *kernels, x)
                calls[label] = [partial(own, weight, None, tiling, parts, True, gated) for weight in weights]
            for label in list(tilings):
                if not torch.equal(calls[label][0](), whole[:m]):
                    print(f"DIFF {name}, {m} rows: {tilings[label]}", flush=True)
                    del calls[label]
            times = medians(calls, replays, 2)
            usual = times.pop("default")
            fastest = min(times, key=lambda label: times[label])
            ruled = next((us for label, us in times.items() if tilings[label] == by_rule), float("nan"))
            tiling = tilings[fastest]
            by = "cuda" if isinstance(tiling, CudaTiling) else "hopper"
            MEASURED[choices.key(m, n, k, gated, invariant=True)] = Choice(by, tiling)
            yield {
                "size": name, "rows": m, "default": usual, "rule": ruled, "fastest": times[fastest], "by": by,
                "tiling": dataclasses.asdict(tiling), "key": choices.key(m, n, k, gated, invariant=True),
            }  # fmt: skip
        torch.cuda.empty_cache()


def cuts(replays: int) -> Iterator[dict[str, Any]]:
    """Yield the fastest time of narrow weights by their parts of K, over all tilings."""
    kernels = CudaRows(), HopperRows()
    for name in ("8B qkv", "8B o", "8B down"):
        n, k, _ = SIZES[name]
        weights = weights_of(n, k)
        for m in (1, 16, 64, 128, 256):
            x, fastest = torch.randn(m, k, **BF16), {}
            for parts in PARTS:
                calls = {}
                for tiling in invariant.candidates(m, n, k, parts):
                    run = partial(invariant.run, *kernels, x)
                    calls[str(tiling)] = [partial(run, weight, None, tiling, parts, True) for weight in weights]
                times = medians(calls, replays, 2)
                best = min(times, key=lambda each: times[each], default="")
                fastest |= {f"{parts} parts": times.get(best), f"{parts} parts by": best}
            yield {"size": name, "rows": m, **fastest}


MEASURED: dict[str, Choice] = {}
"""The fastest tilings, by their keys."""


def many(replays: int) -> Iterator[dict[str, Any]]:
    """Yield times of products of prefill: the default, and invariant ones by parts of K."""
    default = gpu_ops(torch.device("cuda"))
    for name in ("8B qkv", "8B o", "8B gate_up", "8B down"):
        n, k, gated = SIZES[name]
        weights = weights_of(n, k)[:3]
        for m in (2048, 8192):
            x = torch.randn(m, k, **BF16)
            op = default.gate_up if gated else default.linear
            calls = {"default": [partial(op, x, weight) for weight in weights]}
            if gated:
                calls["fixed"] = [partial(fixed_order.gated, x, weight) for weight in weights]
            else:
                for parts in PARTS:
                    fixed = partial(fixed_order.product, x, parts=parts)
                    calls[f"{parts} parts"] = [partial(fixed, weight) for weight in weights]
            yield {"size": name, "rows": m} | medians(calls, replays)


def attention(replays: int, only: str | None = None) -> Iterator[dict[str, Any]]:
    """Yield times of attention: the default, and in spans. ``only``: run this variant once, to compile it."""
    default, d, heads = gpu_ops(torch.device("cuda")), 128, 32
    for rows, context in CONTEXTS:
        keys, values, tables = cache_of(rows, context)
        batch = prompt_batch(tables, context - 1, context)
        inputs = (torch.randn(rows, heads, d, **BF16), keys, values, batch, d**-0.5, None)
        if only is None:
            calls = {"default": [partial(default.paged_attention, *inputs)] * 8}
            calls |= {name: [partial(decodes(name), *inputs)] * 8 for name in DECODES}
            yield {"rows": rows, "context": context} | medians(calls, replays)
        elif only in DECODES:
            decodes(only)(*inputs)
    for rows, first, last in CHUNKS:
        keys, values, tables = cache_of(rows, last)
        q = torch.randn(rows * (last - first), heads, d, **BF16)
        inputs = (q, keys, values, prompt_batch(tables, first, last), d**-0.5, None)
        if only is None:
            calls = {"default": [partial(default.paged_attention, *inputs)] * 2}
            calls |= {name: [partial(prompting(name), *inputs)] * 2 for name in PROMPTS}
            yield {"prompts": rows, "from": first, "to": last} | medians(calls, replays)
        else:
            (decodes if only in DECODES else prompting)(only)(*inputs)


def compile_all(sections: Sequence[str]) -> None:
    """Build the kernels in CUDA C++ and in Triton that these sections need, each in a process of its own."""
    command = [sys.executable, __file__, "--compile"]
    names = [*TILES] if {"bits", "products", "prefill"} & set(sections) else []
    names += [*DECODES, *PROMPTS] if {"bits", "spans", "attention"} & set(sections) else []
    started = [subprocess.Popen([*command, name]) for name in names]
    with ThreadPoolExecutor() as pool:
        list(pool.map(partial(cuda_build.build, target=target_of().name), SOURCES))
    for process in started:
        process.wait()


def use_measured() -> None:
    """Let ``MEASURED`` win over the files of choices."""
    known = choices.choices
    choices.choices = lambda name: {**known(name), **MEASURED}  # type: ignore[assignment]
    invariant.tiling_of.cache_clear()


def layers(replays: int) -> Iterator[dict[str, Any]]:
    """Yield times of whole layers: as usual and deterministic."""
    use_measured()
    model = "llama-3.1-8b"
    for rows in (1, 16, 64, 256):
        chain = Chain(model, rows)
        ops = gpu_ops(torch.device("cuda"), deterministic=True)
        found: dict[str, list[float]] = {"usual": [], "norms apart": [], "deterministic": [], "fast attention": []}
        for _ in range(2):
            for name, own in (
                ("usual", chain.ops),
                ("norms apart", dataclasses.replace(chain.ops, stream_products=None)),
                ("deterministic", ops),
                ("fast attention", dataclasses.replace(ops, paged_attention=chain.ops.paged_attention)),
            ):
                chain.context.ops = own
                call = chain.stack(ops=own)
                found[name] += [seconds * 1e6 / chain.config.n_layers for seconds in graph_times([call], replays)]
        times: dict[str, Any] = {name: statistics.median(each) for name, each in found.items()}
        times["cost"] = times["deterministic"] / times["usual"] - 1
        usual = chain.ops
        for name, own in ("usual", dataclasses.replace(usual, stream_products=None)), ("deterministic", ops):
            chain.ops = chain.context.ops = own
            chain.stack()
            calls = {label: [call] for label, call, _ in chain.parts()}
            times[f"{name} parts"] = {k: us / chain.config.n_layers for k, us in medians(calls, replays, 2).items()}
        yield {"model": model, "rows": rows, **times}
        del chain
        torch.cuda.empty_cache()


def counts(found: Callable[[], Iterator[tuple[str, int, int]]]) -> Iterator[dict[str, Any]]:
    """Yield a row for each count of results that differ."""
    for name, checked, differing in found():
        yield {"name": name, "checked": checked, "differing": differing}


def shown(row: dict[str, Any]) -> str:
    """Format a row for the terminal."""
    if "differing" in row:
        return "{} {name}: {differing} of {checked}".format("DIFF" if row["differing"] else "ok  ", **row)
    return " ".join(f"{key}={round(v, 3) if isinstance(v, float) else v}" for key, v in row.items())


def write(sections: Sequence[str], work: Mapping[str, Callable[[], Iterator[dict[str, Any]]]], out: Path) -> None:
    """Measure sections; print and write their rows as they come. A section that fails does not stop the others."""
    out.parent.mkdir(parents=True, exist_ok=True)
    environment = record.environment(("torch", "triton"))
    result: dict[str, Any] = {"environment": {**environment, "gpu": torch.cuda.get_device_name()}}
    torch.manual_seed(0)
    with torch.inference_mode():
        for section in sections:
            began = time.monotonic()
            result[section] = []
            try:
                for row in work[section]():
                    result[section].append(row)
                    out.write_text(json.dumps(result, indent=1) + "\n")
                    print(shown(row), flush=True)
            except Exception:
                traceback.print_exc()
            print(f"-- {section}: {time.monotonic() - began:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    counted = {"bits": bits, "codes": bits_of_codes, "spans": bits_of_attention}
    timed = {"products": products, "cuts": cuts, "layers": layers, "attention": attention, "prefill": many}
    parser.add_argument("sections", nargs="*", default=["bits", *timed])
    parser.add_argument("--out", type=Path, default=Path("invariant.json"))
    parser.add_argument("--replays", type=int, default=6)
    parser.add_argument("--compile", help="only compile this variant of attention, or these tiles")
    options = parser.parse_args()
    if options.compile:
        with torch.inference_mode():
            if options.compile in TILES:
                name, parts = TILES[options.compile]
                n, k, gated = SIZES[name]
                weight = torch.randn(n, k, **BF16)
                for m in (64, 65, 128, 129, 512, 513, 1024):
                    x = torch.randn(m, k, **BF16)
                    fixed_order.gated(x, weight) if gated else fixed_order.product(x, weight, parts=parts)
            else:
                list(attention(1, options.compile))
        return
    compile_all(options.sections)
    work: dict[str, Callable[[], Iterator[dict[str, Any]]]]
    work = {section: partial(rows, options.replays) for section, rows in timed.items()}
    write(options.sections, work | {section: partial(counts, found) for section, found in counted.items()}, options.out)


if __name__ == "__main__":
    main()
