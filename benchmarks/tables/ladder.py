"""The matmul ladder of ``ops/first/matmul.cu`` as a table and a picture, from rows of ``transect bench ops matmul``.

python benchmarks/tables/ladder.py    draws docs/images/ladder.png
"""

from __future__ import annotations

from collections.abc import Mapping

import _paths  # noqa: F401
from benchmarks import record
from benchmarks.tables import ops as ops_tables
from transect.ops.first.matmul_ladder import RUNGS
from transect.ops.tools import plots, results
from transect.ops.tools.bench import Timing

IMAGE = record.ROOT / "docs" / "images" / "ladder.png"
PREDICTED = {
    "cuda_naive": "32 sectors of memory for each load of A",
    "cuda_coalesced": "8 to 16 times fewer transactions",
    "cuda_shared_tiles": "32 times fewer reads; bound by shared memory",
    "cuda_register_tiles": "70 to 80% of cuBLAS",
    "cuda_tensor_cores": "at most 60% of the tensor cores' peak",
}
"""Before it was measured, as ``matmul.cu`` derives it."""
OTHERS = {"triton": "Triton", "torch": "cuBLAS", "cpu_blas": "the processor's BLAS"}


def rungs() -> dict[str, dict[str, Timing]]:
    """Return each contender of every case of the ladder that has a time.

    Raises:
        FileNotFoundError: nothing is recorded.
    """
    found: dict[str, dict[str, Timing]] = {}
    for row in map(results.timing_of, results.read(ops_tables.RESULT)["rows"]):
        if row.op == "matmul" and row.case.startswith("ladder, ") and row.seconds:
            found.setdefault(row.case.removeprefix("ladder, "), {})[row.contender] = row
    return found


def name_of(contender: str) -> str:
    """Return ``rung 2, coalesced`` for ``cuda_coalesced``, and cuBLAS for ``torch``."""
    if contender not in RUNGS:
        return OTHERS[contender]
    return f"rung {RUNGS[contender]}, {contender.removeprefix('cuda_').replace('_', ' ')}"


def ordered(case: Mapping[str, Timing]) -> list[Timing]:
    """List the rungs from the lowest, then the others."""
    return [case[name] for name in [*RUNGS, *OTHERS] if name in case]


def table() -> str:
    """Format each rung with prediction and measurement, beside cuBLAS in the same dtype and size."""
    lines = ["| | product | predicted | ms | TFLOP/s | of cuBLAS |", "|---|---|---|---:|---:|---:|"]
    for name, case in rungs().items():
        for row in ordered(case):
            assert row.seconds and case["torch"].seconds
            lines.append(
                f"| {name_of(row.contender)} | {name} | {PREDICTED.get(row.contender, '')} | {row.seconds * 1e3:.2f} | "
                f"{row.flops / row.seconds / 1e12:.1f} | {case['torch'].seconds / row.seconds:.0%} |"
            )
    kept = results.read(ops_tables.RESULT)
    used = [row for row in kept["rows"] if row["op"] == "matmul" and "ladder" in row["case"]]
    where = ops_tables.origin(ops_tables.runs_of(kept, used))
    return "\n".join(lines) + f"\n\n`transect bench ops matmul --case ladder` on {where}; medians.\n"


def draw() -> None:
    """Draw TFLOP/s at n = 4096 as bars."""
    plt = plots.pyplot()
    shown = [(name, row) for name, case in rungs().items() if "4096" in name for row in ordered(case)]
    labels = [f"{name_of(row.contender)}, {name.split(',')[0]}" for name, row in shown]
    rates = [row.flops / (row.seconds or 1.0) / 1e12 for _, row in shown]
    figure, axes = plt.subplots(figsize=(8, 3.8))
    bars = axes.barh(labels, rates, color=["#2f6f9f" if row.contender in RUNGS else "#9aa5b1" for _, row in shown])
    axes.bar_label(bars, [f"{rate:.3g}" for rate in rates], padding=4)
    axes.set_xscale("log")
    axes.set_xlim(0.5, 2000)
    axes.set_xlabel("TFLOP/s at 4096 x 4096 x 4096 (logarithmic)")
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(IMAGE, dpi=120)


if __name__ == "__main__":
    draw()
