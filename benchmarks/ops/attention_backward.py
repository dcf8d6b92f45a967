"""Attention's gradient on one GPU, beside cuDNN's and FlashAttention-2's in the same run, and what bounds it.

    python benchmarks/ops/attention_backward.py OUT.json [--profile]

Every call is the whole backward pass: D, dq, dk and dv, from q, k, v, o, L and the upstream gradient. A case takes the
contenders in turn, 3 calls at a time between two events, ``RUNS`` times, so that they share the clock's ups and downs.
A set of inputs is 5 times the L2 cache and more. ``--profile`` adds Nsight Compute's counters of the one large kernel
(needs ``ncu`` and the right to read counters; clocks are left as they are).
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import _paths  # noqa: F401
from benchmarks.record import environment, summary, write
from transect.ops.attention.packed import flash_attention as fa
from transect.ops.attention.packed.backward import backward

RUNS, CALLS = 15, 3
RATE = 790e12
"""bf16 FLOP/s that a large matrix product reaches on an H200; the floor is the 5 products at this rate."""
CASES = [
    {"batch": batch, "length": length, "heads": 16, "kv_heads": 16, "d": 128, "causal": causal}
    for batch, length in ((4, 4096), (1, 16384))
    for causal in (True, False)
] + [
    {"batch": 4, "length": 4096, "heads": 32, "kv_heads": 8, "d": 128, "causal": True},
    {"batch": 4, "length": 4096, "heads": 32, "kv_heads": 32, "d": 64, "causal": True},
]
COUNTERS = {
    "time_ns": "gpu__time_duration.sum",
    "tensor_pipe_active": "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active",
    "l1_and_shared_memory_data_pipe": "l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_elapsed",
    "l1_throughput": "l1tex__throughput.avg.pct_of_peak_sustained_active",
    "l2_throughput": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "dram_throughput": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "bank_conflicts": "l1tex__data_bank_conflicts_pipe_lsu.sum",
    "issue_slots": "sm__issue_active.avg.pct_of_peak_sustained_elapsed",
    "registers_at_launch": "launch__registers_per_thread",
    **{
        f"stall_{name}": f"smsp__average_warps_issue_stalled_{name}_per_issue_active.ratio"
        for name in (
            "barrier", "gmma", "lg_throttle", "long_scoreboard", "math_pipe_throttle", "short_scoreboard", "wait",
        )
    },
}  # fmt: skip


def inputs(case: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Generate q, k, v and the upstream gradient, packed ``[T, heads, d]``."""
    tokens = case["batch"] * case["length"]
    heads, kv_heads = case["heads"], case["kv_heads"]
    q, k, v, g = (
        torch.randn(tokens, h, case["d"], device="cuda").bfloat16() for h in (heads, kv_heads, kv_heads, heads)
    )
    return q, k, v, g


def ours(case: Mapping[str, Any], q: Tensor, k: Tensor, v: Tensor, g: Tensor, deterministic: bool) -> Callable[[], Any]:
    cu = torch.arange(case["batch"] + 1, device="cuda", dtype=torch.int32) * case["length"]
    options = (cu, case["d"] ** -0.5, case["causal"])
    out, lse = fa.forward(q, k, v, *options)
    return lambda: backward(g, q, k, v, out, lse, *options, deterministic=deterministic)


def theirs(case: Mapping[str, Any], q: Tensor, k: Tensor, v: Tensor, g: Tensor, kind: Any) -> Callable[[], Any]:
    def dense(t: Tensor) -> Tensor:
        return t.view(case["batch"], case["length"], t.shape[1], case["d"]).transpose(1, 2)

    leaves = [dense(t).detach().requires_grad_() for t in (q, k, v)]
    with sdpa_kernel(kind):
        out = F.scaled_dot_product_attention(
            leaves[0], leaves[1], leaves[2], is_causal=case["causal"], enable_gqa=case["heads"] != case["kv_heads"]
        )
    upstream = dense(g)
    return lambda: torch.autograd.grad(out, leaves, upstream, retain_graph=True)


