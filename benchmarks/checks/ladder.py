"""Grade the shipped solution of every rung many times: a wrong verdict on one is a false alarm of the grader.

    python benchmarks/checks/ladder.py [--runs 100] [--workers N] [--rungs NAME ...] [--out FILE]
    python benchmarks/checks/ladder.py --device cuda [--runs 5] ...

Inputs differ in every run. Each verdict is one of: right; slow (the timing of a busy machine: it does not fail the
student); or a false alarm, with its reason. Runs of a rung that FILE (default benchmarks/results/cpu/ladder.json, or of
the GPU's name) has from the same commit count, and only the missing ones are made, so an interrupted run can be
repeated. Other rungs of FILE stay as they are. With ``--device cuda`` only rungs with kernels are graded, on the GPU
and one at a time.

100 runs of all rungs take about 100 minutes of a core; 3 runs on a GPU about 10 minutes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import _paths  # noqa: F401
from benchmarks import record
from transect.costs.ceilings import Ceilings
from transect.hardware.device import detect
from transect.hardware.measured import ceilings
from transect.learn.grade.grader import grade, source_file
from transect.learn.grade.verdict import time_text
from transect.learn.grade.workshop import Workshop
from transect.learn.registry import all_rungs, get

PACKAGES = ("torch", "triton", "numpy")
PARTS = 10
"""Jobs that the runs of one rung are split into, so that the workers end at about the same time."""
TIMES = ("seconds", "reference_seconds", "peer_seconds", "percent", "floor_seconds", "wall")


def runs_of(name: str, runs: int, device: str, limits: Ceilings, seconds: float) -> list[dict[str, Any]]:
    """Grade the solution of one rung up to ``runs`` times, and begin no run after ``seconds``."""
    rung = get(name)
    until = time.monotonic() + seconds
    found = []
    with Workshop(device) as shop, source_file(rung) as path:
        while len(found) < runs and time.monotonic() < until:
            began = time.perf_counter()
            verdict = grade(rung, path, shop=shop, ceilings=lambda: limits)
            made: dict[str, Any] = {each: getattr(verdict, each) for each in TIMES if each != "wall"}
            made |= {"right": verdict.right, "slow": verdict.slow, "bound": verdict.bound}
            made["wall"] = time.perf_counter() - began
            made["alarm"] = "" if verdict.right else f"{verdict.reason}; {verdict.detail}"
            found.append(made)
    return found


def add(known: dict[str, Any], runs: list[dict[str, Any]]) -> None:
    """Add runs of one rung to what is known of it: counts, alarms with their reasons, and every time."""
    known["runs"] = known.get("runs", 0) + len(runs)
    known["slow"] = known.get("slow", 0) + sum(run["slow"] for run in runs)
    known.setdefault("false_alarms", []).extend(run["alarm"] for run in runs if run["alarm"])
    known["bound"] = known.get("bound") or next((run["bound"] for run in runs if run["bound"]), "")
    for name in TIMES:
        if values := [run[name] for run in runs if run[name] is not None]:
            known.setdefault(name, []).extend(float(f"{value:.4g}") for value in values)


def main() -> None:
    """Grade, print a line for each part, and write the record after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--rungs", nargs="+", default=[])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no run of a part after this time")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    on_gpu = arguments.device == "cuda"
    limits = ceilings(detect(arguments.device))
    out = arguments.out or record.RESULTS / (gpu_folder(limits.device) if on_gpu else "cpu") / "ladder.json"
    known = json.loads(out.read_text()) if out.exists() else {}
    rungs = known.get("rungs", {})
    names = arguments.rungs or [name for name, rung in all_rungs().items() if not on_gpu or rung.kind == "triton"]
    if "digits" in names and find_spec("sklearn") is None:
        names.remove("digits")
        print("digits is left out: scikit-learn is not installed")
    for name in names:
        if rungs.get(name, {}).get("commit") != record.commit():
            rungs[name] = {"commit": record.commit(), "processor": record.environment()["processor"]}
    workers = 1 if on_gpu else arguments.workers
    result = {
        "commit": record.commit(), "environment": record.environment(PACKAGES), "device": limits.device,
        "command": record.command("benchmarks/checks/ladder.py"), "workers": workers,
        "bytes_per_second": limits.copy_bytes_per_second, "rungs": rungs,
    }  # fmt: skip
    with ProcessPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(8 if on_gpu else 1,)) as pool:
        jobs: dict[Future[list[dict[str, Any]]], str] = {}
        parts = 1 if on_gpu else PARTS
        for part in range(parts):  # every rung has some runs soon, should the run be cut
            for name in names:
                missing = max(0, arguments.runs - rungs.get(name, {}).get("runs", 0))
                if share := range(missing)[part::parts]:
                    job = pool.submit(runs_of, name, len(share), arguments.device, limits, arguments.seconds)
                    jobs[job] = name
        for job in as_completed(jobs):
            name, runs = jobs[job], job.result()
            add(rungs[name], runs)
            made = rungs[name]
            percent = f", {statistics.median(made['percent']):.1f}% of the floor" if made.get("percent") else ""
            alarms = len(made["false_alarms"])
            print(f"{name:24} {made['runs']:4} runs, {alarms} false alarms, {made['slow']} slow{percent}", flush=True)
            for reason in [run["alarm"] for run in runs if run["alarm"]]:
                print(f"    {reason}", flush=True)
            record.write(out, result)
    print(f"{sum(each.get('runs', 0) for each in rungs.values())} runs of {len(rungs)} rungs")


