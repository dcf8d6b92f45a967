"""The recorded figures of number formats on one GPU as Markdown, beside bfloat16. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import _paths  # noqa: F401
from benchmarks import record

NAMES = {
    "bf16": "bfloat16",
    "bf16-kv8": "bfloat16, KV cache in fp8",
    "bf16-kv-int8": "bfloat16, KV cache in int8",
    "fp8": "fp8",
    "fp8-kv8": "fp8, KV cache in fp8",
    "int8": "int8",
    "int4": "int4",
    "q4_k_m": "GGUF Q4_K_M",
    "q8_0": "GGUF Q8_0",
}
"""Formats of ``formats/gpu.py`` in the order of the table."""
BATCHES = (1, 8, 64, 256)


def _cell(sections: Mapping[str, Any], name: str) -> str:
    found = sections.get(name)
    if found is None:
        return ""
    result = found["result"]
    if "tokens_per_s" in result:
        return f"{result['tokens_per_s']:,.0f}"
    return f"{1e3 * result['step_s']['median']:.2f} ({result['of_floor']:.0%})"


def table(formats: Mapping[str, Any], engine: Mapping[str, Any]) -> str:
    """Format milliseconds of a decode step by batch, with the share of the floor, and tokens/s of the throughput
    protocol.

    Args:
        formats: the file of ``formats/gpu.py``.
        engine: that of ``engine/gpu.py``, for bfloat16 where the first has none.
    """
    sections = dict(formats["sections"])
    for key, section in engine["sections"].items():
        kind, *batch = key.split()
        if kind in ("decode", "throughput"):
            sections.setdefault(" ".join([kind, "bf16", *batch]), section)
    rows = ["| | " + " | ".join(f"batch {batch}" for batch in BATCHES) + " | tokens/s |", "|---|---|---|---|---|---|"]
    shown: list[Mapping[str, Any]] = []
    for name, words in NAMES.items():
        keys = [f"decode {name} {batch}" for batch in BATCHES] + [f"throughput {name}"]
        shown += [sections[key] for key in keys if key in sections]
        if any(key in sections for key in keys):
            rows.append(f"| {words} | " + " | ".join(_cell(sections, key) for key in keys) + " |")
    machine = formats["environment"]
    packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    origin = f"`python benchmarks/formats/gpu.py` on one {machine['gpu']}, {packages}, {record.made_at(shown)}."
    return "\n".join([*rows, "", origin]) + "\n"
