"""The tables of training on GPUs: on one from ``results/h200/train.json`` and ``train_before.json`` (``train/gpu.py``),
on several from ``train_parallel.json`` and ``train_parallel_8b.json`` (``train/parallel.py``)."""

from __future__ import annotations

from typing import Any

import _paths  # noqa: F401
from benchmarks import record

NAMES = {
    "full 1b": "all weights, Llama-3.2-1B",
    "lora 8b": "LoRA r = 16, Llama-3.1-8B",
    "qlora 8b": "QLoRA r = 16, Llama-3.1-8B",
}
CONTENDERS = {
    "transect": "Transect",
    "transformers": "transformers",
    "liger": "transformers + Liger-Kernel",
    "liger compiled": "transformers + PEFT + Liger-Kernel, compiled",
}


def race(result: dict[str, Any]) -> str:
    """Format tokens per second, MFU and peak memory; the ratio is Transect's rate over the contender's."""
    lines = [
        "| work | program | tok/s | step, ms (min to max) | MFU | peak memory | Transect's tok/s over it |",
        "|---|---|---|---|---|---|---|",
    ]
    ours = {row["work"]: row["tokens_per_second"] for row in result["rows"] if row["contender"] == "transect"}
    for row in result["rows"]:
        contender = CONTENDERS[row["contender"]]
        if row["contender"] == "liger" and "lora" in row["work"]:
            contender = "transformers + PEFT + Liger-Kernel"
        name = f"| {NAMES[row['work']]} | {contender} |"
        if "error" in row:
            lines.append(f"{name} did not run: {' '.join(row['error'])} | | | | |")
            continue
        step = row["step_seconds"]
        ratio = "" if row["contender"] == "transect" else f"{ours[row['work']] / row['tokens_per_second']:.2f}x"
        lines.append(
            f"{name} {row['tokens_per_second']:,.0f} | {step['median'] * 1e3:.1f} ({step['min'] * 1e3:.1f} to "
            f"{step['max'] * 1e3:.1f}) | {row['mfu']:.1%} | {row['peak_bytes'] / 1e9:.1f} GB | {ratio} |"
        )
    return "\n".join([*lines, "", origin(result)]) + "\n"


def memory(result: dict[str, Any]) -> str:
    """Format the account made before the first step, and the allocator's peak."""
    lines = [
        "| work | `checkpointing` | predicted | measured | ratio | peak at |",
        "|---|---|---|---|---|---|",
    ]
    raced = [
        {
            **row,
            "checkpointing": row["checkpointing"]
            + (f", the last {row['layers_without']} layers without" if row["layers_without"] else ""),
            "measured_bytes": row["peak_bytes"],
            "ratio": row["predicted_bytes"] / row["peak_bytes"],
        }
        for row in result["rows"]
        if "predicted_bytes" in row
    ]
    for row in [*raced, *result["memory"]]:
        if "error" in row:
            lines.append(f"| {NAMES[row['work']]} | did not run: {' '.join(row['error'])} | | | | |")
            continue
        lines.append(
            f"| {NAMES[row['work']]} | {row['checkpointing']} | {row['predicted_bytes'] / 1e9:.2f} GB | "
            f"{row['measured_bytes'] / 1e9:.2f} GB | {row['ratio']:.3f} | {row['worst']} |"
        )
    return "\n".join([*lines, "", origin(result)]) + "\n"


def slow_links(result: dict[str, Any]) -> str:
    """Format the final losses, and the bytes that a rank sends for gradients in a step after the warm-up."""
    lines = [
        "| optimizer | steps | validation loss | compared with AdamW at the usual batch | bytes per step | reduction |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        lines.append(
            f"| {row['name']} | {row['steps']} | {row['validation_loss']:.4f} | {row['beside_adamw']:+.2%} | "
            f"{row['bytes_a_step']:,.0f} | {row['fewer']:.1f}x |"
        )
    machine = result["environment"]
    return "\n".join([*lines, "", f"`{result['command']}`, {record.made_at([machine])}: {result['method']}."]) + "\n"


