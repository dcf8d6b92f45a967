"""Measure the limits of the ladder: seconds of each check on two cores, and bytes of what `transect learn` needs.

    python benchmarks/checks/ladder_limits.py [--rungs NAME ...] [--out FILE]

A check is one run of ``grade`` on the shipped solution in a workshop of its own, with kernels compiled ahead of time:
what `transect learn check` does. Bytes are those of the installed files of this package's requirements, and of theirs,
with Triton (the extra ``gpu``), as their records list them; compiled Python files are left out. Limits: 60 s for each
check, 1 GB for the set-up.
"""

from __future__ import annotations

import argparse
import re
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import _paths  # noqa: F401
from benchmarks import record
from transect.hardware.device import detect
from transect.hardware.measured import ceilings
from transect.learn.grade.grader import check, source_file
from transect.learn.registry import all_rungs

LIMIT_S, LIMIT_BYTES = 60.0, 10**9


def installed() -> dict[str, int]:
    """Count the bytes of each distribution that the package needs."""
    found: dict[str, int] = {}
    left = ["transect", "triton"]
    while left:
        name = re.sub(r"[-_.]+", "-", left.pop()).lower()
        if name in found:
            continue
        try:
            made = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        paths = [Path(str(made.locate_file(file))) for file in made.files or []]
        found[name] = sum(path.stat().st_size for path in paths if path.suffix != ".pyc" and path.is_file())
        for need in made.requires or []:
            if "extra ==" not in need:
                left.append(re.split(r"[ ;<>=!~\[(]", need)[0])
    package = Path(__file__).parents[2] / "src" / "transect"
    found["transect"] = sum(file.stat().st_size for file in package.rglob("*") if file.suffix != ".pyc")
    return found


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rungs", nargs="+", default=list(all_rungs()))
    parser.add_argument("--out", type=Path, default=record.RESULTS / "cpu" / "ladder_limits.json")
    options = parser.parse_args()
    sizes = installed()
    total = sum(sizes.values())
    largest = sorted(sizes.items(), key=lambda each: -each[1])[:5]
    print(f"set-up: {total / 1e9:.2f} GB ({', '.join(f'{name} {size / 1e6:.0f} MB' for name, size in largest)})")
    limits = ceilings(detect("cpu"))
    seconds: dict[str, float] = {}
    for name in options.rungs:
        rung = all_rungs()[name]
        began = time.perf_counter()
        with source_file(rung) as path:
            verdict = check(rung, path, "cpu", lambda: limits)
        seconds[name] = time.perf_counter() - began
        print(f"{name:20} {seconds[name]:5.1f} s {'' if verdict.right else verdict.reason}", flush=True)
    result: dict[str, Any] = {
        "commit": record.commit(), "environment": record.environment(), "cores": torch.get_num_threads(),
        "command": "python benchmarks/checks/ladder_limits.py", "seconds": seconds, "bytes": total, "parts": sizes,
        "over": [name for name, each in seconds.items() if each > LIMIT_S],
    }  # fmt: skip
    record.write(options.out, result)
    print(
        f"{max(seconds.values()):.1f} s at the most of {LIMIT_S:.0f}; {total / 1e9:.2f} GB of {LIMIT_BYTES / 1e9:.0f}"
    )


if __name__ == "__main__":
    main()
