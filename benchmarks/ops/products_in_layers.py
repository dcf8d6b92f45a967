"""Which kernel runs each product of a decode step quickest, measured where it runs: in a chain of whole layers.

    python benchmarks/ops/products_in_layers.py OUT.json MODEL:ROWS[:SECONDS] ... [--choices FILE]

Alone, in a chain of its own kind, a product shows other times than between a norm, attention and the other products:
how much of its weight is there when its input is depends on how much shared memory the kernel before leaves. So one
product after another gets the candidate with which a CUDA graph of several layers (``engine/decoder_layer.py``)
takes the least time, the others as chosen so far; every candidate must give the same bits twice, and what it
computes may be no further from the first result than rounding goes. Then, where all four can, the same with residual
add and norm in the products (``stream_products.py``). With ``--choices`` the quickest are written into FILE, a file
of choices of ``ops/tuned/small_matmul``; those of streams where they gain, and are left out where they do not.
MODEL/N, such as ``llama-3.1-8b/2``, is one of N ranks: sums stand between its products, so it has no streams.
Candidates that are compiled already are tried before those of Triton.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import random
import statistics
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import _paths  # noqa: F401
from benchmarks import record
from benchmarks.engine.decoder_layer import Chain
from benchmarks.ops.graph_time import graph_times
from transect.ops.linear import gate_up
from transect.ops.linear.few_rows import choices, hopper, small_matmul
from transect.ops.linear.few_rows import cuda as cuda_rows
from transect.ops.linear.few_rows.choices import Choice
from transect.ops.linear.few_rows.gluon import GluonTiling
from transect.ops.linear.few_rows.hopper import HopperTiling
from transect.ops.linear.few_rows.search import cuda_tilings, hopper_tilings, triton_tilings
from transect.ops.linear.few_rows.triton import TritonTiling
from transect.ops.linear.stream_products import StreamProducts

UNITS = 132
ORDER = ("down", "gate_up", "o", "qkv")
FAR = 0.04
"""Largest relative difference of the result of all layers from the first one."""


def gluon_tilings(m: int, n: int, k: int, gated: bool) -> list[Choice]:
    """List the tilings of ``few_rows/gluon.py`` with at most as many tiles as multiprocessors and at least half as
    many, with the most buffers that fit."""
    found = []
    outputs = n // 2 if gated else n
    for bm, bn, bk, split, warps in itertools.product((64, 128, 256), (16, 32, 64, 128), (64, 128), (1, 2, 4), (4, 8)):
        programs = -(-m // bm) * -(-outputs // bn) * split
        if bm >= 2 * m or not 0.45 * UNITS <= programs <= UNITS or bm * bn > 1024 * warps:
            continue
        for stages in range(16, 1, -1):
            tiling = GluonTiling(bm, bn, bk, split, stages, warps, gated)
            if stages <= k // bk // split and not tiling.refusal(outputs, k):
                found.append(Choice("gluon", tiling))
                break
    return found


def name_of(choice: Choice) -> str:
    tiling = choice.tiling
    return choice.by + ("" if tiling is None else " " + " ".join(str(int(v)) for v in dataclasses.astuple(tiling)))


def form(choice: Choice) -> dict[str, Any]:
    """Return the line of a file of choices."""
    tiling = choice.tiling
    return {"by": choice.by} | ({} if tiling is None else {"tiling": dataclasses.asdict(tiling)})


def gates(choice: Choice) -> bool:
    """Check if the gate is part of the tiles."""
    return isinstance(choice.tiling, HopperTiling | TritonTiling) and bool(choice.tiling.gated)


class Layers:
    """A chain of layers whose products are run as ``self.choice`` says."""

    def __init__(self, model: str, rows: int) -> None:
        self.chain = Chain(model, rows)
        self.rows = rows
        config = self.chain.config
        self.sizes = {
            "qkv": (config.q_dim + 2 * config.kv_dim, config.dim),
            "o": (config.dim, config.q_dim),
            "gate_up": (2 * config.ffn_dim, config.dim),
            "down": (config.dim, config.ffn_dim),
        }
        self._name = {size: name for name, size in self.sizes.items()}
        self.cuda, self.hopper, self.triton = cuda_rows.CudaRows(), hopper.HopperRows(), small_matmul.TritonRows()
        self.streams = StreamProducts(torch.device("cuda", 0), lambda _, n, k, __: self.choice[self._name[n, k]].tiling)
        self.choice: dict[str, Choice] = {}
        self.best: dict[str, list[Choice]] = {}
        """The quickest found of each product with norms apart."""
        self.first = self.now().double()

    def now(self) -> Tensor:
        return self.chain.stack()()

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        choice = self.choice[self._name[weight.shape[0], weight.shape[1]]]
        if choice.by == "cublas":
            return F.linear(x, weight)
        if choice.by == "triton":
            return self.triton(x, weight, tiling=choice.tiling)
        if isinstance(choice.tiling, HopperTiling):
            return self.hopper(x, weight, dependent_launch=True, tiling=choice.tiling)
        return self.cuda(x, weight, dependent_launch=True, tiling=choice.tiling)

    def gate_up(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        choice = self.choice["gate_up"]
        if isinstance(choice.tiling, cuda_rows.CudaTiling) and choice.tiling.ranks == 1:
            return self.cuda(x, weight, dependent_launch=True, tiling=choice.tiling, gated=True)
        y = self.product(x, weight)
        return y if gates(choice) else gate_up.gate_halves(y, dependent_launch=True)

    def seconds(self, call: Any, replays: int) -> float:
        return statistics.median(graph_times([call], replays)) / self.chain.config.n_layers

    def time(self, streams: bool, replays: int) -> float:
        """Measure the microseconds of a layer; infinite if the result is wrong or differs between two runs."""
        call = self.chain.stack(
            linear=self.product, gate_up=self.gate_up, stream_products=self.streams if streams else None
        )
        y = call()
        if not torch.equal(y, call()) or not (y.double() - self.first).norm() <= FAR * self.first.norm():
            return float("inf")
        return self.seconds(call, replays) * 1e6


def candidates(m: int, n: int, k: int, gated: bool, streams: bool) -> list[Choice]:
    if streams:
        return cuda_tilings(m, n, k, gated)
    found = [Choice("cublas"), Choice("triton")]
    if m > 32:
        found += triton_tilings(m, n, k, False)
        if gated:
            found += triton_tilings(m, n, k, True)
    if m <= cuda_rows.CUDA_ROWS:
        found += cuda_tilings(m, n, k, gated)
    if m > 16:
        found += hopper_tilings(m, n, k, gated)
        if gated:
            found += hopper_tilings(m, n, k, False)
    return found


def fits_stream(name: str, choice: Choice) -> bool:
    """Check if a norm can be computed beside it."""
    tiling = choice.tiling
    if isinstance(tiling, TritonTiling | GluonTiling):
        return tiling.gated == (name == "gate_up")
    return isinstance(choice.tiling, cuda_rows.CudaTiling) and (name != "gate_up" or choice.tiling.ranks == 1)


def greedy(layers: Layers, streams: bool, seconds: float) -> float:
    """Set ``layers.choice``, one product after another; microseconds of a layer then."""
    end = time.monotonic() + seconds
    for left, name in zip(range(4, 0, -1), ORDER, strict=True):
        n, k = layers.sizes[name]
        kept = layers.choice[name]
        if streams and layers.rows > cuda_rows.CUDA_ROWS:  # what is best without, and what is there only with
            near = [c for c in layers.best[name] if c != kept and fits_stream(name, c)]
            tried = near + gluon_tilings(layers.rows, n, k, name == "gate_up")
        else:
            tried = [c for c in candidates(layers.rows, n, k, name == "gate_up", streams) if c != kept]
        random.Random(name_of(kept)).shuffle(tried)  # another search begins elsewhere
        tried.sort(key=lambda choice: choice.by == "triton" and choice.tiling is not None)
        stop = time.monotonic() + (end - time.monotonic()) / left
        times: list[tuple[float, Choice]] = []
        for choice in [kept, *tried]:
            if times and time.monotonic() > stop:
                break
            layers.choice[name] = choice
            try:
                times.append((layers.time(streams, 5), choice))
            except (RuntimeError, ValueError) as error:
                print(f"    {name} {name_of(choice)}: {str(error)[:120]}")
        best = sorted(times, key=lambda pair: pair[0])[:4]
        again = []
        for _, choice in best:
            layers.choice[name] = choice
            again.append((layers.time(streams, 15), choice))
        us, layers.choice[name] = min(again, key=lambda pair: pair[0])
        if not streams:
            layers.best[name] = [choice for _, choice in sorted(times, key=lambda pair: pair[0])[:8]]
        shown = "; ".join(f"{time:.2f} {name_of(choice)}" for time, choice in again)
        print(f"    {name:8} {len(times)} of {len(tried) + 1}: {shown}", flush=True)
    return us


def streams_possible(layers: Layers, rows: int) -> bool:
    """Check if norms can be computed in the products, all of one kind of kernel; sets the first choices."""
    for name, (n, k) in layers.sizes.items():
        few = rows <= cuda_rows.CUDA_ROWS
        listed = cuda_tilings(rows, n, k, name == "gate_up") if few else layers.best[name]
        fitting = [
            c
            for c in (layers.choice[name], *listed)
            if fits_stream(name, c) and (isinstance(c.tiling, cuda_rows.CudaTiling)) == few
        ]
        if not fitting:
            return False
        layers.choice[name] = fitting[0]
    return True


def run(model: str, rows: int, seconds: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (the measurements, choices by their names in the file)."""
    layers = Layers(model, rows)
    streams = {"stream_products": None} if "/" in model else {}
    before = layers.seconds(layers.chain.stack(**streams), 15) * 1e6
    for name, (n, k) in layers.sizes.items():
        rule = Choice("cuda", cuda_rows.choose_tiling(rows, n, UNITS))
        shipped = choices.chosen(rows, n, k, torch.device("cuda", 0), gated=name == "gate_up")
        layers.choice[name] = shipped or (rule if rows <= 16 else Choice("cublas"))
    print(f"{model} {rows} rows: {before:.2f} us a layer", flush=True)
    share = 1.0 if "/" in model else 0.5 if rows <= cuda_rows.CUDA_ROWS else 0.7
    apart = greedy(layers, False, seconds * share)
    chosen = dict(layers.choice)
    found: dict[str, Any] = {}
    for name, (n, k) in layers.sizes.items():
        choice = chosen[name]
        if name == "gate_up":
            at_once = isinstance(choice.tiling, cuda_rows.CudaTiling) or gates(choice)
            found[choices.key(rows, n, k, gated=True)] = form(choice) if at_once else {"by": choice.by}
            if at_once:
                continue
        found[choices.key(rows, n, k)] = form(choice)
    result = {"model": model, "rows": rows, "before_us": before, "apart_us": apart, "apart": found}
    print(f"  {apart:.2f} with norms of their own", flush=True)
    if "/" not in model and streams_possible(layers, rows):
        inside = greedy(layers, True, seconds * (0.5 if rows <= cuda_rows.CUDA_ROWS else 0.3))
        streams = {
            choices.key(rows, n, k, gated=name == "gate_up", stream=True): form(layers.choice[name])
            for name, (n, k) in layers.sizes.items()
        }
        result |= {"inside_us": inside, "inside": streams}
        print(f"  {inside:.2f} with norms in the products", flush=True)
        if inside < 0.995 * apart:
            found = found | streams
    return result, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("specs", nargs="+", metavar="MODEL:ROWS[:SECONDS]")
    parser.add_argument("--choices", type=Path)
    asked = parser.parse_args()
    results = []
    about = record.environment(("torch", "triton")) | {"gpu": torch.cuda.get_device_name()}
    for spec in asked.specs:
        model, rows, *seconds = spec.split(":")
        try:
            with torch.inference_mode():
                result, found = run(model, int(rows), float(seconds[0]) if seconds else 30.0)
        except Exception:
            traceback.print_exc()
            continue
        results.append(result)
        torch.cuda.empty_cache()
        asked.out.write_text(json.dumps(about | {"results": results}, indent=1) + "\n")
        if asked.choices:
            known = json.loads(asked.choices.read_text())
            known["choices"] |= found
            asked.choices.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