WAYS = {
    "one": "Transect, one GPU",
    "ddp": "Transect, `data = 2`",
    "ddp fused": 'Transect, `data = 2, sums = "fused"`',
    "ddp nccl": 'Transect, `data = 2, sums = "nccl"`',
    "zero 1": "Transect, `data = 2, zero = 1`",
    "zero 2": "Transect, `data = 2, zero = 2`",
    "zero 3": "Transect, `data = 2, zero = 3`",
    "zero 3 nccl": 'Transect, `data = 2, zero = 3, sums = "nccl"`',
    "tensor": "Transect, `tensor = 2`",
    "tensor sequence": "Transect, `tensor = 2, sequence = true`",
    "pipeline": "Transect, `pipeline = 2`, 4 micro-batches",
    "one, one document": "Transect, one GPU, one document of 32,768 tokens",
    "context, one document": "Transect, `context = 2`, one document of 32,768 tokens",
    "mixed zero 3": 'Transect, `data = 2, zero = 3`, `precision = "mixed"`',
    "experts gathered": 'Transect, `data = 2, expert = 2`, `expert_way = "gather"`',
    "experts exchanged": 'Transect, `data = 2, expert = 2`, `expert_way = "all_to_all"`',
    "fsdp2": "transformers + Liger-Kernel, FSDP2, not compiled",
    "fsdp2 compiled": "transformers + Liger-Kernel, FSDP2, layers compiled",
}
MODELS = {"1b": "Llama-3.2-1B", "3b": "Llama-3.2-3B", "8b": "Llama-3.1-8B", "moe": "8 layers of Qwen3-30B-A3B"}


def spread(*results: dict[str, Any]) -> str:
    """Format training on several GPUs: rates, the cost of the links, and peak memory."""
    lines = [
        "| model | how | tok/s | over Transect on one GPU | step, ms (min to max) | sums and gathers, ms (exposed) | "
        "peak per rank |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in (row for result in results for row in result["rows"]):
        if "error" in row:
            lines.append(f"| {MODELS[row['work']]} | {WAYS[row['way']]} | did not run: {row['error']} | | | | |")
            continue
        step, times = row["step_seconds"], row.get("times_one")
        known = row["ranks"] > 1 and "communication_ms" in row
        links = f"{row['communication_ms']:.1f} ({row['exposed_ms']:.1f})" if known else ""
        extremes = f" ({step['min'] * 1e3:.1f} to {step['max'] * 1e3:.1f})" if "min" in step else ""
        lines.append(
            f"| {MODELS[row['work']]} | {WAYS[row['way']]} | {row['tokens_per_second']:,.0f} | "
            f"{'' if times is None else f'{times:.2f}x'} | {step['median'] * 1e3:.1f}{extremes} | {links} | "
            f"{_gigabytes(row)} |"
        )
    return "\n".join([*lines, "", *(origin(result) + "\n" for result in results)])


def _gigabytes(row: dict[str, Any]) -> str:
    """Format the peak of the rank with the highest; empty if it includes memory left by earlier ways."""
    return f"{max(row['peak_bytes']) / 1e9:.1f} GB" if row["peak_bytes"] else ""


def predicted(*results: dict[str, Any]) -> str:
    """Format the steps and memory of layouts, as predicted before the run, and as measured."""
    lines = [
        "| model | how | predicted, ms | measured, ms | off | predicted peak | measured peak | off |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for result in results:
        for row in result["rows"]:
            before = result.get("predictions", {}).get(f"{row['work']} {row['way']}")
            if before is None or "error" in row:
                continue
            memory = f"{row['memory_off']:+.1%}" if row["peak_bytes"] else ""
            lines.append(
                f"| {MODELS[row['work']]} | {WAYS[row['way']]} | {before['seconds'] * 1e3:.1f} | "
                f"{row['step_seconds']['median'] * 1e3:.1f} | {row['prediction_off']:+.1%} | "
                f"{before['peak_bytes'] / 1e9:.1f} GB | {_gigabytes(row)} | "
                f"{memory} |"
            )
    return "\n".join(lines) + "\n"


def origin(result: dict[str, Any]) -> str:
    """Format the origin of the numbers."""
    machine = result["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    count = max([row.get("ranks", 1) for row in result["rows"]])
    apart = [row for row in result.get("rows", ()) if "commit" in row]  # measured later than the others
    gpus = f"{'one' if count == 1 else count} {result.get('gpu', 'NVIDIA H200')}"
    return (
        f"`{result['command']}` on {gpus}, Python {machine['python']}, {versions}, "
        f"{record.made_at([machine, *apart])}: {result['method']}."
    )


def families(result: dict[str, Any]) -> str:
    """Format full training of other families beside Liger."""
    lines = ["| work | program | tokens/s | of ours | peak memory | MFU |", "|---|---|---|---|---|---|"]
    ours = {row["work"]: row["tokens_per_second"] for row in result["rows"] if row["contender"] == "transect"}
    for row in result["rows"]:
        rate = row["tokens_per_second"]
        lines.append(
            f"| {row['work']} | {row['contender']} | {rate:,.0f} | {rate / ours[row['work']]:.2f} | "
            f"{row['peak_bytes'] / 1e9:.2f} GB | {row['mfu']:.0%} |"
        )
    made = record.made_at([result["environment"], *(row for row in result["rows"] if "commit" in row)])
    lines.append(f"\n`{result['command']}` on one {result['gpu']}, 2 x 4096 tokens a step, {made}.\n")
    return "\n".join(lines)
