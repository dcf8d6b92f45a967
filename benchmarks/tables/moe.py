"""The recorded figures of mixtures of experts on GPUs as Markdown. Loads no torch."""

from __future__ import annotations

from typing import Any

import _paths  # noqa: F401
from benchmarks import record


def _origin(result: dict[str, Any], command: str) -> str:
    made = result["environment"]
    packages = ", ".join(f"{name} {version}" for name, version in made["packages"].items())
    return f"\n`{command}` on an {result['gpu']}, {packages}, {record.made_at([made])}.\n"


def decode(result: dict[str, Any]) -> str:
    """Format steps beside the floor of the experts that they read."""
    lines = ["| sequences | experts used per layer | step | floor | of floor | products of experts | routing |"]
    lines.append("|---|---|---|---|---|---|---|")
    for row in result["decode"]:
        shares = row["shares"]
        lines.append(
            f"| {row['batch']} | {row['distinct_experts']:.0f} | {row['step_s']['median'] * 1e3:.2f} ms | "
            f"{row['floor_s'] * 1e3:.2f} ms | {row['of_floor']:.0%} | {shares['products of experts']:.0%} | "
            f"{shares['routing']:.0%} |"
        )
    prefill = result.get("prefill")
    if prefill is not None:
        lines += [
            "",
            f"Prefill of 64 prompts of 512 tokens: {prefill['seconds']['median']:.3f} s, {prefill['of_floor']:.0%} of "
            f"its floor of {prefill['floor_s']:.3f} s.",
        ]
    return "\n".join(lines) + "\n" + _origin(result, "benchmarks/engine/moe.py decode prefill")


def products(result: dict[str, Any]) -> str:
    """Format the products of one layer beside torch's."""
    names = [name for name in ("gate", "gate and up", "down") if f"{name}_ours" in result["ops"][0]]
    lines = ["| tokens | experts used | product | time | torch `grouped_mm` | floor |", "|---|---|---|---|---|---|"]
    for row in result["ops"]:
        for name in names:
            ours, torch = (row[f"{name}_{who}"].get("median") for who in ("ours", "torch"))
            shown = ["not run" if each is None else f"{each * 1e6:.0f} us" for each in (ours, torch)]
            floor = row[f"{name}_floor"] * 1e6
            lines.append(
                f"| {row['tokens']} | {row['distinct_experts']:.0f} | {name} | {' | '.join(shown)} | {floor:.0f} us |"
            )
    return "\n".join(lines) + "\n" + _origin(result, "benchmarks/engine/moe.py ops")


def layouts(result: dict[str, Any]) -> str:
    """Decode on two GPUs by layout."""
    lines = [
        "| layout | sequences | tokens/s | a token of a sequence | half of one GPU's floor |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['layout']} | {row['batch']} | {row['tokens_per_s']:,.0f} | {row['token_s'] * 1e3:.2f} ms | "
        f"{row['half_floor_s'] * 1e3:.2f} ms |"
        for row in result["layouts"]
    ]
    return "\n".join(lines) + "\n" + _origin(result, "benchmarks/engine/moe.py layouts")
