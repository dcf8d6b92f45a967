"""One MLP with GELU beside its floor: operator by operator and with one kernel, called and in a CUDA graph.

    python examples/explain/gelu_mlp.py [--json figures.json]

The first version writes GELU out as users do, so its intermediate results go through memory five times, and each is a
call. A CUDA graph calls once and moves as many bytes. One kernel for GELU (torch's own) is fewer calls and fewer bytes.
Where the tensors are small, calls are what takes the time; where they are large, bytes. Each version is explained in
turn, and timed without the profiler; without a GPU there are no graphs and no large tensors.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transect.explain import Explain
from transect.hardware.environment import environment

SMALL, LARGE = (256, 256, 1024), (8192, 1024, 4096)
"""Rows, the model's dimension, and that of the hidden layer."""
STEPS, ROUNDS = 10, 5
Work = Callable[[], Tensor]


def written_out(x: Tensor) -> Tensor:
    """GELU's tanh form, operator by operator."""
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)))


def fused(x: Tensor) -> Tensor:
    """The same in one kernel."""
    return torch.nn.functional.gelu(x, approximate="tanh")


def mlp(activation: Callable[[Tensor], Tensor], sizes: tuple[int, int, int], device: str) -> Work:
    """``down(activation(up(x)))`` on random numbers, the same for every activation."""
    generator = torch.Generator().manual_seed(0)
    rows, dim, hidden = sizes
    x = torch.randn((rows, dim), generator=generator).to(device)
    up, down = (
        (torch.randn(shape, generator=generator) / math.sqrt(shape[0])).to(device)
        for shape in ((dim, hidden), (hidden, dim))
    )
    return lambda: activation(x @ up) @ down


def graphed(work: Work) -> Work:
    """The same kernels, captured once and replayed."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = work()

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay


def seconds(work: Work) -> float:
    """What ``STEPS`` steps take without the profiler, in the shortest of several rounds."""
    found = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for _ in range(STEPS):
            work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
    return min(found)


def explained(name: str, work: Work, floor_s: float | None = None) -> tuple[Tensor, dict[str, Any]]:
    """Run, explain and time one version: its result, and its figures. ``floor_s``: that of a graph, whose kernels have
    no shapes in a trace."""
    work()
    taken = seconds(work)
    with Explain() as run:
        for _ in range(STEPS):
            result = work()
    assert run.result is not None
    split = run.result.split
    counted = [op for op in split.ops if op.floor or floor_s is not None]
    floor = split.parts["floor"] if floor_s is None else floor_s
    computing = sum(op.seconds for op in counted)
    row = {"name": name, "seconds": taken, "floor_s": floor, "computing_s": computing, "parts": split.parts}
    row["operators"] = sum(op.calls for op in counted)
    print(
        f"{name:26} {1e3 * taken:8.2f} ms, {1e3 * computing:8.2f} ms under the profiler in {row['operators']} "
        f"operators, whose floor is {1e3 * floor:6.2f} ms"
    )
    return result, row


def versions(sizes: tuple[int, int, int], title: str, device: str) -> list[dict[str, Any]]:
    """All ways for tensors of one size; their results must agree."""
    rows, expected = [], None
    for name, activation in (("written out", written_out), ("one kernel", fused)):
        work = mlp(activation, sizes, device)
        result, row = explained(f"{title}{name}", work)
        rows.append(row)
        if expected is None:
            expected = result
        torch.testing.assert_close(expected, result, rtol=1e-3, atol=1e-3)
        if device == "cuda":
            replayed, row = explained(f"{title}{name}, in a graph", graphed(work), row["floor_s"])
            torch.testing.assert_close(result, replayed)
            rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    with torch.inference_mode():
        rows = versions(SMALL, "small, " if on_gpu else "", device)
        if on_gpu:
            rows += versions(LARGE, "large, ", device)
    if options.json:
        gpu = {"gpu": torch.cuda.get_device_name()} if on_gpu else {}
        result = {
            "command": "python examples/explain/gelu_mlp.py",
            "environment": environment() | gpu,
            "steps": STEPS,
            "rows": rows,
        }
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
