"""Products of popular models' weights on one Hopper GPU: every way that ``linear`` could run them, beside cuBLAS.

    python benchmarks/ops/products_by_shape.py OUT.json [NAME ...] [--few 48,128,200] [--many 320,512] [--train 8192]
        [--groups 8,16,32] [--load] [--seconds S] [--short FILE]

``--few`` (up to 256 rows): all tilings of ``few_rows/hopper.py`` as ``ops/many_rows.py`` races them, each launch
beginning while the one before ends. ``--many``: tilings of ``many_rows/triton.py``. With a gate, cuBLAS's product is
followed by our kernel for the gate. ``--train``: the product, the gradient of its input and that of its weight, by our
kernel and by cuBLAS. ``--groups``: of ``--many`` and ``--train`` the largest tiles alone, in bands of this many.
``--load``: of ``--many`` and ``--train`` times under sustained load, at the clock that the board's limit of power
leaves (``ops/tools/under_load.py``), in place of medians of a few replays. Every time is kept, because the rule by
shape is fitted to them. What is wrong, or not the same twice, is kept as a failure. ``--short``: write of OUT.json,
which is there, what cuBLAS took, the quickest and what the rule takes into FILE.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import _paths  # noqa: F401
from benchmarks import record
from benchmarks.engine.popular_shapes import SHAPES
from benchmarks.ops.graph_time import graph_times
from benchmarks.ops.many_rows import RATE, READ, Race, exact, normal, relative
from transect.ops.linear import gate_up
from transect.ops.linear.few_rows import rule
from transect.ops.linear.few_rows.hopper import MOST_ROWS
from transect.ops.linear.many_rows.matmul import matmul
from transect.ops.linear.many_rows.tiling import ManyRowsTiling
from transect.ops.tools import under_load

FEW, MANY, REPLAYS = (48, 128, 200), (272, 320, 384, 512, 640, 1024), 7
TILINGS = {
    "plain": (
        ManyRowsTiling(128, 256, 64, 8, 8, 4, True, True),
        ManyRowsTiling(128, 128, 64, 8, 4, 4, True),
        ManyRowsTiling(128, 128, 64, 8, 8, 4, True),
        ManyRowsTiling(64, 256, 64, 8, 8, 4, True, True),
        ManyRowsTiling(64, 128, 128, 8, 4, 3, True),
    ),
    "gated": (
        ManyRowsTiling(128, 128, 64, 8, 8, 4, True),
        ManyRowsTiling(128, 64, 64, 8, 4, 4, True),
        ManyRowsTiling(64, 128, 64, 8, 8, 4, True),
    ),
}


def sizes(names: list[str]) -> list[tuple[int, int, bool]]:
    """List (N, K, gated) of the products of models, each once; gated: N rows of W make N / 2 columns."""
    found: dict[tuple[int, int, bool], None] = {}
    for shape in (SHAPES[name] for name in names):
        q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        found[2 * shape.ffn, shape.dim, True] = None
        found[shape.dim, shape.ffn, False] = None
        found[q + 2 * kv, shape.dim, False] = None
        found[shape.dim, q, False] = None
    for shape in (SHAPES[name] for name in names):
        found[shape.vocab, shape.dim, False] = None
    return list(found)


def few(race: Race, m: int) -> dict[str, Any]:
    """Measure the microseconds by contender for one size of up to 256 rows."""
    rows = race.run(m, True, REPLAYS)
    return {row["name"]: row.get("us", row.get("failed")) for row in rows}


def tilings(kind: str, groups: list[int]) -> list[ManyRowsTiling]:
    """List the tilings to try, ``plain`` or ``gated``: all, or the largest in bands of ``groups``."""
    known = TILINGS[kind]
    return [dataclasses.replace(known[0], group=group) for group in groups] or list(known)


def microseconds(contenders: Mapping[str, Sequence[Callable[[], Any]]], load: bool) -> dict[str, Any]:
    """Measure the microseconds of one call, by contender: under load, or at the clock of a few replays; or the reason
    for a failure."""
    if load:
        return dict(zip(contenders, (each * 1e6 for each in under_load.race(list(contenders.values()))), strict=True))
    found: dict[str, Any] = {}
    for name, calls in contenders.items():
        try:
            found[name] = statistics.median(graph_times(calls, REPLAYS)) * 1e6
        except (RuntimeError, ValueError) as failure:
            found[name] = str(failure)[:200]
    return found


def many(race: Race, m: int, groups: list[int], load: bool) -> dict[str, Any]:
    """Measure the microseconds by contender for one size of more than 256 rows."""
    x, failed, right = normal(m, race.k), dict[str, Any](), dict[str, Any]()
    want = exact(x, race.weights[0], race.gated)
    calls: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "cublas": lambda x, w: gate_up.gate_halves(F.linear(x, w)) if race.gated else F.linear(x, w)
    }
    for tiling in tilings("gated" if race.gated else "plain", groups):
        calls[name_of(tiling)] = partial(by_tiling, tiling=tiling, gated=race.gated)
    for name, call in calls.items():
        try:
            error = relative(call(x, race.weights[0]), want)
            if error > 0.02:
                raise ValueError(f"wrong by {error}")
            right[name] = [partial(call, x, w) for w in race.weights]
        except (RuntimeError, ValueError) as failure:
            failed[name] = str(failure)[:200]
    return microseconds(right, load) | failed


def train(race: Race, m: int, groups: list[int], load: bool) -> dict[str, Any]:
    """Measure the microseconds of the three products of a training step, ours by the rule or in such bands, and
    cuBLAS's."""
    x, g = normal(m, race.k), normal(m, race.n)
    calls: dict[str, Callable[[Tensor], Tensor]] = {
        "forward cublas": lambda w: torch.mm(x, w.T),
        "input cublas": lambda w: torch.mm(g, w),
        "cublas": lambda w: torch.mm(g.T, x),
    }
    for band, tiling in zip(groups or [0], tilings("plain", groups), strict=False):
        how = {"tiling": tiling} if groups else {}
        name = f" {band}" if groups else ""
        calls[f"forward{name}"] = lambda w, how=how: matmul(x, w, **how)  # type: ignore[misc]
        calls[f"input{name}"] = lambda w, how=how: matmul(g, w.T, **how)  # type: ignore[misc]
        calls[f"weight{name}"] = lambda w, how=how: matmul(g.T, x.T, **how)  # type: ignore[misc]
    return microseconds({name: [partial(call, w) for w in race.weights] for name, call in calls.items()}, load)


