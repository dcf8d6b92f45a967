"""Speed of two source trees on a processor or a GPU, in turns: what a restructuring costs.

    python benchmarks/checks/speed_of_trees.py [--before COMMIT] [--rounds 7] [--threads 2] [--add] [--out FILE]
    python benchmarks/checks/speed_of_trees.py --gpu llama-3.1-8b [--rounds 7] [--out FILE]

On a processor: decode of one stream, prefill, and 16 streams, as ``engine/cpu_vs_llamacpp.py`` measures them, in a
process of its own for each tree and round. On a GPU: decode steps of 1, 64 and 256 sequences and the throughput
protocol on random weights; each tree keeps one engine, because both fit into the memory. The order of the trees changes
from round to round. The loss is that of the rounds' ratios before over now (geometric mean), with its 95% interval
(Student's t of the logarithms). ``--add`` adds rounds to those of the file.
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
from collections.abc import Callable
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import torch

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
NAMES = {
    "decode": "decode, one stream",
    "prefill": f"prefill of {WORK['prefill'][1]}",
    "batch": f"{WORK['batch'][0]} streams",
    "1": "decode, one stream",
    "64": "64 streams",
    "256": "256 streams",
    "protocol": "throughput protocol",
}
GPU_PROGRAM = """
import json, sys, torch
from transect import LLM
from transect.bench.offline import decode_steps, run_all
from transect.bench.workload import throughput_protocol

llm = LLM(sys.argv[1], load_format="dummy", enable_prefix_caching=False, max_model_len=2048, seed=0,
          gpu_memory_utilization=float(sys.argv[2]))
work = throughput_protocol()

def rates():
    found = {}
    for count in (1, 64, 256):
        prompts = torch.randint(0, 10000, (count, 512), generator=torch.Generator().manual_seed(0)).tolist()
        found[str(count)] = count / decode_steps(llm, prompts, 100, count * 512 // 8192 + 3).per_token
    return found | {"protocol": sum(each.output_tokens for each in work) / run_all(llm, work)[0]}

rates()
print("ready", flush=True)
for _ in sys.stdin:
    print(json.dumps(rates()), flush=True)
"""
"""Warms up, then measures once for each line that it reads; it imports the package of the tree alone."""


def importing(tree: Path) -> dict[str, str]:
    """Return the environment of a process that imports the package of ``tree``."""
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(tree), os.environ.get("PYTHONPATH", "")])}


class GpuTree:
    """One tree's engine on the GPU, in a process that measures when it is asked to.

    Args:
        share: share of the GPU's memory that this engine and those started before it may fill.
    """

    def __init__(self, tree: Path, model: str, share: float) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", GPU_PROGRAM, model, str(share)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=importing(tree),
        )  # fmt: skip
        self._answer("ready")

    def _answer(self, start: str) -> str:
        """Return the next line of output with this start; other lines are the engine's messages."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(start):
                return line
        raise RuntimeError(f"the program of one tree ended with code {self._process.wait()}: see its messages above")

    def rates(self) -> dict[str, float]:
        """Measure the tokens per second of each work once."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return json.loads(self._answer("{"))


def rates(tree: Path, threads: int) -> dict[str, float]:
    """Return the median tokens per second of each work on one tree."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(threads)], capture_output=True, text=True, check=True, cwd=tree,
        env=importing(tree) | {"OMP_NUM_THREADS": str(threads)},
    )  # fmt: skip
    found = json.loads(done.stdout.splitlines()[-1])
    return {work: statistics.median(values) for work, values in found.items()}


def losses(rounds: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Return the loss of each work in percent, with its 95% interval; a gain is below 0."""
    found = {}
    for work in rounds[0]["now"]:
        logs = [math.log(each["before"][work] / each["now"][work]) for each in rounds]
        mean = statistics.fmean(logs)
        error = statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else 0.0
        half = T_95.get(len(logs), T_95[12]) * error
        low, middle, high = (100 * math.expm1(value) for value in (mean - half, mean, mean + half))
        medians = {side: statistics.median(each[side][work] for each in rounds) for side in ("before", "now")}
        found[work] = {"percent": middle, "low": low, "high": high, **medians}
    return found


def table(result: dict[str, Any]) -> str:
    """Return the table of a page: ``docs/results/cpu-inference.md`` or ``docs/results/gpu-engine.md``."""
    lines = ["| work | before, tokens/s | now, tokens/s | loss | 95% interval |", "|---|---|---|---|---|"]
    for work, each in losses(result["rounds"]).items():
        name = NAMES[work]
        lines.append(
            f"| {name} | {each['before']:.0f} | {each['now']:.0f} | {each['percent']:+.1f}% | "
            f"{each['low']:+.1f}% to {each['high']:+.1f}% |"
        )
    machine = result["environment"]
    place = machine.get("gpu") or f"{machine['cores']} cores of an {machine['processor']}"
    return "\n".join([
        *lines, "",
        f"`{result['command']}` on {place}, "
        f"{len(result['rounds'])} rounds in turns, {record.made_at([machine])}; "
        f"before: commit {result['before_commit']}.",
        "",
    ])  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", default=BEFORE)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--gpu", metavar="MODEL", help="measure random weights of this shape on the GPU")
    parser.add_argument("--add", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    gpu = ("--gpu", options.gpu) if options.gpu else ()
    out = options.out or record.RESULTS / ("h200" if options.gpu else "cpu") / "speed_of_trees.json"
    rounds = json.loads(out.read_text())["rounds"] if options.add and out.exists() else []
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(
            ["git", "archive", options.before, "src"], cwd=record.ROOT, capture_output=True, check=True
        )
        with tarfile.open(fileobj=BytesIO(archive.stdout)) as file:
            file.extractall(folder, filter="data")
        sides = {"before": Path(folder) / "src", "now": record.ROOT / "src"}
        environment = record.environment(("torch", "triton") if options.gpu else ("torch",))
        measures: dict[str, Callable[[], dict[str, float]]]
        if options.gpu:
            shares = zip(sides.items(), (0.45, 0.9), strict=True)
            measures = {side: GpuTree(tree, options.gpu, share).rates for (side, tree), share in shares}
            environment["gpu"] = torch.cuda.get_device_name()
        else:
            measures = {side: partial(rates, tree, options.threads) for side, tree in sides.items()}
        for number in range(len(rounds), len(rounds) + options.rounds):
            order = list(sides) if number % 2 == 0 else list(reversed(sides))
            measured = {side: measures[side]() for side in order}
            rounds.append(measured)
            print(number, json.dumps(measured), flush=True)
            result = {
                "command": " ".join(["python benchmarks/checks/speed_of_trees.py", *gpu]),
                "environment": environment,
                "before_commit": options.before,
                "rounds": rounds,
            }
            record.write(out, result)
    print(table(result))


if __name__ == "__main__":
    main()
