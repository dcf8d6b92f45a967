"""Products with weights of int4 groups on one GPU: each way that we have, beside cuBLAS on bfloat16 and floors.

    python benchmarks/ops_int4.py OUT.json

Times are of CUDA graphs of several calls on weights rotated past the L2 cache: the median over replays. ``..._pdl`` is
the same, but each launch asks for its weights before the one before has ended, as in a chain of layers; ``rebuilt``
makes a bfloat16 weight at every call. The floor counts codes, bfloat16 scales and zeros, X and Y.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

import record
from graph_time import graph_times
from transect.ops import int4_hopper, int4_packing, int4_rows
from transect.ops import int4_matmul as i4

BYTES_A_SECOND, FLOPS = 4.28e12, 790e12
SHAPES = {"qkv": (6144, 4096), "out": (4096, 4096), "gate and up": (28672, 4096), "down": (4096, 14336),
          "head": (128256, 4096)}  # fmt: skip
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
GROUP = 128
REPLAYS = 15
Calls = list[Callable[[], Any]]


def weight(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda")
    scale = (torch.rand(k // GROUP, n, device="cuda") + 0.1).mul(k**-0.5 / 4).to(torch.bfloat16).T
    return codes, scale, -7.5 * scale


def error_ratio(call: Callable[..., torch.Tensor], x: torch.Tensor, given: tuple[torch.Tensor, ...]) -> float:
    """The error against float64 over that of torch in bfloat16."""
    want = i4.reference(x.double(), given[0], given[1].double(), given[2].double())
    ours, theirs = ((f(x, *given).double() - want).norm() for f in (call, i4._peer))
    return float(ours / theirs)


def main() -> None:
    torch.manual_seed(0)
    rows, hopper = int4_rows.CudaCodes(), int4_hopper.HopperCodes()
    found: list[dict[str, Any]] = []
    for name, (n, k) in SHAPES.items():
        count = max(4, min(24, -(-200_000_000 // (n * k // 2))))
        given = [weight(n, k) for _ in range(count)]
        first = [int4_rows.repack(*w) for w in given]
        second = [int4_packing.repack(*w) for w in given]
        dense = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(max(2, min(8, count // 2)))]
        for m in ROWS:
            x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
            nbytes = n * k * (0.5 + 4 / GROUP) + 2 * m * (k + n)
            floor = max(nbytes / BYTES_A_SECOND, 2 * m * n * k / FLOPS) * 1e6
            ways: dict[str, Calls] = {"cublas, bfloat16 weights": [lambda w=w, x=x: F.linear(x, w) for w in dense]}
            for pdl in (False, True):
                end = "_pdl" if pdl else ""
                if m <= i4.CUDA_ROWS:
                    ways["cuda" + end] = [
                        lambda p=p, x=x, n=n, pdl=pdl: rows.packed(x, p[0], p[1], n, pdl=pdl) for p in first
                    ]
                if m <= i4.HOPPER_ROWS:
                    ways["hopper" + end] = [
                        lambda p=p, x=x, n=n, pdl=pdl: hopper.packed(x, p, n, pdl=pdl) for p in second
                    ]
            ways["triton"] = [lambda w=w, x=x: i4.by_triton(x, *w) for w in given]
            if m >= 32:
                ways["rebuilt"] = [lambda w=w, x=x: i4.rebuilt(x, *w) for w in given[:8]]
            ratio = error_ratio(i4.int4_matmul, x, given[0]) if n < 100_000 else None
            line = f"{name:12} {m:4} floor {floor:6.2f}"
            for way, calls in ways.items():
                times = [seconds * 1e6 for seconds in graph_times(calls, REPLAYS)]
                median = statistics.median(times)
                row = {"shape": name, "rows": m, "n": n, "k": k, "group": GROUP, "way": way, "floor_us": floor}
                found.append(row | {"us": record.summary(times), "of_floor": floor / median})
                line += f" | {way} {median:.2f} ({floor / median:.2f})"
            chosen = i4.way(m, n)
            found.append({"shape": name, "rows": m, "chosen": chosen, "error_ratio": ratio})
            print(line, f"| {chosen}" + ("" if ratio is None else f" error {ratio:.2f}"), flush=True)
        del given, first, second, dense
        torch.cuda.empty_cache()
    record.write(
        Path(sys.argv[1]),
        {"environment": record.environment(), "method": __doc__, "bytes_a_second": BYTES_A_SECOND, "flops": FLOPS,
         "rows": found},
    )  # fmt: skip


if __name__ == "__main__":
    main()
