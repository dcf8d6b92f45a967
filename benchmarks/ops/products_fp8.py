"""Products of 17 to 256 rows in 8 bits on one Hopper GPU: tilings of ``scaled8_hopper.py``, beside the Triton kernel.

    python benchmarks/ops/products_fp8.py OUT.json [NAME ...] [--rows 32,48,64,96,128,160,192,224,256] [--seconds S]
    python benchmarks/ops/products_fp8.py OUT.json --kind int8 [...]
    python benchmarks/ops/products_fp8.py OUT.json --short FILE

NAME: of ``MODELS``; default: all. Both sides are rounded before, and each launch begins while the one before ends, on
copies of the weight that do not fit into the L2 cache. With a gate the Triton kernel's time is that of the product
alone; ``gate`` and ``round`` are what follows either. Every time is kept, because the rule by shape is fitted to them.
``--kind``: fp8, int8 or blocks (fp8 with scales of blocks). The first result of each size is compared with the Triton
kernel's. ``--short``: write of OUT.json, which is there, the quickest and what the rule takes into FILE.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import _paths  # noqa: F401
from benchmarks import record
from benchmarks.ops.graph_time import graph_times
from transect.ops.activation import swiglu
from transect.ops.linear.few_rows.hopper import HopperTiling, candidates
from transect.ops.linear.few_rows.rule import MOST_PARTS
from transect.ops.linear.packed.eight_bit import scaled8_hopper, scaled8_rounding, scaled8_tiles
from transect.ops.linear.packed.eight_bit.scaled8_hopper import BLOCKS, FP8, WHOLE, HopperRows8, Kernels8
from transect.ops.linear.packed.eight_bit.scaled8_rounding import BLOCK

READ, RATE = 4.35e12, 1.3e15
"""Bytes and FLOPs a second."""
ROWS = (32, 48, 64, 96, 128, 160, 192, 224, 256)
MODELS = {
    "llama-3.1-8b": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
    "llama-3.2-3b": ((5120, 3072), (3072, 3072), (16384, 3072), (3072, 8192)),
    "qwen2.5-7b": ((4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944)),
    "qwen3-14b": ((7168, 5120), (5120, 5120), (34816, 5120), (5120, 17408)),
    "llama-3.3-70b": ((10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672)),
    "llama-3.2-1b": ((3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192)),
}
"""N and K of QKV, the output, gate over up, and down."""
KINDS = {"fp8": FP8, "int8": WHOLE, "blocks": BLOCKS}
GATED = 2
"""Which of them has the gate."""
REPLAYS = 3


def microseconds(calls: Sequence[Callable[[], Any]]) -> float:
    """Measure the microseconds of one call, the median of replays."""
    return statistics.median(graph_times(calls, REPLAYS)) * 1e6


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def weight_of(n: int, k: int, kind: Kernels8) -> tuple[Tensor, Tensor]:
    """Generate codes and scales."""
    codes, scale = scaled8_rounding.rounded(random(n, k), kind is not WHOLE)
    if kind is BLOCKS:
        scale = torch.rand(-(-n // BLOCK), -(-k // BLOCK), device="cuda") / 64 + 1e-3
    return codes, scale


def size(kernel: HopperRows8, weights: Sequence[Sequence[Tensor]], m: int, gated: bool) -> dict[str, Any]:
    """Measure the microseconds of one size by tiling, and of its peers."""
    n, k = weights[0][0].shape
    columns = n // 2 if gated else n
    form = (kernel.kind is not WHOLE, kernel.kind is BLOCKS)
    rows = scaled8_rounding.triton_rounded(random(m, k), *form)
    tiles = scaled8_tiles.Tiles8(dependent_launch=True)
    found: dict[str, Any] = {"m": m, "n": n, "k": k, "gated": gated}
    product = partial(tiles.product, *rows, fp8=form[0])
    found["tiles"] = microseconds([partial(product, *weight) for weight in weights])
    if gated:
        both, half = random(m, n), random(m, columns)
        after = {"gate": (scaled8_rounding.gate_rounded, both), "round": (scaled8_rounding.triton_rounded, half)}
        for name, (call, x) in after.items():
            found[name] = microseconds([partial(call, x, *form, dependent_launch=True)] * 12)
    found["us"] = []
    tried = candidates(m, columns, k // 2, gated=gated, kernels=kernel.kind.kernels)
    want = product(*weights[0])
    want = swiglu.by_exp(*want.double().chunk(2, 1)) if gated else want.double()
    got = kernel(*rows, *weights[0], tiling=tried[0], gated=gated)
    if (got.double() - want).norm() > 0.02 * want.norm():
        raise ValueError(f"{tried[0]} is wrong for {m} x {k} by {n} x {k}")
    for tiling in tried:
        if tiling.ranks >= -MOST_PARTS:
            run = partial(kernel, *rows, tiling=tiling, gated=gated, dependent_launch=True)
            us = microseconds([partial(run, *weight) for weight in weights])
            found["us"].append((dataclasses.astuple(tiling), us))
    return found


def name_of(tiling: HopperTiling) -> str:
    return " ".join(str(int(value)) for value in dataclasses.astuple(tiling))


def short(result: dict[str, Any]) -> dict[str, Any]:
    """Return the fastest tiling of each size, the rule's choice, and the Triton kernel."""
    rows = []
    for row in result["rows"]:
        m, n, k, gated = (row[name] for name in ("m", "n", "k", "gated"))
        kind = KINDS[result.get("kind", "fp8")]
        timed = {HopperTiling(*fields): us for fields, us in row["us"]}
        timed = {tiling: us for tiling, us in timed.items() if tiling.compiled in kind.kernels}
        if not timed:  # of kernels that are not compiled any more
            continue
        best = min(timed, key=lambda tiling: timed[tiling])
        taken = scaled8_hopper.choose_tiling(m, n, k, gated, 132, kind=kind)
        rows.append(
            {name: row[name] for name in ("m", "n", "k", "gated", "tiles", "gate", "round") if name in row}
            | {"best": name_of(best), "best_us": timed[best]}
            | {"rule": taken and name_of(taken), "rule_us": timed[taken] if taken else row["tiles"]}
        )
    return {key: value for key, value in result.items() if key != "rows"} | {"rows": rows}


