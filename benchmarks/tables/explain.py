"""Tables of what ``examples/explain`` and ``explain/sums.py`` recorded."""

from __future__ import annotations

from typing import Any

import _paths  # noqa: F401
from benchmarks import record

TOKEN_PARTS = {
    "floor": "at the floor",
    "kernels above it": "kernels above their floor",
    "launch": "launching",
    "host": "Python",
    "sync": "waiting for the GPU",
    "copies": "copies",
}


def _made(result: dict[str, Any]) -> str:
    machine = result["environment"]
    where = machine.get("gpu") or f"{machine['processor']}, {machine['cores']} cores"
    return f"`{result['command']}` on {where}, {record.made_at([machine])}."


def generate(result: dict[str, Any]) -> str:
    """Format a token's time with transformers and with the engine, part by part."""
    engines, difference = result["engines"], result["difference_ms"]
    lines = ["| ms per token | transformers, eager | Transect | difference |", "|---|---:|---:|---:|"]
    for part, said in TOKEN_PARTS.items():
        theirs, ours = (engines[name]["parts_ms"].get(part, 0.0) for name in ("transformers", "transect"))
        if max(theirs, ours) >= 0.005:
            lines.append(f"| {said} | {theirs:.2f} | {ours:.2f} | {difference.get(part, 0.0):+.2f} |")
    theirs, ours = (engines[name]["ms_a_token"] for name in ("transformers", "transect"))
    lines.append(f"| together | {theirs:.2f} | {ours:.2f} | {theirs - ours:+.2f} |")
    lines.append(f"| tokens/s | {1e3 / theirs:.0f} | {1e3 / ours:.0f} | |")
    return "\n".join(lines) + f"\n\n{result['model']}, {_made(result)}\n"


def product(result: dict[str, Any]) -> str:
    """Format one product on one roofline."""
    lines = ["| | ms | floor, ms | TFLOP/s | of the roof |", "|---|---:|---:|---:|---:|"]
    for row in result["products"]:
        seconds, least = row["seconds"], row["floor_s"]
        rate = 1e-12 * row["flops"] / seconds
        lines.append(
            f"| {row['name']} | {1e3 * seconds:.2f} | {1e3 * least:.2f} | {rate:.1f} | {least / seconds:.0%} |"
        )
    return "\n".join(lines) + f"\n\n{_made(result)}\n"


def gelu(result: dict[str, Any]) -> str:
    """Format a step of each version: its time, the GPU's part of it, and the floor of its operators."""
    lines = ["| step | ms | GPU busy, ms | floor | kernels |", "|---|---:|---:|---:|---:|"]
    for row in result["rows"]:
        times = (1e3 * row[key] / result["steps"] for key in ("seconds", "computing_s", "floor_s"))
        shown = " | ".join(f"{each:.3f}" for each in times)
        lines.append(f"| {row['name']} | {shown} | {row['operators'] / result['steps']:g} |")
    return "\n".join(lines) + f"\n\n{_made(result)}\n"


def recommender(result: dict[str, Any]) -> str:
    """Format the times before and after, predicted and obtained."""
    return (
        f"Slow {1e3 * result['slow_s']:.1f} ms, fast {1e3 * result['fast_s']:.2f} ms: {result['times']:.0f} times. "
        f"Of the slow time {result['at_the_floor']:.1%} is at the floor; the findings promise "
        f"{result['predicted_share']:.0%} of it, the fast version saves {result['obtained_share']:.0%}. "
        f"{_made(result)}\n"
    )


def xor_to_llm(result: dict[str, Any]) -> str:
    """Format each example's share of the machine, and the causes of the rest of its time."""
    lines = ["| | on | of the peak FLOP/s | at the floor | main other cost |", "|---|---|---:|---:|---|"]
    for row in result["rows"]:
        chief, least = dict(row["chief"]), max(row["at_the_floor"], row["of_peak"])
        if "inefficiency" in chief:  # a kernel without shapes has no floor, but its FLOPs alone take that long
            chief["inefficiency"] -= least - row["at_the_floor"]
        rest = ", ".join(f"{share:.0%} {cause}" for cause, share in _named(chief))
        where = {"cpu": "processor", "cuda": "GPU"}[row["device"]]
        peak = f"{100 * row['of_peak']:.2g}%" if row["of_peak"] else "plain Python"
        lines.append(f"| {row['name']} | {where} | {peak} | {least:.1%} | {rest} |")
    return "\n".join(lines) + f"\n\n{_made(result)}\n"


def _named(parts: dict[str, float]) -> list[tuple[str, float]]:
    from transect.explain.program.split import PARTS

    return [(PARTS[part].partition(":")[0], share) for part, share in parts.items()]
