"""Products with weights of int4 groups on one GPU: each way that we have, beside torch's own, cuBLAS and floors.

    python benchmarks/ops/int4.py OUT.json [--rows 1,8,16] [--shapes down,head] [--ways cuda_dependent,cublas]
        [--try late=2 ranks=1,blocks=1]

Prints for each weight and number of rows the floor in us, and of each way, as soon as it is measured, us and the share
of the floor. Times are of CUDA graphs of several calls on weights rotated past the L2 cache: the median over replays.
Launches in such a chain are dependent: one begins while the last one ends. ``cuda`` and ``hopper`` ask for nothing
before that one has ended; ``cuda_dependent`` and ``hopper_dependent`` ask for weights, as in a chain of layers, where
only X comes from the kernel before. A star is at what ``int4_matmul`` takes. ``torch_int4`` is
``torch.ops.aten._weight_int4pack_mm`` on a weight in its own order, ``cublas`` a product with the same weight in
bfloat16, ``rebuilt`` makes that weight at every call. The floor counts codes, bfloat16 scales and zeros, X and Y.
``--try``: also the kernel for few rows with other values of ``int4_rows.CHOICES`` than its rule gives.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import _paths  # noqa: F401
from benchmarks import record
from benchmarks.ops.graph_time import graph_times
from transect.ops.lang.cuda import library
from transect.ops.linear.packed.int4 import int4_hopper, int4_rows
from transect.ops.linear.packed.int4 import int4_matmul as i4

BYTES_A_SECOND, FLOPS = 4.28e12, 790e12
SHAPES = {"head": (128256, 4096), "gate+up": (28672, 4096), "down": (4096, 14336), "qkv": (6144, 4096),
          "out": (4096, 4096)}  # fmt: skip
ROWS = (1, 8, 16, 32, 64, 128, 256)
GROUP = 128
REPLAYS = 15
CHAIN = 24
"""Calls in a graph, at least: the first of them begins after nothing."""
Calls = list[Callable[[], Any]]


def weight(n: int, k: int) -> torch.Tensor:
    """Generate random codes, scales that keep Y near 1, zeros of -7.5 scales, in the form of ``arrange``."""
    made = torch.randint(-(2**31), 2**31, (k // 128, n // 16, 272), dtype=torch.int32, device="cuda")
    scale = (torch.rand(k // 128, n // 16, 16, device="cuda") + 0.1).mul(k**-0.5 / 4)
    made[..., 256:] = torch.stack((scale, -7.5 * scale), -1).to(torch.bfloat16).view(torch.int32).squeeze(-1)
    return made


def error_ratio(call: Callable[..., torch.Tensor], x: torch.Tensor, given: torch.Tensor, n: int) -> float:
    """Return the error against float64 over that of torch in bfloat16."""
    want = i4.reference(x.double(), given, n)
    theirs = F.linear(x, i4.dense(given, n, x.dtype)).double() - want
    return float((call(x, given, n).double() - want).norm() / theirs.norm())


class Ways:
    """Contenders by name."""

    def __init__(self, tried: list[str], only: list[str] | None) -> None:
        self._rows, self._hopper = int4_rows.CudaCodes(), int4_hopper.HopperCodes()
        self._peers = {
            "torch_int4": i4.Prepared(i4._for_torch, i4._by_torch),
            "cublas": i4.Prepared(i4._rounded, F.linear),
        }
        self._tried, self._only = tried, only

    def at(self, m: int, n: int, k: int) -> dict[str, Callable[..., torch.Tensor]]:
        """Return the ways for ``m`` rows and a weight ``[n, k]``; starred: the choice of ``int4_matmul``."""
        chosen = {"rows": "cuda_dependent", "hopper": "hopper_dependent", "rebuilt": "rebuilt"}[i4.way(m, n)]
        ours: dict[str, Callable[..., torch.Tensor]] = {"cuda_dependent": partial(self._rows, dependent_launch=True)}
        if m <= 16:
            ours["cuda"] = self._rows
        if n >= 16384:
            ours["hopper_dependent"] = partial(self._hopper, dependent_launch=True)
        if m >= 64:
            ours["rebuilt"] = i4.rebuilt
        peers = self._peers if m <= 64 else {"cublas": self._peers["cublas"]}
        found = {name: call for name, call in (ours | peers).items() if self._only is None or name in self._only}
        if chosen == "cuda_dependent":
            for tried in self._tried:
                other = {name: int(value) for name, value in (pair.split("=") for pair in tried.split(","))}
                config = dict(int4_rows.rule((m, n, k))) | other
                found[tried] = partial(self._rows, dependent_launch=True, config=config)
        return {name + "*" * (name == chosen): call for name, call in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--ways", help="only these; those of --try always")
    parser.add_argument("--try", nargs="*", default=[], dest="tried")
    given = parser.parse_args()
    torch.manual_seed(0)
    with ThreadPoolExecutor() as pool:  # nvcc, side by side
        list(pool.map(library, ("int4_matmul", "int4_matmul_hopper")))
    ways = Ways(given.tried, given.ways and given.ways.split(","))
    about = {"environment": record.environment(), "method": __doc__, "bytes_a_second": BYTES_A_SECOND, "flops": FLOPS}
    found: list[dict[str, Any]] = []
    for name in given.shapes.split(","):
        n, k = SHAPES[name]
        weights = [weight(n, k) for _ in range(max(4, min(24, -(-200_000_000 // (n * k // 2)))))]
        few = weights[: max(2, min(8, len(weights) // 2))]  # where each takes four times the bytes
        for m in map(int, given.rows.split(",")):
            x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
            nbytes = n * k * (0.5 + 4 / GROUP) + 2 * m * (k + n)
            floor = max(nbytes / BYTES_A_SECOND, 2 * m * n * k / FLOPS) * 1e6
            print(f"{name} {m} floor {floor:.2f}", end=" ", flush=True)
            ratio = error_ratio(i4.int4_matmul, x, weights[0], n) if n < 100_000 else None
            print("" if ratio is None else f"error {ratio:.2f}", flush=True)
            for way, call in ways.at(m, n, k).items():
                calls: Calls = [
                    partial(call, x, w, n) for w in (few if way.rstrip("*") in ("cublas", "rebuilt") else weights)
                ]
                print(f"  {way}", end=" ", flush=True)
                try:
                    for first in calls:  # a peer takes a weight into its own order at the first
                        first()
                    times = [seconds * 1e6 for seconds in graph_times(calls * -(-CHAIN // len(calls)), REPLAYS)]
                except (RuntimeError, ValueError) as error:
                    print(str(error).splitlines()[0], flush=True)
                    continue
                median = statistics.median(times)
                row = {"shape": name, "rows": m, "n": n, "k": k, "group": GROUP, "way": way, "floor_us": floor}
                found.append(row | {"us": record.summary(times), "of_floor": floor / median})
                print(f"{median:.2f} {floor / median:.2f}", flush=True)
            found.append({"shape": name, "rows": m, "error_ratio": ratio})
            record.write(given.out, {**about, "rows": found})
        del weights, few
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
