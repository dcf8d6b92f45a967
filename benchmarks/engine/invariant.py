"""The cost of ``--deterministic`` on one Hopper GPU: products, attention and whole layers, and their bits.

    python benchmarks/engine/invariant.py [SECTION ...] [--out FILE] [--replays 9]

Sections: bits, layers, attention, prefill, products. ``bits`` counts, for every tiling, the outputs that differ from
those of ``fixed_order.product`` and the like: all must be 0. Products run in chains of launches on weights past
the L2 cache, with 1, 2 and 4 parts of K, each with the fastest tiling and with the one that the rule takes. Times are
medians in microseconds; variants of a size alternate. A section that fails does not stop the others.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
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
from benchmarks.engine.decoder_layer import Chain
from benchmarks.ops.graph_time import graph_times
from transect.engine.executors.gpu.setup import gpu_ops
from transect.ops.attention.paged import decode_spans, dispatch, prefill
from transect.ops.attention.paged.batch import PagedBatch
from transect.ops.linear import fixed_order
from transect.ops.linear.few_rows import invariant
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
    "7B down": (3584, 18944, False), "0.6B down": (1024, 3072, False),
}  # fmt: skip
"""N, K, and if it has a gate."""
ROWS = (1, 8, 16, 32, 64, 128, 200, 256)
PARTS = (1, 2, 4)
Calls = dict[str, Callable[[], Any]]


def medians(variants: dict[str, Sequence[Callable[[], Any]]], replays: int) -> dict[str, float]:
    """Measure the median microseconds of a call of each variant, alternating three times."""
    found: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(3):
        for name, calls in variants.items():
            try:
                found[name] += graph_times(calls, max(2, replays // 3))
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
    rows = HopperRows()
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
                found = list(invariant.candidates(m, n // 2 if gated else n, k, parts, gated=gated))
                for tiling, order in found:
                    y = rows(x[:m], weight, None if gated else bias, tiling=tiling, order=order)
                    checked += 1
                    if not torch.equal(y, whole[:m]):
                        wrong.append((m, dataclasses.astuple(tiling), order, int((y != whole[:m]).sum())))
            yield f"{name}, {parts} parts: hopper.py", checked, len(wrong)
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
    for fp8 in (True, False):
        n, k, _ = SIZES["8B qkv"]
        values, x, bias = torch.randn(n, k, device="cuda"), torch.randn(600, k, **BF16), torch.randn(n, **BF16)
        codes, scale = scaled8_rounding.rounded(values, fp8)
        product = scaled8_tiles.Tiles8(hopper=scaled8_hopper.HopperRows8() if fp8 else None, unsplit=True)
        whole = product(x, codes, scale, bias, fp8)
        differing = sum(
            not torch.equal(product(x[:m].contiguous(), codes, scale, bias, fp8), whole[:m])
            for m in (1, 16, 17, 32, 64, 128, 200, 256, 257, 512)
        )
        yield "8B qkv fp8" if fp8 else "8B qkv int8", 10, differing


TILES = {"mma.sync": (16, 1), "wgmma": (64, 4)}
"""Decode rows by single warps and by warpgroups: rows of a tile, warps."""
PROMPTS = {"64 rows": (64, 4), "128 rows": (128, 8)}


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
    context, heads, d = 1500, 32, 128
    keys, values, tables = cache_of(1, context)
    q = torch.randn(context, heads, d, **BF16)
    scale = d**-0.5
    for window in (None, 300):
        made = {}
        for name, (bm, warps) in PROMPTS.items():
            tiling = prefill.PrefillTiling(bm=bm, warps=warps, span=prefill.SPAN)
            made[name] = dispatch.PagedTriton(tiling, spans=decode_spans.TILING)(
                q, keys, values, prompt_batch(tables, 0, context), scale, window
            )
        whole = made["64 rows"]
        yield f"attention, window {window}: prompts in tiles of 128", 1, int((made["128 rows"] != whole).sum())
        chunk = dispatch.uniform()(q[700:933], keys, values, prompt_batch(tables, 700, 933), scale, window)
        yield f"attention, window {window}: a chunk", 1, int((chunk != whole[700:933]).sum())
        at = [0, 15, 63, 64, 255, 256, 257, 700, 1023, 1024, 1499]
        lengths = torch.tensor(at, device="cuda", dtype=torch.int32) + 1
        starts = torch.arange(len(at) + 1, device="cuda", dtype=torch.int32)
        batch = PagedBatch(tables.expand(len(at), -1).contiguous(), starts, lengths, 16)
        for name, (bm, warps) in TILES.items():
            spans = dataclasses.replace(decode_spans.TILING, bm=bm, warps=warps)
            found = dispatch.PagedTriton(prefill.SPAN_TILING, spans=spans)(q[at], keys, values, batch, scale, window)
            differing = (found != whole[at]).flatten(1).sum(1).tolist()
            yield f"attention, window {window}: decode rows by {name}", len(at), sum(map(bool, differing))
            if any(differing):
                off = float((found.float() - whole[at].float()).abs().max())
                print(f"     numbers that differ at {at}: {differing}, by {off:.1e}", flush=True)


# --------------------------------------------------------------------------------------------------------------- times


def products(replays: int) -> Iterator[dict[str, Any]]:
    """Yield for every size and number of rows: the default, and by parts of K the rule's tiling and the fastest."""
    default, launch = gpu_ops(torch.device("cuda")), HopperRows()
    for name, (n, k, gated) in SIZES.items():
        weights = weights_of(n, k)
        for m in ROWS if name.startswith("8B") else (1, 32, 64, 256):
            x = torch.randn(m, k, **BF16)
            op = default.gate_up if gated else default.linear
            calls = {"default": [partial(op, x, weight) for weight in weights]}
            for parts in (1,) if gated or n > fixed_order.NARROW else PARTS:
                rule = invariant.tiling_of(m, n, k, parts, gated, 132)
                for tiling, order in invariant.candidates(m, n // 2 if gated else n, k, parts, gated=gated):
                    mark = "rule " if (tiling, order) == rule else ""
                    label = f"{parts}: {mark}{dataclasses.astuple(tiling)} {order}"
                    one = partial(launch, x, tiling=tiling, order=order, dependent_launch=True)
                    calls[label] = [partial(one, weight) for weight in weights]
            times = medians(calls, replays)
            row: dict[str, Any] = {"size": name, "rows": m, "default": times.pop("default")}
            for parts in PARTS:
                own = {label: us for label, us in times.items() if label.startswith(f"{parts}:")}
                if own:
                    fastest = min(own, key=lambda label: own[label])
                    ruled = next((us for label, us in own.items() if "rule" in label), float("nan"))
                    row |= {f"best {parts}": own[fastest], f"rule {parts}": ruled, f"which {parts}": fastest}
            yield row
        torch.cuda.empty_cache()


def many(replays: int) -> Iterator[dict[str, Any]]:
    """Yield times of products of prefill: the default, and invariant ones by parts of K."""
    default = gpu_ops(torch.device("cuda"))
    for name in ("8B qkv", "8B o", "8B gate_up", "8B down"):
        n, k, gated = SIZES[name]
        weights = weights_of(n, k)[:3]
        for m in (512, 2048, 8192):
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


def attention(replays: int) -> Iterator[dict[str, Any]]:
    """Yield times of attention: the default, and in spans."""
    default, d, heads = gpu_ops(torch.device("cuda")), 128, 32
    for rows, context in ((1, 1024), (8, 1024), (64, 1024), (256, 640), (1, 8192), (16, 4096)):
        keys, values, tables = cache_of(rows, context)
        batch = prompt_batch(tables, context - 1, context)
        q = torch.randn(rows, heads, d, **BF16)
        calls = {"default": [partial(default.paged_attention, q, keys, values, batch, d**-0.5, None)] * 8}
        for name, (bm, warps) in TILES.items():
            for programs, stages, span in itertools.product((7,) if warps == 1 else (2, 4), (2, 3), (128, 256)):
                own = {"bm": bm, "warps": warps, "programs": programs, "stages": stages, "span": span}
                tiling = dataclasses.replace(decode_spans.TILING, **own)
                call = dispatch.PagedTriton(prefill.SPAN_TILING, spans=tiling)
                run = partial(call, q, keys, values, batch, d**-0.5, None)
                calls[f"{name} {programs} {stages} {span}"] = [run] * 8
        yield {"rows": rows, "context": context} | medians(calls, replays)
    for rows, first, last in ((16, 0, 512), (4, 0, 2048), (1, 4096, 8192)):
        keys, values, tables = cache_of(rows, last)
        batch = prompt_batch(tables, first, last)
        q = torch.randn(rows * (last - first), heads, d, **BF16)
        calls = {"default": [partial(default.paged_attention, q, keys, values, batch, d**-0.5, None)] * 2}
        for name, (bm, warps) in PROMPTS.items():
            for span in (0, 128, 256):
                call = dispatch.PagedTriton(prefill.PrefillTiling(bm=bm, warps=warps, span=span))
                calls[f"{name} span {span}"] = [partial(call, q, keys, values, batch, d**-0.5, None)] * 2
        yield {"prompts": rows, "from": first, "to": last} | medians(calls, replays)


def layers(replays: int) -> Iterator[dict[str, Any]]:
    """Yield times of whole layers: as usual and deterministic."""
    for model in ("llama-3.1-8b",):
        for rows in (1, 8, 16, 32, 64, 128, 200, 256):
            chain = Chain(model, rows)
            ops = gpu_ops(torch.device("cuda"), deterministic=True)
            calls: dict[str, Sequence[Callable[[], Any]]] = {"usual": [chain.stack()]}
            calls["norms apart"] = [chain.stack(stream_products=None)]
            found = {name: us / chain.config.n_layers for name, us in medians(calls, replays).items()}
            chain.context.ops = ops
            times = medians({"deterministic": [chain.stack(ops=ops)]}, replays)
            found["deterministic"] = times["deterministic"] / chain.config.n_layers
            chain.context.ops = chain.ops
            again = medians({"usual": [chain.stack()]}, replays)["usual"] / chain.config.n_layers
            found["usual"] = (found["usual"] + again) / 2
            yield {"model": model, "rows": rows, **found, "cost": found["deterministic"] / found["usual"] - 1}
            del chain, calls
            torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    timed = {"layers": layers, "attention": attention, "prefill": many, "products": products}
    parser.add_argument("sections", nargs="*", default=["bits", *timed])
    parser.add_argument("--out", type=Path, default=Path("invariant.json"))
    parser.add_argument("--replays", type=int, default=9)
    options = parser.parse_args()
    environment = record.environment(("torch", "triton"))
    result: dict[str, Any] = {"environment": {**environment, "gpu": torch.cuda.get_device_name()}}
    torch.manual_seed(0)
    with torch.inference_mode():
        for section in options.sections:
            began = time.monotonic()
            kept: list[Any] = []
            result[section] = kept
            try:
                if section == "bits":
                    for name, checked, differing in bits():
                        kept.append({"name": name, "checked": checked, "differing": differing})
                        print(f"{'ok  ' if not differing else 'DIFF'} {name}: {differing} of {checked}", flush=True)
                else:
                    for row in timed[section](options.replays):
                        kept.append(row)
                        shown = {key: round(v, 3) if isinstance(v, float) else v for key, v in row.items()}
                        print(" ".join(f"{key}={value}" for key, value in shown.items()), flush=True)
            except Exception:
                traceback.print_exc()
            print(f"-- {section}: {time.monotonic() - began:.0f} s", flush=True)
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
