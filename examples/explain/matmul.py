"""One matrix product, 3620 by 3620, from a naive kernel to tensor cores and the processor's BLAS, on one roofline.

    python examples/explain/matmul.py [--size 3620] [--svg matmul.svg] [--json matmul.json]

The same 95 GFLOP on the same 157 MB (float32), so all points stand above one another: what separates them is how a
kernel uses the device. The rungs are those of ``src/transect/ops/first/matmul.cu``. Rung 5 has no edges and multiplies
matrices that are padded to a multiple of 128; only the FLOPs of the product itself count. Without a GPU the processor
is measured alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from transect.explain.roofline import Point, roofline
from transect.explain.roofline_svg import svg, text
from transect.hardware.device import detect
from transect.hardware.environment import environment
from transect.ops.cpu.ceilings import device_measurement
from transect.ops.first.matmul_ladder import RUNGS, cuda_matmul

SECONDS = 0.5
"""For each way to multiply."""


def timed(work: Callable[[], object], device: str) -> float:
    """Median seconds of a call."""
    work()
    wait = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    wait()
    taken: list[float] = []
    until = time.perf_counter() + SECONDS
    while len(taken) < 3 or (time.perf_counter() < until and len(taken) < 50):
        began = time.perf_counter()
        work()
        wait()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def padded(size: int) -> int:
    """What rung 5 takes."""
    return -(-size // 128) * 128


def on_gpu(a: Tensor, b: Tensor) -> Iterator[tuple[str, str, Callable[[], Tensor]]]:
    """(name, the dtype whose roof holds, the product)."""
    size = len(a)
    for name, rung in RUNGS.items():
        if rung < 5:
            yield f"rung {rung}: {name[5:]}", "float32", lambda rung=rung: cuda_matmul(a, b.T, rung=rung)
    yield "cuBLAS, float32", "float32", lambda: a @ b
    room = padded(size)
    wide_a, wide_b = (torch.nn.functional.pad(x, (0, room - size, 0, room - size)).bfloat16() for x in (a, b))
    yield "rung 5: tensor cores, bfloat16", "bfloat16", lambda: cuda_matmul(wide_a, wide_b.T, rung=5)
    half_a, half_b = a.bfloat16(), b.bfloat16()
    yield "cuBLAS, bfloat16", "bfloat16", lambda: half_a @ half_b


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=3620)
    parser.add_argument("--svg", type=Path, help="draw the roofline here")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    size = options.size
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ceilings = device_measurement(detect(device)).ceilings
    host = ceilings if device == "cpu" else device_measurement(detect("cpu")).ceilings
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(size, size, generator=generator) for _ in range(2))
    flops = 2.0 * size**3
    points, rows = [], []

    def measured(name: str, dtype: str, where: str, product: Callable[[], Tensor]) -> None:
        limits = ceilings if where == "cuda" else host
        seconds = timed(product, where)
        moved = 3.0 * size * size * (2 if dtype == "bfloat16" else 4)
        least = max(flops / limits.rate(dtype), moved / limits.read_bytes_per_second)
        points.append(Point(name, where, flops, moved, least, dtype, seconds))
        rows.append({"name": name, "dtype": dtype, "on": where, "seconds": seconds, "floor_s": least, "flops": flops})
        rate = 1e-12 * flops / seconds
        print(f"{name:32} {1e3 * seconds:9.2f} ms  {rate:8.2f} TFLOP/s  {least / seconds:6.1%} of the peak", flush=True)

    if device == "cuda":
        for name, dtype, product in on_gpu(a.cuda(), b.cuda()):
            measured(name, dtype, "cuda", product)
    measured("the processor's BLAS, float32", "float32", "cpu", lambda: a @ b)
    found = roofline(ceilings, points)
    print(text(found))
    if options.svg:
        options.svg.write_text(svg(found))
    if options.json:
        gpu = {"gpu": torch.cuda.get_device_name()} if device == "cuda" else {}
        command = f"python examples/explain/matmul.py --size {size}"
        result = {"command": command, "environment": environment() | gpu, "size": size, "products": rows}
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
