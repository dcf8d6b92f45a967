"""The table of training with states in host memory and on a disk, from ``results/h200/train_offload_*.json`` and
``results/cpu/train_offload_states.json`` (``train/offload.py``)."""

from __future__ import annotations

import json
from typing import Any

import _paths  # noqa: F401
from benchmarks import record

PARTS = ("memory", "accumulate", "delayed", "all", "layers", "tiles", "disk", "disk_all")


def results() -> list[dict[str, Any]]:
    """List the results that were measured."""
    files = [record.RESULTS / "h200" / f"train_offload_{part}.json" for part in PARTS]
    return [json.loads(file.read_text()) for file in files if file.exists()]


def way(result: dict[str, Any]) -> str:
    """Describe the differences from run to run."""
    where = "on a disk" if result["part"] == "disk" else "in host memory"
    what = "states and weights" if result.get("all") else "states"
    limit = f" ({result['limit']} of the GPU)"
    times = result.get("accumulate", 1)
    batch = f"{times} x {result['steps'][0]['tokens'] // times:,} tokens"
    tiles = f", matrices in {result['tiles']} tiles" if result.get("tiles", 1) > 1 else ""
    return f"{result['model']}{limit}, {what} {where}{tiles}, {batch}{', delayed' if result.get('delayed') else ''}"


def table() -> str:
    """Format each run beside the floors of its parts."""
    lines = [
        "| run | tok/s | step, s (min to max) | until the norm, s (floor) | AdamW, s (floor) | floor over step | GPU "
        "memory, predicted and measured |",
        "|---|---|---|---|---|---|---|",
    ]
    found = results()
    for result in found:
        step, floors, steps = result["step_seconds"], result["floors"], result["steps"][1:]
        middle = sorted(steps, key=lambda one: one["seconds"])[len(steps) // 2]
        before = (
            "gpu",
            "gradients to the host",
            *(("weights to the device", "disk, weights") if result.get("all") else ()),
        )
        first = max(floors.get(name, 0.0) for name in before)
        second = max(floors[name] for name in floors if name not in before)
        lines.append(
            f"| {way(result)} | {result['tokens_per_second']:,.0f} | {step['median']:.2f} ({step['min']:.2f} to "
            f"{step['max']:.2f}) | {middle['to_the_norm']:.2f} ({first:.2f}) | {middle['adamw']:.2f} ({second:.2f}) | "
            f"{result['share_of_sequential_floor']:.0%} | {result['predicted_bytes'] / 1e9:.1f} and "
            f"{result['peak_bytes'] / 1e9:.1f} GB |"
        )
    return (
        "\n".join([*lines, "", *map(rates, found[:1]), *filter(None, map(disk, found)), states(), origin(found)]) + "\n"
    )


def rates(result: dict[str, Any]) -> str:
    """Format the machine's rates in the same run."""
    kernel, link = result["rates"]["adamw"][0], result["rates"]["link"]
    return (
        f"In the same run the C++ AdamW took {kernel['numbers_per_second'] / 1e9:.1f} billion numbers per second on "
        f"{kernel['threads']} cores ({kernel['bytes_per_second'] / 1e9:.0f} GB/s), torch's fused AdamW "
        f"{kernel['torch_fused_numbers_per_second'] / 1e9:.1f}, and "
        f"{kernel['torch_fused_and_rounding_numbers_per_second'] / 1e9:.1f} with the rounding to bfloat16 that our "
        f"kernel includes; the link reached {link['to_host'] / 1e9:.0f} GB/s to the host and "
        f"{link['to_device'] / 1e9:.0f} GB/s to the device.\n"
    )


def disk(result: dict[str, Any]) -> str:
    """Format the rate of the disk, and the part of it that a step used."""
    if result["part"] != "disk":
        return ""
    rate = result["rates"]["disk"]
    return (
        f"The disk read {rate['read'] / 1e9:.2f} GB/s, wrote {rate['write'] / 1e9:.2f} GB/s, and moved "
        f"{rate['both'] / 1e9:.2f} GB/s with concurrent reads and writes; a step moved "
        f"{result['disk_bytes_per_second'] / 1e9:.2f} GB/s.\n"
    )


def states() -> str:
    """Format AdamW over states on a disk, beside the disk."""
    result = json.loads((record.RESULTS / "cpu" / "train_offload_states.json").read_text())
    machine, rows = result["environment"], result["rows"]
    middle = sorted(rows, key=lambda row: row["share"])[len(rows) // 2]
    return (
        f"States of {result['numbers'] / 1e6:.0f} million numbers in a file, without a model: AdamW moved "
        f"{middle['bytes_per_second'] / 1e9:.1f} GB/s to and from the disk, which reached "
        f"{middle['disk']['both'] / 1e9:.1f} GB/s just before with concurrent reads and writes "
        f"({middle['share']:.0%}; "
        f"{min(row['share'] for row in rows):.0%} to {max(row['share'] for row in rows):.0%} over {len(rows)} steps; "
        f"`python benchmarks/train/offload.py OUT.json --part states` on {machine['cores']} cores of an "
        f"{machine['processor']}, {record.made_at([machine])}).\n"
    )


def origin(found: list[dict[str, Any]]) -> str:
    """Format the origin of the numbers."""
    machine = found[0]["environment"]
    runs = sorted({result["step_seconds"]["runs"] for result in found})
    steps = str(runs[0]) if len(runs) == 1 else f"{runs[0]} to {runs[-1]}"
    versions = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    return (
        f"`python benchmarks/train/offload.py OUT.json --part memory` on one NVIDIA H200 limited to the memory of each "
        f"row, {machine['cores']} cores of an {machine['processor']}, Python {machine['python']}, {versions}, "
        f"{record.made_at(result['environment'] for result in found)}: random weights and tokens, bfloat16 with "
        f"float32 master weights, medians of {steps} steps after the first. Floors: the GPU "
        "at 750 TFLOP/s, AdamW at the best rate of host memory in the run; the CPU's step starts when the norm is "
        "known."
    )
