"""The curve of a run: as text in the terminal, or as a picture. What the other examples show their losses with."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

WIDTH, HEIGHT = 64, 10


def text_plot(values: Sequence[float], width: int = WIDTH, height: int = HEIGHT) -> str:
    """``values`` from left to right; each column is the mean of its share of them. The scale is logarithmic where they
    span more than a factor of 20."""
    columns = min(width, len(values))
    cuts = [len(values) * i // columns for i in range(columns + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(cuts)]
    logarithmic = min(means) > 0 and max(means) / min(means) > 20
    heights = [math.log(mean) for mean in means] if logarithmic else means
    low, high = min(heights), max(heights)
    rows = [round((value - low) / ((high - low) or 1) * (height - 1)) for value in heights]
    lines = []
    for row in reversed(range(height)):
        label = f"{(max if row else min)(means):.4g}" if row in (0, height - 1) else ""
        lines.append(f"{label:>9} |" + "".join("*" if at == row else " " for at in rows).rstrip())
    note = "   (logarithmic)" if logarithmic else ""
    ends = f"{1:>12}{len(values):>{max(columns - 1, 1)}}{note}"
    return "\n".join([*lines, " " * 10 + "+" + "-" * columns, ends])


def show(curves: Mapping[str, Sequence[float]], file: Path | None = None) -> None:
    """Print each curve, or with ``file`` (a .png, .svg or .pdf) draw all of them into it with matplotlib."""
    figures = None
    if file is not None:
        try:
            import matplotlib.figure as figures
        except ImportError:
            print("--plot needs matplotlib: pip install matplotlib")
    if file is None or figures is None:
        for name, values in curves.items():
            print(f"\n{name}, by step\n{text_plot(values)}")
        return
    figure = figures.Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, values in curves.items():
        axes.plot(range(1, len(values) + 1), values, label=name)
    axes.set_xlabel("step")
    axes.legend()
    axes.grid(alpha=0.25)
    figure.savefig(file, dpi=130)
    print(f"the curve is in {file}")