def page(result: dict[str, Any]) -> str:
    """Format a page: Llama-3.1-8B's matrices, the rule's choice and the Triton kernel; and the quality of the rule."""
    names = ("QKV", "output", "gate with up", "gate with up, and the gate", "down")
    order = [(n, k, gated) for i, (n, k) in enumerate(MODELS["llama-3.1-8b"]) for gated in (False, i == GATED)]
    known = {(row["n"], row["k"], row["gated"], row["m"]): row for row in result["rows"]}
    lines = ["| rows | " + " | ".join(names) + " |", "|---" * (1 + len(names)) + "|"]
    for m in sorted({row["m"] for row in result["rows"]}):
        cells = [known.get((n, k, gated, m)) for n, k, gated in dict.fromkeys(order)]
        times = [f"{row['rule_us']:.1f} ({row['tiles']:.1f})" if row else "" for row in cells]
        lines.append(f"| {m} | " + " | ".join(times) + " |")
    ratios = [row["rule_us"] / min(row["best_us"], row["tiles"]) for row in result["rows"] if not row["gated"]]
    ratios += [row["rule_us"] / row["best_us"] for row in result["rows"] if row["gated"]]
    against = statistics.mean(row["rule_us"] / row["tiles"] for row in result["rows"])
    versions = ", ".join(f"{name} {version}" for name, version in result["environment"]["packages"].items())
    sizes = {(row["n"], row["k"]) for row in result["rows"]}
    models = sum(sizes.issuperset(each) for each in MODELS.values())
    over = f"{models} models' matrices" if models > 1 else "these matrices"
    lines.append(
        f"\nOver {over} and these rows the rule takes {statistics.mean(ratios) - 1:.1%} longer "
        f"than the fastest candidate on average, {max(ratios) - 1:.0%} at most, and {1 - against:.0%} less than "
        "the Triton kernel.\n"
    )
    made = record.made_at([result["environment"]])
    lines.append(f"`{result['command']}` on one {result['gpu']}, {versions}, {made}; median of {REPLAYS} replays.\n")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(MODELS)}; default: all")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--kind", choices=KINDS, default="fp8")
    parser.add_argument("--short", type=Path)
    asked = parser.parse_args()
    if asked.short:
        record.write(asked.short, short(json.loads(asked.out.read_text())))
        return
    began = time.monotonic()
    torch.manual_seed(0)
    kind = KINDS[asked.kind]
    kernel = HopperRows8(kind=kind)
    result: dict[str, Any] = {
        "command": f"python benchmarks/ops/products_fp8.py OUT.json{'' if kind is FP8 else f' --kind {asked.kind}'}",
        "kind": asked.kind,
        "environment": record.environment(("torch", "triton")),
        "gpu": torch.cuda.get_device_name(),
        "rows": [],
    }
    for name in asked.names or MODELS:
        for index, (n, k) in enumerate(MODELS[name]):
            copies = min(24, max(3, 300_000_000 // (n * k)))
            weights = [weight_of(n, k, kind) for _ in range(copies)]
            for m in map(int, asked.rows.split(",")):
                for gated in (False, True) if index == GATED else (False,):
                    if time.monotonic() - began > asked.seconds:
                        break
                    row = size(kernel, weights, m, gated)
                    result["rows"].append(row)
                    fields, us = min(row["us"], key=lambda pair: pair[1])
                    print(name, m, n, k, gated, f"tiles {row['tiles']:.1f}, best {us:.1f} {fields}", flush=True)
            del weights
            record.write(asked.out, result)


if __name__ == "__main__":
    main()
