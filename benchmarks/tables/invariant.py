"""Tables of ``benchmarks/engine/invariant.py``: the cost of ``--deterministic``, and how many bits were compared."""

from __future__ import annotations

from typing import Any

from benchmarks import record


def table(result: dict[str, Any]) -> str:
    """Render whole layers as usual and deterministic, and decode attention beside the usual kernel."""
    lines = ["| rows | as usual, µs | `--deterministic` | with the usual attention | cost |", "|---|---|---|---|---|"]
    for row in result["layers"]:
        times = " | ".join(f"{row[name]:.1f}" for name in ("usual", "deterministic", "fast attention"))
        lines.append(f"| {row['rows']} | {times} | {row['cost']:.1%} |")
    machine, checks = result["environment"], result["bits"]
    packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    compared, differing = (sum(check[name] for check in checks) for name in ("checked", "differing"))
    lines.append(
        "\nA layer of Llama-3.1-8B's shape at 1,024 positions, in bfloat16. `python "
        f"benchmarks/engine/invariant_layers.py` on one {machine['gpu']}, {packages}, {record.made_at(result['runs'])}"
        f"; medians. Of {compared:,} results of products and attention by other tilings, in other batches and chunks, "
        f"{differing} differ."
    )
    return "\n".join(lines) + "\n"
