"""Speed of two source trees on a processor, in turns: what a restructuring costs.

    python benchmarks/checks/speed_of_trees.py [--before COMMIT] [--rounds 7] [--threads 2] [--add] [--out FILE]

Decode of one stream, prefill, and 16 streams, as ``engine/cpu_vs_llamacpp.py`` measures them, in a process of its own
for each tree and round. The order of the trees changes from round to round. The loss is that of the rounds' ratios
before over now (geometric mean), with its 95% interval (Student's t of the logarithms). ``--add`` adds rounds to those
of the file.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
from io import BytesIO
from pathlib import Path
from typing import Any

import _paths  # noqa: F401
from benchmarks import record
from benchmarks.checks.structure import BEFORE
from benchmarks.engine import cpu_work
from benchmarks.engine.cpu_work import WORK
from benchmarks.peers.transect import Transect

T_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26, 11: 2.23, 12: 2.20}
"""Student's t for 95%, by number of rounds; the last holds for more."""
PROGRAM = "\n".join([
    "from __future__ import annotations",
    "import json, random, sys, time",
    "from collections.abc import Sequence",
    "from typing import Any",
    f"WORK, SHORT, REPEATS = {WORK!r}, {{}}, {cpu_work.REPEATS}",
    *map(inspect.getsource, (cpu_work.prompts, cpu_work.rate, cpu_work.rates_of, Transect)),
    "print(json.dumps(rates_of(Transect('smollm2-135m', int(sys.argv[1])))))",
])  # fmt: skip
"""The work of the other benchmark as a program of its own, which imports the package of the tree alone."""


def rates(tree: Path, threads: int) -> dict[str, float]:
    """Return the median tokens per second of each work on one tree."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(threads)], capture_output=True, text=True, check=True, cwd=tree,
        env=os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": str(threads)},
    )  # fmt: skip
    found = json.loads(done.stdout.splitlines()[-1])
    return {work: statistics.median(values) for work, values in found.items()}


def losses(rounds: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Return the loss of each work in percent, with its 95% interval; a gain is below 0."""
    found = {}
    for work in WORK:
        logs = [math.log(each["before"][work] / each["now"][work]) for each in rounds]
        mean = statistics.fmean(logs)
        error = statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else 0.0
        half = T_95.get(len(logs), T_95[12]) * error
        low, middle, high = (100 * math.expm1(value) for value in (mean - half, mean, mean + half))
        medians = {side: statistics.median(each[side][work] for each in rounds) for side in ("before", "now")}
        found[work] = {"percent": middle, "low": low, "high": high, **medians}
    return found


def table(result: dict[str, Any]) -> str:
    """Return the table of ``docs/understand/architecture.md``."""
    lines = ["| work | before, tokens/s | now, tokens/s | loss | 95% interval |", "|---|---|---|---|---|"]
    for work, each in losses(result["rounds"]).items():
        count, length, _ = WORK[work]
        name = {"decode": "decode, one stream", "prefill": f"prefill of {length}", "batch": f"{count} streams"}[work]
        lines.append(
            f"| {name} | {each['before']:.0f} | {each['now']:.0f} | {each['percent']:+.1f}% | "
            f"{each['low']:+.1f}% to {each['high']:+.1f}% |"
        )
    machine = result["environment"]
    return "\n".join([
        *lines, "",
        f"`{result['command']}` on {machine['cores']} cores of an {machine['processor']}, "
        f"{len(result['rounds'])} rounds in turns, {record.made_at([machine])}; "
        f"before: commit {result['before_commit']}.",
        "",
    ])  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", default=BEFORE)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--add", action="store_true")
    parser.add_argument("--out", type=Path, default=record.RESULTS / "cpu" / "speed_of_trees.json")
    options = parser.parse_args()
    rounds = json.loads(options.out.read_text())["rounds"] if options.add and options.out.exists() else []
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(
            ["git", "archive", options.before, "src"], cwd=record.ROOT, capture_output=True, check=True
        )
        with tarfile.open(fileobj=BytesIO(archive.stdout)) as file:
            file.extractall(folder, filter="data")
        sides = {"before": Path(folder) / "src", "now": record.ROOT / "src"}
        for number in range(len(rounds), len(rounds) + options.rounds):
            order = list(sides) if number % 2 == 0 else list(reversed(sides))
            measured = {side: rates(sides[side], options.threads) for side in order}
            rounds.append(measured)
            print(number, json.dumps(measured), flush=True)
            result = {
                "command": "python benchmarks/checks/speed_of_trees.py",
                "environment": record.environment(("torch",)),
                "before_commit": options.before,
                "rounds": rounds,
            }
            record.write(options.out, result)
    print(table(result))


if __name__ == "__main__":
    main()
