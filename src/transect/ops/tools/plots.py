"""Pictures of benchmark results: share of the floor as bars, and the roofline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...costs.ceilings import Ceilings
from ..registry import Unavailable
from .bench import Timing

OURS = ("#1f4e79", "#2e75b6", "#9dc3e6", "#5b9bd5", "#bdd7ee", "#264478")
PEERS = ("#c55a11", "#f4b183", "#7f7f7f", "#bf9000")


def pyplot() -> Any:
    """Return Matplotlib, drawing into files. ``Unavailable`` where it is not installed."""
    try:
        import matplotlib
    except ImportError as error:
        raise Unavailable("plots need matplotlib: pip install 'transect[bench]'") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def bars(op: str, rows: Sequence[Timing], path: Path) -> None:
    """Draw a group of bars for each case and direction of one operator: every implementation's share of the floor."""
    plt = pyplot()
    timed = [row for row in rows if row.of_floor is not None]
    groups = list(dict.fromkeys((row.case, row.direction) for row in timed))
    names = list(dict.fromkeys((row.contender, row.is_peer) for row in timed))
    colors = _colors(names)
    height = 0.8 / max(1, len(names))
    figure, axes = plt.subplots(figsize=(9, 1.2 + 0.14 * len(timed) + 0.1 * len(groups)), layout="constrained")
    for place, group in enumerate(groups):
        members = [row for row in timed if (row.case, row.direction) == group]
        for at, row in enumerate(members):
            y = place + (at - (len(members) - 1) / 2) * height
            axes.barh(y, 100 * (row.of_floor or 0), height * 0.9, color=colors[row.contender, row.is_peer])
            axes.text(100 * (row.of_floor or 0) + 0.5, y, f"{(row.seconds or 0) * 1e6:.1f} µs", va="center", fontsize=5)
    axes.axvline(100, color="black", linewidth=0.8)
    axes.set_yticks(range(len(groups)), [f"{case}\n{direction}" for case, direction in groups], fontsize=7)
    axes.set_ylim(len(groups) - 0.4, -0.6)
    axes.set_xlabel("% of floor")
    axes.set_title(op)
    handles = [plt.Rectangle((0, 0), 1, 1, color=colors[name]) for name in names]
    labels = [f"{name} (peer)" if peer and not name.endswith("(peer)") else name for name, peer in names]
    axes.legend(handles, labels, fontsize=7, loc="lower right", framealpha=0.9)
    _save(plt, figure, path)


def _colors(names: Sequence[tuple[str, bool]]) -> Mapping[tuple[str, bool], str]:
    ours = [name for name in names if not name[1]]
    peers = [name for name in names if name[1]]
    return {name: OURS[i % len(OURS)] for i, name in enumerate(ours)} | {
        name: PEERS[i % len(PEERS)] for i, name in enumerate(peers)
    }


def roofline(rows: Sequence[Timing], ceilings: Ceilings, path: Path) -> None:
    """Draw every timed case of ours at its arithmetic intensity, under the lines of bandwidth and of the matrix
    rates."""
    plt = pyplot()
    timed = [row for row in rows if row.seconds and not row.is_peer and row.bytes and row.flops]
    best: dict[tuple[str, str, str], Timing] = {}
    for row in timed:
        key = (row.op, row.case, row.direction)
        if key not in best or (row.seconds or 0) < (best[key].seconds or 0):
            best[key] = row
    figure, axes = plt.subplots(figsize=(9, 6), layout="constrained")
    intensities = [row.flops / row.bytes for row in best.values()] or [1.0]
    low, high = min(*intensities, 0.1) / 2, max(*intensities, 1000) * 2
    for dtype, peak in ceilings.flops_per_second.items():
        if dtype == "float16":
            continue  # as fast as bfloat16: the labels would lie on each other
        knee = peak / ceilings.copy_bytes_per_second
        axes.plot([low, knee, high], [low * ceilings.copy_bytes_per_second, peak, peak], color="gray", linewidth=0.8)
        axes.text(high, peak, dtype, fontsize=7, ha="right", va="bottom")
    for number, op in enumerate(dict.fromkeys(key[0] for key in best)):
        of_op = [row for key, row in best.items() if key[0] == op]
        axes.scatter(
            [row.flops / row.bytes for row in of_op],
            [row.flops / (row.seconds or 1) for row in of_op],
            s=16,
            label=op,
            color=plt.get_cmap("tab20")(number % 20),
            marker="osD^v<>"[number // 20 % 7],
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("FLOPs per byte of the operator's least traffic")
    axes.set_ylabel("FLOP/s reached")
    axes.set_title(f"{ceilings.device}: fastest of ours at each case")
    axes.legend(fontsize=7, ncols=2)
    _save(plt, figure, path)


def _save(plt: Any, figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


def draw(rows: Sequence[Timing], ceilings: Ceilings, folder: Path) -> list[Path]:
    """Draw one file of bars for each operator and ``roofline.png`` for all; returns the files."""
    made = []
    for op in dict.fromkeys(row.op for row in rows):
        of_op = [row for row in rows if row.op == op]
        if any(row.of_floor is not None for row in of_op):
            made.append(folder / f"{op}.png")
            bars(op, of_op, made[-1])
    made.append(folder / "roofline.png")
    roofline(rows, ceilings, made[-1])
    return made
