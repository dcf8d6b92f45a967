"""One MLP with GELU, three ways, each beside its floor: operator by operator, the same in a CUDA graph, and fused.

    python examples/explain/gelu_mlp.py [--json figures.json]

The eager version writes GELU out as users do, so its intermediate results go through memory five times, and each is a
call. A CUDA graph calls once and moves as many bytes. The last uses torch's own GELU, one kernel: fewer calls and fewer
bytes. Each is explained in turn, on a GPU if there is one; without one there is no graph.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transect.explain import Explain
from transect.hardware.environment import environment

ROWS, DIM, HIDDEN, STEPS = 256, 256, 1024, 10
Work = Callable[[], Tensor]


def written_out(x: Tensor) -> Tensor:
    """GELU's tanh form, operator by operator."""
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)))


def fused(x: Tensor) -> Tensor:
    """The same in one kernel."""
    return torch.nn.functional.gelu(x, approximate="tanh")


def mlp(activation: Callable[[Tensor], Tensor], device: str) -> Work:
    """``down(activation(up(x)))`` on random numbers, the same for every activation."""
    generator = torch.Generator().manual_seed(0)
    x, up, down = (
        torch.randn(shape, generator=generator).to(device) for shape in ((ROWS, DIM), (DIM, HIDDEN), (HIDDEN, DIM))
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


def explained(name: str, work: Work, floor_s: float | None = None) -> tuple[Tensor, dict[str, Any]]:
    """Run and explain one version: its result, and its figures. ``floor_s``: that of a graph, whose kernels have no
    shapes in a trace."""
    work()
    with Explain() as run:
        for _ in range(STEPS):
            result = work()
    assert run.result is not None
    split = run.result.split
    calls = sum(op.calls for op in split.ops if op.floor or floor_s is not None)
    floor, wall = (split.parts["floor"] if floor_s is None else floor_s), split.own
    print(
        f"{name:12} {1e3 * wall:8.2f} ms, floor of its operators {1e3 * floor:6.2f} ms ({floor / wall:.0%}), "
        f"{calls} operators"
    )
    return result, {"name": name, "seconds": wall, "floor_s": floor, "calls": calls, "parts": split.parts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    with torch.inference_mode():
        eager, first = explained("written out", mlp(written_out, device))
        rows = [first]
        if on_gpu:
            replayed, row = explained("in a graph", graphed(mlp(written_out, device)), first["floor_s"])
            torch.testing.assert_close(eager, replayed)
            rows.append(row)
        one, row = explained("one kernel", mlp(fused, device))
        rows.append(row)
    torch.testing.assert_close(eager, one, rtol=1e-3, atol=1e-3)
    if options.json:
        gpu = {"gpu": torch.cuda.get_device_name()} if on_gpu else {}
        result = {"command": "python examples/explain/gelu_mlp.py", "environment": environment() | gpu, "rows": rows}
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
