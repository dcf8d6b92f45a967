"""Grade the shipped solution of every rung again and again: a wrong verdict on one is a false alarm of the grader.

    python benchmarks/checks/ladder.py [--runs 100] [--workers N] [--rungs NAME ...] [--out FILE]
    python benchmarks/checks/ladder.py --device cuda [--runs 5] ...

Inputs differ in every run. Each verdict is one of: right; slow (the timing of a busy machine: it does not fail the
student); or a false alarm, with its reason. Times are medians over the runs of the last call. Counts are added to those
of FILE (default benchmarks/results/cpu/ladder.json, or of the GPU's name) as long as it is from the same commit. With
``--device cuda`` only rungs with kernels are graded, on the GPU and one at a time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

import _paths  # noqa: F401
from benchmarks import record
from transect.costs.ceilings import Ceilings
from transect.hardware.device import detect
from transect.hardware.measured import ceilings
from transect.learn.grade.grader import grade, source_file
from transect.learn.grade.workshop import Workshop
from transect.learn.registry import all_rungs, get

PARTS = 4
"""Jobs that the runs of one rung are split into, so that the workers end at about the same time."""
TIMES = ("seconds", "reference_seconds", "peer_seconds", "percent")


def runs_of(name: str, runs: int, device: str, limits: Ceilings, seconds: float) -> list[dict[str, Any]]:
    """Grade the solution of one rung up to ``runs`` times, and begin no run after ``seconds``."""
    rung = get(name)
    until = time.monotonic() + seconds
    found = []
    with Workshop(device) as shop, source_file(rung) as path:
        while len(found) < runs and time.monotonic() < until:
            began = time.perf_counter()
            verdict = grade(rung, path, shop=shop, ceilings=lambda: limits)
            made: dict[str, Any] = {each: getattr(verdict, each) for each in TIMES}
            made |= {"right": verdict.right, "slow": verdict.slow, "bound": verdict.bound}
            made |= {"wall": time.perf_counter() - began, "floor_seconds": verdict.floor_seconds}
            made["alarm"] = "" if verdict.right else f"{verdict.reason}; {verdict.detail}"
            found.append(made)
    return found


def summed(runs: list[dict[str, Any]], before: dict[str, Any]) -> dict[str, Any]:
    """Summarize the runs of one rung, and add the counts of an earlier summary."""
    made: dict[str, Any] = {"runs": len(runs) + before.get("runs", 0)}
    made["false_alarms"] = before.get("false_alarms", []) + [run["alarm"] for run in runs if run["alarm"]]
    made["slow"] = before.get("slow", 0) + sum(run["slow"] for run in runs)
    for name in (*TIMES, "floor_seconds", "wall"):
        if values := [run[name] for run in runs if run[name] is not None]:
            made[name] = statistics.median(values)
    made["bound"] = next((run["bound"] for run in runs if run["bound"]), "")
    return made


def main() -> None:
    """Grade, print a line for each rung, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--rungs", nargs="+", default=[])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--seconds", type=float, default=1e9, help="most seconds for one job")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    on_gpu = arguments.device == "cuda"
    limits = ceilings(detect(arguments.device))
    folder = limits.device.split()[-1].lower() if on_gpu else "cpu"
    out = arguments.out or record.RESULTS / folder / "ladder.json"
    known = json.loads(out.read_text()) if out.exists() else {}
    rungs = known.get("rungs", {}) if known.get("commit") == record.commit() else {}
    names = arguments.rungs or [name for name, rung in all_rungs().items() if not on_gpu or rung.kind == "triton"]
    with ProcessPoolExecutor(
        1 if on_gpu else arguments.workers, initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        jobs = {}
        for name in names:
            shares = [range(arguments.runs)[part::PARTS] for part in range(PARTS)]
            asked = [(name, len(share), arguments.device, limits, arguments.seconds) for share in shares if share]
            jobs[name] = [pool.submit(runs_of, *each) for each in asked]
        for name, parts in jobs.items():
            rungs[name] = summed([run for part in parts for run in part.result()], rungs.get(name, {}))
            made = rungs[name]
            percent = f"{made['percent']:6.1f}% of the floor" if "percent" in made else ""
            alarms = len(made["false_alarms"])
            print(f"{name:24} {made['runs']:4} runs, {alarms} false alarms, {made['slow']} slow {percent}", flush=True)
            for reason in made["false_alarms"][:3]:
                print(f"    {reason}")
            result = {"commit": record.commit(), "environment": record.environment(), "device": limits.device}
            record.write(out, {**result, "workers": arguments.workers, "rungs": rungs})


if __name__ == "__main__":
    main()