def short(result: dict[str, Any]) -> dict[str, Any]:
    """Return the times of cuBLAS, of the fastest and of the rule's choice by shape; products of few rows and of
    many."""
    rows = []
    for row in result["rows"]:
        m, n, k, gated = (row[name] for name in ("m", "n", "k", "gated"))
        timed = {name: us for name, us in row["us"].items() if isinstance(us, float)}
        taken = "cublas"
        if m <= MOST_ROWS and (tiling := rule.quickest(m, n, k, gated)) is not None:
            taken = "hopper " + " ".join(str(int(value)) for value in dataclasses.astuple(tiling))
        best = min(timed, key=lambda name: timed[name])
        rows.append(
            {"m": m, "n": n, "k": k, "gated": gated, "floor_us": row["floor_us"], "cublas_us": timed["cublas"]}
            | {"best": best, "best_us": timed[best], "rule": taken, "rule_us": timed.get(taken)}
        )
    return {key: value for key, value in result.items() if key != "rows"} | {"rows": rows}


def page(result: dict[str, Any]) -> str:
    """Format a page: up to 256 rows, the rule's choice beside the fastest and cuBLAS."""
    heights = sorted({row["m"] for row in result["rows"] if row["rule_us"] and row["m"] <= MOST_ROWS})
    lines = ["| weight | " + " | ".join(f"{m} rows" for m in heights) + " |", "|---" * (1 + len(heights)) + "|"]
    cells: dict[str, dict[int, str]] = {}
    ratios = []
    for row in result["rows"]:
        if row["rule_us"] is None or row["m"] > MOST_ROWS:
            continue
        name = f"{row['k']} by {row['n']}" + (", and the gate" if row["gated"] else "")
        ratios.append(row["rule_us"] / row["best_us"])
        cells.setdefault(name, {})[row["m"]] = f"{row['rule_us']:.1f}, {row['best_us']:.1f}, {row['cublas_us']:.1f}"
    lines += [f"| {name} | " + " | ".join(by.get(m, "") for m in heights) + " |" for name, by in cells.items()]
    versions = ", ".join(f"{name} {version}" for name, version in result["environment"]["packages"].items())
    mean, most = statistics.mean(ratios) - 1, max(ratios) - 1
    lines.append(f"\nThe rule takes {mean:.1%} longer than the fastest on average, {most:.0%} at most.\n")
    lines.append(
        f"`{result['command']}` on one {result['gpu']}, {versions}, {record.made_at([result['environment']])}; median "
        f"of {REPLAYS} replays.\n"
    )
    return "\n".join(lines)