def gpu_folder(device: str) -> str:
    """Return the folder of results of a GPU: ``h200`` for an NVIDIA H200."""
    words = device.lower().split()
    return next((word for word in words if word in ("h100", "h200")), words[-1])


def alarms_table(result: dict[str, Any]) -> str:
    """Write a sentence with the counts of all rungs, and a row for each rung that had an alarm."""
    rungs = result["rungs"]
    runs, alarms, slow = totals(rungs)
    least = min(each["runs"] for each in rungs.values())
    processors = " and ".join(dict.fromkeys(each["processor"] for each in rungs.values()))
    text = (
        f"{runs:,} checks of shipped solutions, {least} or more of each of {len(rungs)} rungs: false alarms: "
        f"**{alarms}**; called slow: {slow}. `{result['command']}` on {processors}, "
        f"{made_at(result)}."
    )
    rows = [
        f"| `{name}` | {len(each['false_alarms'])} of {each['runs']} | {each['false_alarms'][0]} |"
        for name, each in rungs.items()
        if each["false_alarms"]
    ]
    return "\n".join([text, *(["", "| rung | false alarms | reason |", "|---|---|---|", *rows] if rows else [])]) + "\n"


def kernels_table(result: dict[str, Any]) -> str:
    """Write a row for each rung with a kernel: medians of the time of a call, its floor and torch's time."""
    lines = ["| rung | bound by | floor | shipped solution | percent of the floor | torch | checks |"]
    lines.append("|---|---|---|---|---|---|---|")
    for name in (name for name in all_rungs() if name in result["rungs"]):
        each = result["rungs"][name]
        if "seconds" not in each:
            continue
        median = {key: statistics.median(each[key]) for key in TIMES if key in each}
        percent = f"{median['percent']:.0f}% ({min(each['percent']):.0f} to {max(each['percent']):.0f})"
        times = [
            time_text(median[key]) if key in median else "" for key in ("floor_seconds", "seconds", "peer_seconds")
        ]
        lines.append(
            f"| `{name}` | {each['bound']} | {times[0]} | {times[1]} | {percent} | {times[2]} | {each['runs']} |"
        )
    packages = ", ".join(f"{key} {value}" for key, value in result["environment"]["packages"].items())
    _, alarms, _ = totals(result["rungs"])
    text = (
        f"`{result['command']}` on {result['device']}, {packages}, {made_at(result)}; medians over the checks, and the "
        f"least and the largest share of the floor; {alarms} false alarms. A call includes its launch."
    )
    return "\n".join([*lines, "", text]) + "\n"


def made_at(result: dict[str, Any]) -> str:
    """Name the commits that the rungs were graded at."""
    commits = dict.fromkeys(each["commit"] for each in result["rungs"].values())
    return record.made_at([{"commit": each, "version": result["environment"]["version"]} for each in commits])


def totals(rungs: dict[str, Any]) -> tuple[int, int, int]:
    """Count runs, false alarms and verdicts of slowness."""
    found = rungs.values()
    return (
        sum(each["runs"] for each in found),
        sum(len(each["false_alarms"]) for each in found),
        sum(each["slow"] for each in found),
    )


if __name__ == "__main__":
    main()
