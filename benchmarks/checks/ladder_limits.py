"""Measure the limits of the ladder: seconds of each check on two cores, and bytes of the packages of `transect learn`.

    python benchmarks/checks/ladder_limits.py [--rungs NAME ...] [--no-sizes] [--seconds N] [--out FILE]

A check is a process ``transect learn check`` on the shipped solution, with kernels compiled ahead of time, on two
cores. Bytes are those of the requirements of this package with the extra ``learn``: of the wheels that pip downloads,
and of the installed files as their records list them. Limits: 60 s for each check, 1 GB
to download.

Checks that FILE has from the same commit are not repeated. All take about 4 minutes on two cores; ``--seconds``: no
check begins later than that.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

import _paths  # noqa: F401
from benchmarks import record
from transect.learn.folder import write
from transect.learn.registry import all_rungs, get

LIMIT_S, LIMIT_BYTES = 60.0, 10**9
PARTS = {"all rungs without kernels": (), "kernels: Triton": ("triton",), "digits: scikit-learn": ("scikit-learn",)}
"""Parts of the set-up, in the order that they are counted in: distributions beyond this package's own requirements."""


def needed(names: list[str]) -> dict[str, metadata.Distribution]:
    """Find the distributions that these ones need here, by name."""
    found: dict[str, metadata.Distribution] = {}
    while names:
        name = re.sub(r"[-_.]+", "-", names.pop()).lower()
        if name in found:
            continue
        found[name] = metadata.distribution(name)
        needs = map(Requirement, found[name].requires or [])
        names += [each.name for each in needs if each.marker is None or each.marker.evaluate({"extra": ""})]
    return found


def sizes() -> dict[str, dict[str, int]]:
    """Count bytes to download and on disk, of each part of the set-up."""
    found: dict[str, dict[str, int]] = {}
    before: set[str] = {"transect"}
    for part, more in PARTS.items():
        new = {name: each for name, each in needed(["transect", *more]).items() if name not in before}
        before |= set(new)
        with tempfile.TemporaryDirectory() as folder:
            wheels = [f"{name}=={each.version}" for name, each in new.items()]
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, *wheels]
            subprocess.run(command, check=True)
            download = sum(file.stat().st_size for file in Path(folder).iterdir())
        found[part] = {"download": download, "disk": sum(map(_on_disk, new.values())), "packages": len(new)}
    package = Path(__file__).parents[2] / "src" / "transect"
    own = sum(file.stat().st_size for file in package.rglob("*") if file.is_file() and file.suffix != ".pyc")
    found["all rungs without kernels"]["disk"] += own
    return found


def _on_disk(made: metadata.Distribution) -> int:
    paths = [Path(str(made.locate_file(file))) for file in made.files or []]
    return sum(path.stat().st_size for path in paths if path.is_file())


def seconds_of(name: str, folder: Path) -> float:
    """Check the shipped solution of a rung, as a student would.

    Raises:
        RuntimeError: it is not right.
    """
    write(get(name), folder / name, solution=True)
    command = [sys.executable, "-m", "transect", "learn", "check", name, "--dir", str(folder / name)]
    environment = {**os.environ, "TRANSECT_CACHE": str(folder / "cache")}
    began = time.perf_counter()
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stdout}{done.stderr}")
    return time.perf_counter() - began


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rungs", nargs="+", default=list(all_rungs()))
    parser.add_argument("--no-sizes", action="store_true", help="keep the sizes of FILE")
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--out", type=Path, default=record.RESULTS / "cpu" / "ladder_limits.json")
    options = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    until = time.monotonic() + options.seconds
    known = json.loads(options.out.read_text()) if options.out.exists() else {}
    seconds: dict[str, float] = known["seconds"] if known.get("commit") == record.commit() else {}
    result: dict[str, Any] = {
        "commit": record.commit(), "environment": record.environment(("torch", "triton", "numpy", "scikit-learn")),
        "command": "python benchmarks/checks/ladder_limits.py", "seconds": seconds,
        "sizes": known.get("sizes", {}) if options.no_sizes else sizes(),
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        for name in options.rungs:
            if name not in seconds and time.monotonic() < until:
                seconds[name] = round(seconds_of(name, Path(folder)), 2)
                print(f"{name:20} {seconds[name]:5.1f} s", flush=True)
                record.write(options.out, result)
    record.write(options.out, result)
    print(table(result) if seconds else result["sizes"])


def table(result: dict[str, Any]) -> str:
    """Write bytes of each part and of all, and the longest checks."""
    lines = ["| part | packages | to download | on disk |", "|---|---|---|---|"]
    rows = [*result["sizes"].items(), ("together", _sum(result["sizes"]))]
    for part, each in rows:
        lines.append(f"| {part} | {each['packages']} | {each['download'] / 1e9:.2f} GB | {each['disk'] / 1e9:.2f} GB |")
    longest = sorted(result["seconds"].items(), key=lambda each: -each[1])
    slowest = ", ".join(f"`{name}` {seconds:.0f} s" for name, seconds in longest[:3])
    middle = longest[len(longest) // 2][1]
    packages = ", ".join(f"{key} {value}" for key, value in result["environment"]["packages"].items())
    text = (
        f"{len(longest)} checks on two cores: {middle:.0f} s in the median, and at the most {slowest}. "
        f"`{result['command']}` on {result['environment']['processor']}, {packages}, "
        f"{record.made_at([result['environment']])}."
    )
    return "\n".join([*lines, "", text]) + "\n"


def _sum(parts: dict[str, dict[str, int]]) -> dict[str, int]:
    return {key: sum(each[key] for each in parts.values()) for key in ("packages", "download", "disk")}


if __name__ == "__main__":
    main()
