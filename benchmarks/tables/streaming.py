"""The recorded figures of layers that stream to GPUs as Markdown. Loads no torch."""

from __future__ import annotations

from typing import Any

import _paths  # noqa: F401
from benchmarks import record


def table(result: dict[str, Any]) -> str:
    """Format steps beside the floor of the host link."""
    made, sections = result["environment"], result["sections"]
    lines = [
        "| GPUs | streamed to each | slowest link | step | time | floor | of floor | tokens/s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines_after: list[str] = []
    for name in [name.removesuffix(" about") for name in sections if name.endswith(" host about")]:
        about = sections[f"{name} about"]["result"]
        for kind, what in (("decode", "{} sequences that decode"), ("prefill", "{} prompt tokens")):
            if f"{name} {kind}" not in sections:
                continue
            row = sections[f"{name} {kind}"]["result"]
            seconds, link = row["step_s"]["median"], min(about["link_bytes_per_second"])
            lines.append(
                f"| {about['ranks']} | {about['streamed_bytes_each'] / 1e9:.1f} GB | "
                f"{link / 1e9:.1f} GB/s | {what.format(row['tokens'])} | {seconds:.3f} s | "
                f"{row['floor_s']:.3f} s | {row['of_floor']:.1%} | {row['tokens'] / seconds:,.0f} |"
            )
        gpu = "the GPU" if about["ranks"] == 1 else "the first GPU"
        lines_after.append(
            f"{about['gpu_bytes_used'] / 1e9:.1f} GB of {gpu} are in use, "
            f"with a KV cache of {about['kv_tokens']:,} tokens; the engine started in {about['start_s']:.0f} s."
        )
    packages = ", ".join(f"{name} {version}" for name, version in made["packages"].items())
    which = record.made_at(sections.values())
    said = "\n\n".join(["\n".join(lines), *lines_after])
    return f"{said}\n\n`benchmarks/engine/zero_inference.py` on {made['gpu']}s, {packages}, {which}.\n"