def many_page(result: dict[str, Any]) -> str:
    """Format a page: more rows, the fastest of our tilings beside cuBLAS."""
    heights = sorted({row["m"] for row in result["rows"]})
    lines = ["| weight | " + " | ".join(f"{m} rows" for m in heights) + " |", "|---" * (1 + len(heights)) + "|"]
    cells: dict[str, dict[int, str]] = {}
    for row in result["rows"]:
        name = f"{row['k']} by {row['n']}" + (", and the gate" if row["gated"] else "")
        ours = min(us for tiling, us in row["us"].items() if tiling != "cublas" and isinstance(us, float))
        cells.setdefault(name, {})[row["m"]] = f"{ours:.0f}, {row['us']['cublas']:.0f}"
    lines += [f"| {name} | " + " | ".join(by.get(m, "") for m in heights) + " |" for name, by in cells.items()]
    versions = ", ".join(f"{name} {version}" for name, version in result["environment"]["packages"].items())
    lines.append(
        f"\n`{result['command']} --many` on one {result['gpu']}, {versions}, "
        f"{record.made_at([result['environment']])}; median of {REPLAYS} replays.\n"
    )
    return "\n".join(lines)


def by_tiling(x: Tensor, weight: Tensor, tiling: ManyRowsTiling, gated: bool) -> Tensor:
    if not gated:
        return matmul(x, weight, tiling=tiling)
    gate, up = weight.chunk(2)
    return matmul(x, up, gate=gate, tiling=tiling)


def name_of(tiling: ManyRowsTiling) -> str:
    return f"triton {tiling.bm} {tiling.bn} {tiling.bk} {tiling.warps} {tiling.stages} in bands of {tiling.group}"


def compile_one(kind: str, index: int, groups: list[int]) -> None:
    """Compile one tiling into Triton's cache, in a process of its own; also for the gradients if there are
    ``groups``."""
    weight, x, tiling = normal(8192, 4096), normal(512, 4096), tilings(kind, groups)[index]
    by_tiling(x, weight, tiling, kind == "gated")
    if groups and kind == "plain":
        g = normal(512, 8192)
        matmul(g, weight.T, tiling=tiling)
        matmul(g.T, x.T, tiling=tiling)
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(SHAPES)}; default: all")
    parser.add_argument("--few", default=",".join(map(str, FEW)))
    parser.add_argument("--many", default="")
    parser.add_argument("--train", default="")
    parser.add_argument("--groups", default="")
    parser.add_argument("--load", action="store_true", help="times under sustained load")
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--short", type=Path)
    parser.add_argument("--compile", nargs=2, metavar=("KIND", "INDEX"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    groups = [int(each) for each in asked.groups.split(",") if each]
    if asked.compile:
        compile_one(asked.compile[0], int(asked.compile[1]), groups)
        return
    if asked.short:
        record.write(asked.short, short(json.loads(asked.out.read_text())))
        return
    began = time.monotonic()
    rows = {kind: [int(each) for each in getattr(asked, kind).split(",") if each] for kind in ("few", "many", "train")}
    if rows["many"] or groups:
        told = [sys.executable, __file__, str(asked.out), "--groups", asked.groups, "--compile"]
        jobs = [
            subprocess.Popen([*told, kind, str(index)])
            for kind in TILINGS
            for index in range(len(tilings(kind, groups)))
        ]
        for job in jobs:
            job.wait()
        print(f"compiled in {time.monotonic() - began:.1f} s", flush=True)
    torch.manual_seed(0)
    result: dict[str, Any] = {
        "command": "python benchmarks/ops/products_by_shape.py OUT.json",
        "environment": record.environment(("torch", "triton")),
        "commit": record.commit(),
        "gpu": torch.cuda.get_device_name(),
        "under_load": asked.load,
        "rows": [],
    }
    for (n, k, gated), kind in itertools.product(sizes(asked.names or list(SHAPES)), rows):
        if not rows[kind] or (kind == "train" and n > 100_000) or time.monotonic() - began > asked.seconds:
            continue
        race = Race(n, k, gated, dependent_launch=True)
        for m in rows[kind]:
            wide = many if kind == "many" else train
            found = few(race, m) if kind == "few" else wide(race, m, groups, asked.load)
            columns = n // 2 if gated else n
            floor = max(2 * (n * k + m * k + m * columns) / READ, 2 * m * n * k / RATE) * 1e6
            result["rows"].append({"m": m, "n": n, "k": k, "gated": gated, "floor_us": floor, "us": found})
            timed = {name: us for name, us in found.items() if isinstance(us, float)}
            best = min(timed, key=lambda name: timed[name])
            wrong = {name: why for name, why in found.items() if isinstance(why, str)}
            if kind == "train":
                print(m, n, k, {name: round(us, 1) for name, us in found.items()}, flush=True)
                continue
            print(
                f"{m:4} x {k:5} by {n:6}{' gated' if gated else '      '} floor {floor:6.1f} cublas "
                f"{timed['cublas']:7.2f} best {timed[best]:7.2f} {best}" + (f" FAILED {wrong}" if wrong else ""),
                flush=True,
            )
        del race
        record.write(asked.out, result)


if __name__ == "__main__":
    main()