def measure(case: Mapping[str, Any]) -> dict[str, Any]:
    tensors = inputs(case)
    makers: dict[str, Callable[[], Callable[[], Any]]] = {
        "cudnn": lambda: theirs(case, *tensors, SDPBackend.CUDNN_ATTENTION),
        "flash2": lambda: theirs(case, *tensors, SDPBackend.FLASH_ATTENTION),
        "ours": lambda: ours(case, *tensors, deterministic=False),
        "ours, deterministic": lambda: ours(case, *tensors, deterministic=True),
    }
    calls, failed = {}, {}
    for name, make in makers.items():
        try:
            calls[name] = make()
            calls[name]()
            torch.cuda.synchronize()
        except RuntimeError as error:  # a peer that does not take this case
            calls.pop(name, None)
            failed[name] = str(error)[:200]
    times: dict[str, list[float]] = {name: [] for name in calls}
    for run in range(RUNS + 1):  # the first is not counted
        for name, call in calls.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(CALLS):
                call()
            end.record()
            torch.cuda.synchronize()
            if run:
                times[name].append(start.elapsed_time(end) * 1e3 / CALLS)
    pairs = case["batch"] * case["length"] ** 2 / (2 if case["causal"] else 1)
    flops = 10 * pairs * case["heads"] * case["d"]
    results: dict[str, Any] = {}
    for name, found in times.items():
        us = summary(found)
        results[name] = {
            "us": us,
            "tflops": flops / us["median"] / 1e6,
            "of_floor": flops / RATE * 1e6 / us["median"],
        }
        if "cudnn" in times:
            each = [peer / mine for peer, mine in zip(times["cudnn"], found, strict=True)]
            results[name]["speed_beside_cudnn"] = summary(each)
    return {"case": dict(case), "floor_us": flops / RATE * 1e6, "results": results, "failed": failed}


def run_once(index: int) -> None:
    """Run the child that ncu watches."""
    call = ours(CASES[index], *inputs(CASES[index]), deterministic=False)
    for _ in range(2):
        call()
    torch.cuda.synchronize()


def profile(index: int) -> dict[str, Any]:
    """Read the counters of the large kernel's second launch."""
    command = [
        "ncu",
        "--clock-control",
        "none",
        "-k",
        "gradient_kernel",
        "-s",
        "1",
        "-c",
        "1",
        "--csv",
        "--page",
        "raw",
    ]
    command += ["--metrics", ",".join(COUNTERS.values()), sys.executable, __file__, "--once", str(index)]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith('"')]
    if len(lines) < 3:
        raise RuntimeError(f"ncu counted nothing:\n{done.stdout[-1000:]}{done.stderr[-1000:]}")
    row = next(iter(list(csv.DictReader(lines))[1:]))  # the first row holds the units
    return {name: float(row[metric].replace(",", "")) for name, metric in COUNTERS.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--once", type=int)
    options = parser.parse_args()
    if options.once is not None:
        run_once(options.once)
        return
    if options.out is None:
        parser.error("say where to write the results: attention_backward.py OUT.json")
    result: dict[str, Any] = {
        "environment": {**environment(("torch", "triton")), "device": torch.cuda.get_device_name()},
        "command": "python benchmarks/ops/attention_backward.py OUT.json" + " --profile" * options.profile,
        "method": " ".join((__doc__ or "").split("\n\n")[2].split()),
        "rows": [],
    }
    for case in CASES:
        row = measure(case)
        result["rows"].append(row)
        print({k: case[k] for k in ("length", "heads", "kv_heads", "d", "causal")}, row["failed"] or "")
        for name, found in row["results"].items():
            us, beside = found["us"], found.get("speed_beside_cudnn")
            ratio = f"{beside['median']:.3f} [{beside['min']:.3f}, {beside['max']:.3f}]" if beside else ""
            print(f"  {name:20} {us['median']:8.0f} us {found['tflops']:5.0f} TFLOP/s  of cuDNN's speed {ratio}")
    write(options.out, result)
    if options.profile:
        result["profile"] = [
            {"case": CASES[i], "kernel": "gradient_kernel", "counters": profile(i)} for i in range(len(CASES[:4]))
        ]
        print(result["profile"])
        write(options.out, result)


if __name__ == "__main__":
    main()
