"""Programs of well-known libraries, each slow in one way: is the right finding first, and is its gain that of the mend.

    python benchmarks/explain/programs.py [NAMES]
    python benchmarks/explain/programs.py --device cuda --out benchmarks/results/h200/explain_programs.json

Each program of ``benchmarks/explain/corpus`` runs until three seconds are over, is explained in windows as
`transect explain run` does, and is timed without explaining, slow and mended in turns. Healthy programs may get no
finding above 5%. Programs that are held out were written after the last change of what is measured. ``--keep`` writes
recordings, which changed detectors can explain again, on any machine; gains are those of the result of that run:

    python benchmarks/explain/programs.py --again FOLDER --gains RESULT.json --out OTHER.json
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import gzip
import io
import json
import pickle
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

import _paths  # noqa: F401
from benchmarks import record
from transect.explain.program.explain import Explain, explain_trace, machine_ceilings
from transect.explain.program.report import Explanation
from transect.hardware.cores import usable_cores

FOLDER = Path(__file__).resolve().parent / "corpus"
FILES = sorted(path for path in FOLDER.glob("*.py") if path.stem != "corpus")
LARGE = 0.05
LEAST_GAIN = 0.05
"""Least gain of a fix; where it gains less, the program is not slow on that machine, and does not count."""
NEAR = 0.3
PAIRS, MOST_PAIRS, PAIRS_S = 3, 30, 0.6
"""Fewest and most runs of each version, in turns, of which the fastest counts, and seconds that allow more than the
fewest."""


def programs(device: str = "cpu") -> dict[str, Any]:
    """Load the corpus; importing a file registers its programs, and leaves out those of libraries that are missing."""
    sys.path.insert(0, str(FOLDER))
    import corpus

    for path in FILES:
        try:
            __import__(path.stem)
        except ImportError as error:
            print(f"{path.name} is left out: {error}", flush=True)
    return {name: each for name, each in corpus.PROGRAMS.items() if each.device == device}


def chosen(names: list[str], known: dict[str, Any]) -> list[str]:
    """Return the programs with these names, and those of the corpus' files with these names."""
    of_files = {path.stem: [name for name in known if known[name].make.__module__ == path.stem] for path in FILES}
    return [each for name in names for each in of_files.get(name, [name])]


def seconds(work: Callable[[], object], steady: bool = False) -> float:
    """Time one run, or the time between its optimizer steps if ``steady``, with its output suppressed."""
    if steady:
        marks: list[float] = []
        hook = register_optimizer_step_post_hook(lambda *given: marks.append(time.perf_counter()))
        seconds(work)
        hook.remove()
        return marks[-1] - marks[0]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        began = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() - began


def judged(each: Any, ceilings: Any, long_s: float, keep: Path | None = None) -> dict[str, Any]:
    """Judge one program: findings, and the gain of its fix; ``keep``: folder for the recording."""
    gc.collect()  # of the program before: libraries collect, too
    torch.manual_seed(0)
    slow, fast = each.make(False), each.make(True)
    once = min(seconds(slow), seconds(slow))
    seconds(fast)
    began = time.perf_counter()
    runs = 0
    with Explain(ceilings, window_s=long_s, cores=torch.get_num_threads()) as run:  # other cores are not theirs
        while (lasted := time.perf_counter() - began) < long_s or (lasted < 8 * long_s and not run.done):
            seconds(slow)
            runs += 1
    took = time.perf_counter() - began
    found = run.result
    assert found is not None
    facts = dict(run._explain.keywords)
    if found.steps is None and not run.limited:  # the command runs such a program once more
        facts["plain_s"] = sum(seconds(slow) for _ in range(runs))
        found = run.fitted(facts["plain_s"])
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        with gzip.open(keep / f"{each.name}.pickle.gz", "wb", 3) as file:
            pickle.dump((run._explain.args, facts, found.steps), file)
    pairs: list[tuple[float, float]] = []
    while len(pairs) < PAIRS or (sum(map(sum, pairs)) < PAIRS_S and len(pairs) < MOST_PAIRS):
        pairs.append((seconds(slow, each.steady), seconds(fast, each.steady)))
    before, after = (min(side) for side in zip(*pairs, strict=True))
    row = {
        "name": each.name,
        "library": each.library,
        "held_out": each.held_out,
        "kinds": list(each.kinds),
        "gain": (before - after) / before if each.kinds else 0.0,
        "slow_s": before,
        "fast_s": after,
        "before_s": once,
        "explaining_s": took,
    }
    return row | verdict(row, found)


