"""Programs with one planted fault each: is the right one found first, and is its gain what the fix gives.

    python benchmarks/explain/faults.py [NAMES]                                            # on a CPU
    python benchmarks/explain/faults.py --device cuda --out benchmarks/results/h200/explain_faults.json

The programs are those of ``tests/explain/program/faults``. Each is explained once and then timed with its fault and
without, in turns. A healthy program stands beside them: no finding of it may promise more than 5%. ``--keep FOLDER``
writes the profiler's trace and the whole explanation of each program that was not judged right.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import _paths  # noqa: F401
from benchmarks import record
from transect.costs.ceilings import Ceilings
from transect.explain import Explain
from transect.explain.program.explain import machine_ceilings

LARGE = 0.05
"""A finding of a healthy program that promises more than this share is a false one."""


def faults() -> Any:
    """Load the programs and their judges."""
    sys.path.insert(0, str(record.ROOT / "tests" / "helpers"))
    import planted_faults

    return planted_faults


def healthy_share(device: str, limits: Ceilings) -> float:
    """Return the gain that the best finding of the healthy program predicts, as a share of its time."""
    programs = faults()
    programs.healthy(device)
    with Explain(limits, cores=1) as run:
        programs.healthy(device)
    assert run.result is not None
    return max((each.share for each in run.result.findings), default=0.0)


def judged(name: str, device: str, limits: Ceilings, keep: Path | None) -> dict[str, Any]:
    """Judge one program: its first finding, predicted and obtained."""
    if device == "cuda":
        torch._C._cuda_clearCublasWorkspaces()  # one in a block of memory keeps the allocator from freeing that
        torch.cuda.empty_cache()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        found = faults().verdict(name, limits, device, trace, rounds=3)
        print(found, "" if found.right and found.near else " <--", flush=True)
        if keep is not None and not (found.right and found.near):
            keep.mkdir(parents=True, exist_ok=True)
            (keep / f"{name}.txt").write_text(found.said + "\n")
            with trace.open("rb") as plain, gzip.open(keep / f"{name}.json.gz", "wb") as packed:
                shutil.copyfileobj(plain, packed)
    row = dataclasses.asdict(found) | {"right": found.right, "near": found.near}
    del row["said"]
    return row


def table(result: dict[str, Any]) -> str:
    """Format the predicted gain beside that of the fix."""
    rows = result["programs"]
    lines = [
        f"{sum(row['right'] for row in rows)} of {len(rows)} right first, {sum(row['near'] for row in rows)} within "
        f"30% of the gain of the fix; the best finding for the healthy program predicts {result['healthy_share']:.1%}.",
        "",
        "| program | finding | first | predicted gain | gain of the fix | ms |",
        "|---|---|---|---:|---:|---:|",
    ]
    for row in rows:
        first = "yes" if row["right"] else row["first"]
        name = row["name"].removeprefix("gpu_").replace("_", " ")
        lines.append(
            f"| {name} | {row['kind']} | {first} | {row['predicted']:.0%} | {row['obtained']:.0%} "
            f"| {1e3 * row['wall']:.1f} |"
        )
    machine = result["environment"]
    where = machine.get("gpu") or f"{machine['processor']}, {machine['cores']} cores"
    return "\n".join(lines) + f"\n\n`{result['command']}` on {where}, {record.made_at([machine])}.\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="some of the programs; all that the device can run if none is named")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--keep", type=Path, help="traces and explanations of programs that were not judged right")
    parser.add_argument("--out", type=Path, default=record.RESULTS / "cpu" / "explain_faults.json")
    options = parser.parse_args()
    programs = faults()
    gpu = {"gpu": torch.cuda.get_device_name()} if options.device == "cuda" else {}
    if not gpu:
        torch.set_num_threads(1)  # as the programs run: floors are those of one thread
    limits = machine_ceilings()
    result: dict[str, Any] = {
        "command": f"python benchmarks/explain/faults.py --device {options.device}",
        "environment": record.environment() | gpu,
        "healthy_share": healthy_share(options.device, limits),
        "programs": [],
        "failed": {},
    }
    print(f"healthy: the best finding promises {result['healthy_share']:.1%}", flush=True)
    for name in options.names or (programs.GPU_NAMES if gpu else programs.NAMES):
        try:
            result["programs"].append(judged(name, options.device, limits, options.keep))
        except Exception as error:  # one that cannot run must not hide the others
            result["failed"][name] = f"{type(error).__name__}: {error}"
            print(f"{name} failed: {result['failed'][name]}", flush=True)
        record.write(options.out, result)
    rows = result["programs"]
    print(f"{sum(row['right'] for row in rows)} of {len(rows)} first, {sum(row['near'] for row in rows)} within 30%")


if __name__ == "__main__":
    main()
