"""Draws docs/images/engine-step.png from benchmarks/results/h200/engine_*.json: where the time of a decode step goes.

python benchmarks/tables/plot_engine.py
"""

from __future__ import annotations

import matplotlib

import _paths  # noqa: F401
from benchmarks import record
from benchmarks.tables import engine as engine_tables

matplotlib.use("Agg")
from matplotlib import pyplot

COLOURS = ("#2f6f9f", "#7fb3d5", "#b8860b", "#e0b64c", "#8fae5d", "#b05c6b", "#8b7fb5", "#9aa5b1", "#e3e6e9")


def main() -> None:
    rows = [
        (f"{model}\n{row['batch']} at a time", row)
        for model, known in engine_tables.load().items()
        for row in sorted(engine_tables.sections(known, "trace"), key=lambda row: row["batch"])
        if not row["mixed_options"]
    ]
    names = [name for name, _ in rows]
    figure, axes = pyplot.subplots(figsize=(10, 0.62 * len(rows) + 1.4))
    begun = [0.0] * len(rows)
    parts = [engine_tables.parts_of(row) for _, row in rows]
    for part, colour in zip(parts[0], COLOURS, strict=True):
        widths = [found[part] * 1e-6 / row["floor_s"] for found, (_, row) in zip(parts, rows, strict=True)]
        axes.barh(names, widths, left=begun, color=colour, label=part, height=0.62)
        begun = [left + width for left, width in zip(begun, widths, strict=True)]
    for index, (end, (_, row)) in enumerate(zip(begun, rows, strict=True)):
        axes.text(end + 0.03, index, f"{row['span_us'] / 1e3:.2f} ms", va="center", fontsize=9)
    axes.axvline(1, color="black", linewidth=1)
    axes.text(1.01, -0.75, "floor", fontsize=9)
    axes.set_xlabel("time of a step over its floor")
    axes.set_xlim(0, max(begun) * 1.12)
    axes.set_ylim(len(rows) - 0.5, -1.0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.tight_layout()
    figure.savefig(record.ROOT / "docs/images/engine-step.png", dpi=120)


if __name__ == "__main__":
    main()
