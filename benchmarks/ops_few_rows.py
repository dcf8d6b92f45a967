"""Products of few rows on one GPU: bfloat16 and int4 groups, beside cuBLAS and their floors.

    python benchmarks/ops_few_rows.py OUT_DIRECTORY

Times are of CUDA graphs of several calls on weights rotated past the L2 cache, the median over replays. ``cuda_pdl`` is
the same kernel, but each launch asks for its weights before the one before has ended, as in a chain of layers.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from transect.ops import int4_matmul as i4
from transect.ops import int4_rows
from transect.ops import small_matmul as sm

COPY, RATE = 4.28e12, 790e12
SHAPES = (
    (4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096), (4096, 128256), (4096, 24576), (12288, 4096),
    (1024, 4096), (2048, 1024), (1024, 6144), (3072, 1024), (2048, 3072), (2048, 2048), (2048, 16384), (8192, 2048),
)  # fmt: skip
Calls = list[Callable[[], Any]]


def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * scale


def measure(calls: Calls, replays: int = 21) -> tuple[float, float, float]:
    """Median, least and largest microseconds of one call over replays of a graph of all of them."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(replays)]
    for start, end in events:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    times = [start.elapsed_time(end) * 1e3 / len(calls) for start, end in events]
    return statistics.median(times), min(times), max(times)


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def main() -> None:
    torch.manual_seed(0)
    found: list[dict[str, Any]] = []

    def compare(case: str, floor: float, variants: dict[str, Calls]) -> None:
        line = f"{case:34} floor {floor:6.1f}"
        for name, calls in variants.items():
            try:
                median, least, most = measure(calls)
            except Exception as error:
                found.append({"case": case, "name": name, "error": str(error)[:200]})
                line += f" | {name} failed {str(error)[:60]}"
                continue
            row = {"case": case, "name": name, "us": median, "min_us": least, "max_us": most, "floor_us": floor}
            found.append(row | {"of_floor": floor / median})
            line += f" | {name} {median:.2f} ({floor / median:.2f})"
        print(line, flush=True)

    rows, codes_rows = sm.CudaRows(), int4_rows.CudaCodes()
    for k, n in SHAPES:
        weights = [normal(n, k, scale=k**-0.5) for _ in range(max(4, min(24, -(-250_000_000 // (2 * n * k)))))]
        main_shapes = (k, n) in SHAPES[:5]
        for m in (1, 8, 16, 32, 64) if main_shapes else (1, 8, 16):
            x = normal(m, k)
            floor = max((n * k + m * k + m * n) * 2 / COPY, 2 * m * n * k / RATE) * 1e6
            case = f"bf16 rows {m} K {k} N {n}"
            want = x.double() @ weights[0].double().T
            ratio = relative(rows(x, weights[0]), want) / relative(F.linear(x, weights[0]), want)
            found.append({"case": case, "name": "error", "ratio": ratio})
            variants = {
                "cublas": [lambda w=w, x=x: F.linear(x, w) for w in weights],
                "cuda": [lambda w=w, x=x: rows(x, w) for w in weights],
                "cuda_pdl": [lambda w=w, x=x: rows(x, w, pdl=True) for w in weights],
            }
            compare(case, floor, variants)
            if ratio > 1.2:
                print("  error ratio", ratio)
    for k, n in SHAPES[:5]:
        count = max(4, min(40, -(-250_000_000 // (n * k // 2))))
        sets = []
        for i in range(count):
            codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda")
            scale = (torch.rand(n, k // 128, device="cuda") + 0.1).mul(k**-0.5 / 4).to(torch.bfloat16)
            zero = (-7.5 * scale).to(torch.bfloat16)
            if i == 0:
                first = (codes, scale, zero)
            sets.append(int4_rows.repack(codes, scale, zero))
        dense = [normal(n, k, scale=k**-0.5) for _ in range(max(2, min(6, -(-250_000_000 // (2 * n * k)))))]
        for m in (1, 8, 16, 64):
            x = normal(m, k)
            floor = max((n * k * (0.5 + 4 / 128) + 2 * m * k + 2 * m * n) / COPY, 2 * m * n * k / RATE) * 1e6
            case = f"int4 rows {m} K {k} N {n}"
            if n < 100000:
                want = i4.reference(x.double(), first[0], first[1].double(), first[2].double())
                ratio = relative(codes_rows.packed(x, *sets[0], n), want) / relative(i4._peer(x, *first), want)
                found.append({"case": case, "name": "error", "ratio": ratio})
                if ratio > 1.2:
                    print("  error ratio", ratio)
            compare(
                case,
                floor,
                {
                    "cublas bf16": [lambda w=w, x=x: F.linear(x, w) for w in dense],
                    "cuda": [lambda p=p, x=x, n=n: codes_rows.packed(x, *p, n) for p in sets],
                    "cuda_pdl": [lambda p=p, x=x, n=n: codes_rows.packed(x, *p, n, pdl=True) for p in sets],
                },
            )
        del sets, dense
    versions = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda}
    Path(sys.argv[1], "few_rows.json").write_text(json.dumps(versions | {"rows": found}, indent=1))


if __name__ == "__main__":
    main()
