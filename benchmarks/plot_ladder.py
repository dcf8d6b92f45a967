"""Draws docs/images/ladder.png from benchmarks/results/h200/ladder.json.

python benchmarks/plot_ladder.py
"""

from __future__ import annotations

import json

import matplotlib

import record

matplotlib.use("Agg")
from matplotlib import pyplot


def main() -> None:
    rows = json.loads((record.RESULTS / "h200/ladder.json").read_text())["rows"]
    work = 2 * 4096**3
    shown = [row for row in rows if row["case"] in ("float32 4096x4096x4096", "bfloat16 4096")]
    names = [row["name"] for row in shown]
    rates = [work / row["us"] / 1e6 for row in shown]
    colours = ["#9aa5b1" if "cublas" in name else "#2f6f9f" for name in names]
    figure, axes = pyplot.subplots(figsize=(8, 3.2))
    bars = axes.barh(names, rates, color=colours)
    axes.bar_label(bars, [f"{rate:.3g}" for rate in rates], padding=4)
    axes.set_xscale("log")
    axes.set_xlim(0.5, 2000)
    axes.set_xlabel("TFLOP/s at 4096 x 4096 x 4096 (logarithmic)")
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(record.ROOT / "docs/images/ladder.png", dpi=120)


if __name__ == "__main__":
    main()
