"""Products of 17 to 256 rows on one Hopper GPU: every tiling of ``few_rows/hopper.py`` beside cuBLAS.

    python benchmarks/ops/many_rows.py OUT.json [--choices FILE] [--seconds S] [--only chosen] [--alone]

Sizes are those of the projections and heads of the models in ``ops/shapes.py``. Times are of CUDA graphs of several
calls on weights rotated past the L2 cache, the median over replays; each launch of ours begins while the one before
ends and asks for its weights then, as in a chain of layers (``dependent_launch``); cuBLAS's cannot. Every tiling is
first checked: its error against float64 sums of the same bfloat16 inputs must be at most 1.1 times cuBLAS's, and a
second run must give the same bits. With ``--choices`` the quickest of each size is written into FILE, which is what the
operator then runs (``ops/tuned/small_matmul/``): cuBLAS where it is quickest; products of layers are better measured
there, by ``ops/products_in_layers.py`` afterwards. ``--only chosen`` races those alone.

``--alone``: no launch asks for weights before the one before has ended, as when somebody calls the operator by itself;
the sizes at which another choice is faster then than in a chain of layers are written into FILE, in place of its
entries of such sizes for alone. cuBLAS is taken unless it takes at least ``MARGIN`` times as long as another.

``--sizes NxK,...``: others in place of the models', such as a rank's head, ``64128x4096``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import _paths  # noqa: F401
from benchmarks.ops.graph_time import graph_times
from benchmarks.record import environment
from transect.ops import shapes
from transect.ops.linear import gate_up
from transect.ops.linear.few_rows import choices as known_choices
from transect.ops.linear.few_rows import hopper, small_matmul
from transect.ops.linear.few_rows.triton import TritonTiling

READ, RATE = 4.33e12, 777e12
"""Measured ceilings of the device: bytes and bfloat16 FLOPs a second."""


ROWS = (32, 64, 96, 128, 256)
ALONE = tuple(rows for rows in known_choices.ROWS if rows >= 32)
MARGIN = 1.03


def sizes() -> list[tuple[int, int, bool]]:
    """List (N, K, gated) of every product, the 8B models first; gated: N rows of W make N / 2 columns."""
    found: dict[tuple[int, int, bool], None] = {}
    for model in (shapes.LLAMA_8B, shapes.QWEN3_8B, shapes.LLAMA_1B, shapes.QWEN3_0_6B):
        for n, k in (
            (2 * model.ffn_dim, model.dim),
            (model.dim, model.ffn_dim),
            (model.qkv_dim, model.dim),
            (model.dim, model.n_heads * model.head_dim),
            (model.vocab_size, model.dim),
        ):
            found[n, k, False] = None
        found[2 * model.ffn_dim, model.dim, True] = None
    return list(found)


def normal(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * scale


def exact(x: Tensor, weight: Tensor, gated: bool) -> Tensor:
    """Compute the result in float64, some rows of W at a time."""
    y = torch.cat([x.double() @ part.double().T for part in weight.split(8192)], 1)
    if not gated:
        return y
    gate, up = y.chunk(2, 1)
    return F.silu(gate) * up


def relative(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


class Race:
    """The contenders on one size of weight."""

    def __init__(self, n: int, k: int, gated: bool, dependent_launch: bool) -> None:
        self.n, self.k, self.gated, self.dependent_launch = n, k, gated, dependent_launch
        count = max(3, min(16, -(-250_000_000 // (2 * n * k))))
        self.weights = [normal(n, k, scale=k**-0.5) for _ in range(count)]
        self.kernel = hopper.HopperRows()
        self.cuda = small_matmul.CudaRows()
        self.triton = small_matmul.TritonRows()

    def gate(self, y: Tensor) -> Tensor:
        return gate_up.gate_halves(y, dependent_launch=self.dependent_launch) if self.gated else y

    def by_tiling(self, x: Tensor, weight: Tensor, tiling: TritonTiling) -> Tensor:
        y = self.triton(x, weight, tiling=tiling)
        return y if tiling.gated else self.gate(y)

    def contenders(
        self, m: int, tilings: bool
    ) -> dict[str, tuple[known_choices.Choice, Callable[[Tensor, Tensor], Tensor]]]:
        columns = self.n // 2 if self.gated else self.n
        chosen = known_choices.chosen(m, self.n, self.k, torch.device("cuda", 0), self.gated)
        found: dict[str, tuple[known_choices.Choice, Callable[[Tensor, Tensor], Tensor]]] = {
            "cublas": (known_choices.Choice("cublas"), lambda x, w: self.gate(F.linear(x, w)))
        }
        if m <= 32:
            found["cuda"] = (
                known_choices.Choice("cuda"),
                lambda x, w: self.gate(self.cuda(x, w, dependent_launch=self.dependent_launch)),
            )
        if m <= 32 or not self.dependent_launch:
            found["triton"] = (known_choices.Choice("triton"), lambda x, w: self.gate(self.triton(x, w)))
        if chosen is not None and isinstance(chosen.tiling, TritonTiling):
            found["triton, as chosen"] = chosen, partial(self.by_tiling, tiling=chosen.tiling)
        tried = hopper.candidates(m, columns, self.k, gated=self.gated) if tilings else []
        if not tilings and chosen is not None and chosen.by == "hopper":
            tried = [chosen.tiling]
        for tiling in tried:
            name = "hopper " + " ".join(str(int(value)) for value in dataclasses.astuple(tiling))
            found[name] = (
                known_choices.Choice("hopper", tiling),
                partial(self.kernel, tiling=tiling, dependent_launch=self.dependent_launch),
            )
        return found

    def run(self, m: int, tilings: bool, replays: int) -> list[dict[str, Any]]:
        x = normal(m, self.k)
        want = exact(x, self.weights[0], self.gated)
        columns = want.shape[1]
        read = 2 * (self.n * self.k + m * self.k + m * columns)
        floor = max(read / READ, 2 * m * self.n * self.k / RATE) * 1e6
        rows: list[dict[str, Any]] = []
        of_cublas = 0.0
        for name, (choice, call) in self.contenders(m, tilings).items():
            row: dict[str, Any] = {"rows": m, "k": self.k, "n": self.n, "gated": self.gated, "name": name}
            row["choice"] = {"by": choice.by} | ({"tiling": dataclasses.asdict(choice.tiling)} if choice.tiling else {})
            try:
                y = call(x, self.weights[0])
            except (RuntimeError, ValueError) as error:
                rows.append(row | {"failed": str(error)[:200]})
                continue
            row["error_ratio"] = 1.0
            if name == "cublas":
                of_cublas = relative(y, want)
            else:
                row["error_ratio"] = relative(y, want) / of_cublas
                row["same_bits"] = all(torch.equal(y, call(x, self.weights[0])) for _ in range(3))
                if row["error_ratio"] > 1.1 or not row["same_bits"]:
                    rows.append(row | {"failed": "wrong or not the same in every run"})
                    continue
            times = [seconds * 1e6 for seconds in graph_times([partial(call, x, w) for w in self.weights], replays)]
            median, least, most = statistics.median(times), min(times), max(times)
            rows.append(row | {"us": median, "min_us": least, "max_us": most, "floor_us": floor})
        return rows


def best(rows: list[dict[str, Any]], margin: float = 1.0) -> dict[str, Any]:
    """Return the fastest; cuBLAS unless it takes ``margin`` times as long."""
    return min(
        (row for row in rows if "us" in row), key=lambda row: row["us"] / (margin if row["name"] == "cublas" else 1)
    )


def kept(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the peers, the fastest tiling with the number of those tried, and the failures."""
    tilings = [row for row in rows if row["choice"]["by"] == "hopper"]
    quickest = [best(tilings) | {"tried": len(tilings)}] if any("us" in row for row in tilings) else []
    return [row for row in rows if row not in tilings] + quickest + [row for row in tilings if "failed" in row]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--choices", type=Path)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--only", choices=["chosen"])
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("--sizes", help="NxK,..., in place of those of the models")
    asked = parser.parse_args()
    torch.manual_seed(0)
    begin = time.monotonic()
    about = environment(("torch", "triton"))
    replays = 31 if asked.only else 11
    told = [f"--only {asked.only}"] if asked.only else []
    told += ["--alone"] if asked.alone else []
    told += ["--choices FILE"] if asked.choices else []
    about["command"] = " ".join(["python benchmarks/ops/many_rows.py OUT.json", *told])
    about["machine"] = f"one {torch.cuda.get_device_name()}"
    about["method"] = f"median of {replays} replays of a CUDA graph of 3 to 16 calls on weights past the L2 cache"
    found: list[dict[str, Any]] = []
    choices: dict[str, dict[str, Any] | None] = {}  # None: needs none of its own
    place = torch.device("cuda", 0)
    wanted = [(*map(int, size.split("x")), False) for size in asked.sizes.split(",")] if asked.sizes else sizes()
    for n, k, gated in wanted:
        if gated and asked.alone:
            continue
        if time.monotonic() - begin > asked.seconds:
            print(f"out of time before {n} x {k}")
            break
        race = Race(n, k, gated, dependent_launch=not asked.alone)
        for m in ALONE if asked.alone else ROWS:
            rows = race.run(m, asked.only is None, replays)
            found += kept(rows)
            first = best(rows, MARGIN if asked.alone else 1.0)
            in_layers = known_choices.chosen(m, n, k, place) or known_choices.Choice("cublas")
            same = asked.alone and in_layers == known_choices.read_choice(first["choice"])
            choices[known_choices.key(m, n, k, gated, alone=asked.alone)] = None if same else first["choice"]
            peer = next(row["us"] for row in rows if row["name"] == "cublas")
            failed = [row["name"] for row in rows if "failed" in row]
            print(
                f"{m:4} x {k:5} by {n:6}{' gated' if gated else '      '} cublas {peer:7.2f}  best {first['us']:7.2f} "
                f"({peer / first['us']:.3f}) floor {first['floor_us']:6.1f}  {first['name']}"
                + (f"  FAILED {failed}" if failed else ""),
                flush=True,
            )
        del race
        asked.out.write_text(json.dumps(about | {"rows": found}, indent=1) + "\n")
        if asked.choices:
            known = json.loads(asked.choices.read_text()) if asked.choices.exists() else {"choices": {}}
            all_of_them = {size: choice for size, choice in (known["choices"] | choices).items() if choice is not None}
            known |= {"device": torch.cuda.get_device_name(), "choices": all_of_them}
            asked.choices.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
