"""Flash attention forward, contenders in turns: a round runs every one of them once, so that all see the same clocks.

    python benchmarks/ops/attention_forward.py OUT.json [--rounds 15] [--case PART_OF_A_NAME ...] [--contenders A,B]

A GPU that is held back by its power limit gives the contender that runs first in a long series the higher clock;
ratios are therefore taken from rounds. A turn is one replay of a CUDA graph of two calls on different inputs. Cases,
contenders and FLOPs are the operator's own (``transect.ops.attention.packed.flash_attention``).
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import _paths  # noqa: F401
from benchmarks.record import environment, summary, write
from transect.ops.registry import Case, Op, all_ops, get

CALLS = 2


def callables(op: Op, names: Sequence[str]) -> dict[str, Callable[..., Any]]:
    """Return implementations and peers by name."""
    loaded = {name: op.implementations[name].load() for name in names if name in op.implementations}
    return loaded | {name: op.peers[name] for name in names if name in op.peers}


def graph_of(call: Callable[..., Any], inputs: Sequence[Any]) -> torch.cuda.CUDAGraph:
    """Capture one call for each of the inputs."""
    for arguments in inputs:
        call(**arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for arguments in inputs:
            call(**arguments)
    return graph


def seconds(graph: torch.cuda.CUDAGraph) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e-3 / CALLS


def race(op: Op, case: Case, names: Sequence[str], rounds: int) -> dict[str, Any]:
    """Measure the seconds of each contender, and its speed as a multiple of cuDNN's: median and extremes over
    rounds."""
    inputs = [case.make(torch.device("cuda"), seed) for seed in range(CALLS)]
    flops = op.cost(**inputs[0]).flops
    graphs, refused = {}, {}
    for name, call in callables(op, names).items():
        made = op.implementations.get(name)
        refused[name] = made.refusal(**inputs[0]) if made and made.refusal else None
        if not refused[name]:
            graphs[name] = graph_of(call, inputs)
    turns: dict[str, list[float]] = {name: [] for name in graphs}
    for turn in range(rounds + 1):
        for name, graph in graphs.items():
            taken = seconds(graph)
            if turn:
                turns[name].append(taken)
    rows = {}
    for name, times in turns.items():
        rows[name] = {"seconds": summary(times), "tflops": flops / statistics.median(times) / 1e12}
        if "cudnn" in turns:
            rows[name]["of_cudnn"] = summary([c / t for c, t in zip(turns["cudnn"], times, strict=True)])
    return {"case": case.name, "flops": flops, "contenders": rows, "refused": {n: r for n, r in refused.items() if r}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--case", action="append", default=[])
    parser.add_argument("--contenders", default="hopper,triton,cuda,cudnn,flash2")
    options = parser.parse_args()
    all_ops()
    op = get("flash_attention")
    found = []
    for case in op.cases():
        if options.case and not any(part in case.name for part in options.case):
            continue
        result = race(op, case, options.contenders.split(","), options.rounds)
        found.append(result)
        parts = [f"{n} {r['tflops']:.0f} TFLOP/s" for n, r in result["contenders"].items()]
        ratio = result["contenders"].get("hopper", {}).get("of_cudnn")
        spread = f" | hopper/cudnn {ratio['median']:.3f} [{ratio['min']:.3f} {ratio['max']:.3f}]" if ratio else ""
        print(case.name, "|", ", ".join(parts) + spread, flush=True)
    about = {"environment": environment(("torch", "triton")), "gpu": torch.cuda.get_device_name()}
    write(options.out, about | {"method": f"{options.rounds} rounds in turns, graphs of {CALLS} calls", "rows": found})


if __name__ == "__main__":
    main()