def verdict(row: dict[str, Any], found: Explanation) -> dict[str, Any]:
    """Compare an explanation with the right finding of a program and its gain."""
    right = [one for one in found.findings if one.kind in row["kinds"]]
    promised = right[0].share if right else 0.0
    return {
        "findings": [[one.kind, one.share, one.where] for one in found.findings],
        "first": found.findings[0].kind if found.findings else "",
        "promised": promised,
        "plain_measured": found.split.measured,
        "steps": found.steps and found.steps.kind,
        "right": bool(found.findings and found.findings[0].kind in row["kinds"]),
        "near": abs(promised - row["gain"]) <= NEAR * row["gain"] if row["kinds"] else None,
        "clean": all(one.share <= LARGE for one in found.findings),
        "said": str(found),
    }


def explained_again(folder: Path, row: dict[str, Any]) -> dict[str, Any]:
    """Judge the recording of a program in a folder of ``--keep`` by what explains it now."""
    with gzip.open(folder / f"{row['name']}.pickle.gz") as file:
        given, facts, steps = pickle.load(file)
    return row | verdict(row, explain_trace(*given, **facts, steps=steps))


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Count over all programs, and over those that were held out."""
    counts: dict[str, Any] = {}
    faulty = [row for row in rows if row["kinds"] and row["gain"] >= LEAST_GAIN]
    for name, chosen in (("all", faulty), ("held_out", [row for row in faulty if row["held_out"]])):
        counts[name] = {
            "programs": len(chosen),
            "right": sum(row["right"] for row in chosen),
            "near": sum(row["near"] for row in chosen),
        }
    healthy = [row for row in rows if not row["kinds"]]
    counts["healthy"] = {"programs": len(healthy), "clean": sum(row["clean"] for row in healthy)}
    return counts


def table(result: dict[str, Any]) -> str:
    """Format counts, and the predicted gain beside that of the fix."""
    counts, rows = result["summary"], result["programs"]
    every, held, healthy = counts["all"], counts["held_out"], counts["healthy"]
    lines = [
        f"{every['right']} of {every['programs']} right first, {every['near']} within 30% of the fix's gain. "
        + (f"Of those held out: {held['right']} and {held['near']} of {held['programs']}. " if held["programs"] else "")
        + f"Healthy programs without a finding above 5%: {healthy['clean']} of {healthy['programs']}.",
        "",
        "| program | library | first finding | right | predicted gain | gain of the fix |",
        "|---|---|---|---|---:|---:|",
    ]
    for row in rows:
        if row["kinds"]:
            right = "yes" if row["right"] else "no"
            right = right if row["gain"] >= LEAST_GAIN else "not slow here"
            name = row["name"].replace("_", " ") + (" (held out)" if row["held_out"] else "")
            lines.append(
                f"| {name} | {row['library']} | {row['first'] or 'nothing'} | {right} | {row['promised']:.0%} "
                f"| {row['gain']:.0%} |"
            )
        else:
            found = ", ".join(f"{kind} {share:.0%}" for kind, share, _ in row["findings"])
            name = row["name"].replace("_", " ")
            lines.append(
                f"| {name} | {row['library']} | {found or 'nothing'} | {'yes' if row['clean'] else 'no'} | | |"
            )
    machine = result["environment"]
    where = machine.get("gpu") or f"{machine['processor']}, {machine['cores']} cores"
    later = f"; explained again at commit {record.cited(result['explained'])}" if "explained" in result else ""
    return "\n".join(lines) + f"\n\n`{result['command']}` on {where}, {record.made_at([machine])}{later}.\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="some of the programs, or files of the corpus; all if none is named")
    parser.add_argument("--part", default="1/1", help="every Nth of these programs, beginning with the Kth: K/N")
    parser.add_argument("--seconds", type=float, default=3.0, help="length of an explained run")
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--keep", type=Path, help="folder for the recordings")
    parser.add_argument("--say", action="store_true", help="print whole explanations of what is not right")
    parser.add_argument("--out", type=Path, default=record.RESULTS / "cpu" / "explain_programs.json")
    parser.add_argument("--add", action="store_true", help="keep the other programs of a result of the same commit")
    parser.add_argument("--again", type=Path, metavar="FOLDER", help="explain the recordings of --keep again")
    parser.add_argument("--gains", type=Path, metavar="RESULT", help="result of the run of these recordings")
    options = parser.parse_args()
    if options.again:
        return again(options)
    torch.set_num_threads(options.threads)
    gpu = {"gpu": torch.cuda.get_device_name()} if options.device == "cuda" else {}
    known = programs(options.device)
    result: dict[str, Any] = {
        "command": f"python benchmarks/explain/programs.py --device {options.device} --seconds {options.seconds:g}"
        + ("" if gpu else f" --threads {options.threads}"),
        "environment": record.environment() | gpu,
        "programs": [],
        "failed": {},
    }
    first, step = map(int, options.part.split("/"))
    names = (chosen(options.names, known) or list(known))[first - 1 :: step]
    if options.add and options.out.exists():
        before = json.loads(options.out.read_text())
        if before["environment"]["commit"] != result["environment"]["commit"]:
            parser.error(f"{options.out} is of commit {before['environment']['commit']}: leave --add out")
        result["programs"] = [row for row in before["programs"] if row["name"] not in names]
        result["failed"] = {name: why for name, why in before["failed"].items() if name not in names}
    ceilings = machine_ceilings()
    for name in names:
        try:
            row = judged(known[name], ceilings, options.seconds, options.keep)
        except Exception as error:  # one that cannot run must not hide the others
            result["failed"][name] = f"{type(error).__name__}: {error}"
            print(f"{name} failed: {result['failed'][name]}", flush=True)
            continue
        shown(row, options.say)
        result["programs"].append(row)
        result["programs"].sort(key=lambda row: list(known).index(row["name"]))
        result["summary"] = summary(result["programs"])
        record.write(options.out, result)
    print(result.get("summary"))


def shown(row: dict[str, Any], say: bool) -> None:
    """Print a line about a program, and its explanation if it is not right and ``say``; the row loses it."""
    said = row.pop("said")
    good = (row["right"] and row["near"]) or row["gain"] < LEAST_GAIN if row["kinds"] else row["clean"]
    found = " ".join(f"{kind} {share:.0%}" for kind, share, _ in row["findings"][:3])
    print(f"{row['name']:38} gain {row['gain']:4.0%}: {found}{'' if good else '   <--'}", flush=True)
    if say and not good:
        print(said, flush=True)


def again(options: argparse.Namespace) -> None:
    """Explain recordings again, and write a result that names the commits of the run and of the explanation."""
    result = json.loads(options.gains.read_text())
    rows, result["programs"] = result["programs"], []
    result["explained"] = record.environment()["commit"]
    for row in rows:
        kept = (options.again / f"{row['name']}.pickle.gz").exists()
        if not kept or (options.names and row["name"] not in options.names):
            continue
        row = explained_again(options.again, row)
        shown(row, options.say)
        result["programs"].append(row)
    result["summary"] = summary(result["programs"])
    record.write(options.out, result)
    print(result["summary"])


if __name__ == "__main__":
    main()
