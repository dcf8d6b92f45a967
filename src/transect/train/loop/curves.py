"""Draws the logs of runs in one picture."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .report import read_log


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """Compute the mean of the last ``window`` values, at each index."""
    return [statistics.fmean(values[max(0, i - window + 1) : i + 1]) for i in range(len(values))]


def draw(
    runs: Sequence[str | Path],
    output: str | Path,
    *,
    window: int = 1,
    by: str = "step",
    bits: bool = False,
    levels: Mapping[str, float] | None = None,
) -> list[str]:
    """Draw loss over steps (or ``tokens``, or ``time`` in seconds), with validation losses as dots, and tokens per
    second.

    Args:
        output: a .png, .svg or .pdf.
        window: steps to average over.
        bits: in bits per byte in place of nats per token, at the bytes per token of the validation text.
        levels: horizontal lines to compare with, by name, in the unit of the curves.

    Returns:
        A line for each run: its last losses and speed.

    Raises:
        ValueError: a run without a log, an unknown ``by``, ``bits`` of a run without validation in bits per byte, or
            matplotlib is not installed.
    """
    if by not in ("step", "tokens", "time"):
        raise ValueError(f"a curve is drawn by step, tokens or time, not {by!r}")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("drawing needs matplotlib: pip install matplotlib") from None
    figure = Figure(figsize=(9, 6), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    lines = []
    for number, run in enumerate(runs):
        log = read_log(run)
        steps = [line for line in log if line["kind"] == "step"]
        if not steps:
            raise ValueError(f"{run} has no log of steps: name directories that transect train wrote")
        name, colour = Path(run).name, f"C{number}"
        x = _axis(steps, by)
        at = dict(zip((line["step"] for line in steps), x, strict=True))
        losses = smoothed([line["loss"] for line in steps], window)
        checks = [line for line in log if line["kind"] == "evaluation" and line["step"] in at]
        unit = _bits_per_nat(run, checks) if bits else 1.0
        top.plot(x, [unit * loss for loss in losses], color=colour, label=name, linewidth=1.2)
        top.plot([at[c["step"]] for c in checks], [unit * c["loss"] for c in checks], "o", color=colour, markersize=4)
        speeds = smoothed([line["tokens_per_second"] for line in steps], max(window, 5))
        bottom.plot(x, speeds, color=colour, linewidth=1.2)
        validation = f", validation {checks[-1]['loss']:.4f}" if checks else ""
        lines.append(
            f"{name}: {steps[-1]['step']} steps, loss {losses[-1]:.4f}{validation}, "
            f"{statistics.median(line['tokens_per_second'] for line in steps):,.0f} tokens/s"
        )
    for number, (name, value) in enumerate((levels or {}).items()):
        top.axhline(
            value, color="0.4", linestyle=("--", ":", "-.")[number % 3], linewidth=1, label=f"{name}: {value:g}"
        )
    top.set_ylabel(f"loss, {'bits per byte' if bits else 'nats per token'} (dots: validation)")
    top.legend()
    bottom.set_ylabel("tokens/s")
    bottom.set_ylim(bottom=0)
    bottom.set_xlabel({"step": "step", "tokens": "tokens", "time": "seconds of training"}[by])
    for axes in (top, bottom):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(output, dpi=130)
    return lines


def _bits_per_nat(run: str | Path, checks: list[dict[str, Any]]) -> float:
    """Return the bits per byte of validation text for a nat per token."""
    for check in checks:
        if check.get("bits_per_byte"):
            return float(check["bits_per_byte"] / check["loss"])
    raise ValueError(f"{run} has no validation in bits per byte: set data.validation, or draw nats per token")


def _axis(steps: list[dict[str, Any]], by: str) -> list[float]:
    if by == "step":
        return [line["step"] for line in steps]
    key = "tokens" if by == "tokens" else "seconds"
    total, axis = 0.0, []
    for line in steps:
        total += line[key]
        axis.append(total)
    return axis
