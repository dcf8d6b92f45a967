"""Pictures of a load test, drawn by matplotlib where it is installed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .levels import Result
from .load import Record

COLOURS = ("#0b7285", "#f08c00", "#c92a2a")
SHARES = (50, 95, 99)
"""Drawn percentiles."""
SUFFIXES = (".png", ".svg", ".pdf")
LATENCIES = {"ttft": "Time to first token", "itl": "Inter-token latency", "e2e": "Time to last token"}


def check(path: Path) -> None:
    """Check the path before the test runs, not after it.

    Raises:
        ValueError: the suffix of ``path`` is none of ``SUFFIXES``, or there is no matplotlib.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"--plot {path} must end in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install matplotlib, or leave --plot out") from None


def plot(results: Sequence[Result], path: Path) -> None:
    """Write a picture: the distributions of one level, or latency and throughput over the load of several.

    The suffix of ``path`` says what kind: .png, .svg, .pdf.
    """
    check(path)
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 4, figsize=(14, 3.4))
    if len(results) == 1:
        _distributions(axes, results[0].records)
    else:
        _against_load(axes, [result.summary for result in results])
    for axis in axes:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_ylim(bottom=0)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _distributions(axes: Any, records: Sequence[Record]) -> None:
    good = [record for record in records if record.error is None]
    values = {
        "ttft": [record.ttft for record in good],
        "itl": [gap for record in good for gap in record.gaps],
        "e2e": [record.latency for record in good],
    }
    for axis, (name, title) in zip(axes, LATENCIES.items(), strict=False):
        ordered = sorted(value * 1e3 for value in values[name])
        shares = [(i + 1) / len(ordered) * 100 for i in range(len(ordered))]
        axis.step(ordered, shares, where="post", color=COLOURS[0], linewidth=2)
        axis.set_title(title, loc="left", fontsize=11)
        axis.set_xlabel("ms")
        axis.set_xlim(left=0)
    axes[0].set_ylabel("% that are no slower")
    moments = sorted(moment for record in good for moment in record.moments)
    if moments:
        axes[3].hist(moments, bins=50, color=COLOURS[0])
        axes[3].set_xlabel("s")
    axes[3].set_title("Output events over time", loc="left", fontsize=11)


def _against_load(axes: Any, levels: Sequence[dict[str, Any]]) -> None:
    loads = [float(level["load"]) for level in levels]
    for axis, (name, title) in zip(axes, LATENCIES.items(), strict=False):
        for share, colour in zip(SHARES, COLOURS, strict=True):
            heights = [None if level[name] is None else level[name][f"p{share}"] * 1e3 for level in levels]
            axis.plot(loads, heights, marker="o", color=colour, label=f"p{share}")
        axis.set_title(title, loc="left", fontsize=11)
        axis.set_ylabel("ms")
    axes[0].legend(frameon=False)
    axes[3].plot(
        loads, [level["requests_per_second"] for level in levels], marker="o", color=COLOURS[0], label="served"
    )
    if all("goodput" in level for level in levels):
        good = [level["goodput"]["requests_per_second"] for level in levels]
        axes[3].plot(loads, good, marker="o", color=COLOURS[1], label="within the objectives")
    axes[3].legend(frameon=False)
    axes[3].set_title("Requests per second", loc="left", fontsize=11)
    for axis in axes:
        axis.set_xlabel(levels[0]["load_unit"])
