"""Speed of two source trees on a processor or a GPU, in turns: what a restructuring costs.

    python benchmarks/checks/speed_of_trees.py [--before COMMIT] [--rounds 40] [--threads 2] [--add] [--out FILE]
    python benchmarks/checks/speed_of_trees.py --gpu llama-3.1-8b [--rounds 9] [--out FILE]

On a processor: decode of one stream, prefill, and 16 streams, as ``engine/cpu_vs_llamacpp.py`` measures them. On a GPU:
decode steps of 1, 64 and 256 sequences and the throughput protocol on random weights. Each tree keeps one engine, and
they take turns for each piece of work; the order changes from round to round. The loss is that of the rounds' ratios
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
from transect.bench.intervals import FEWEST, ratio_bounds

ON_CPU = "\n".join([
    "from __future__ import annotations",
    "import json, random, sys, time",
    "from collections.abc import Sequence",
    "from typing import Any",
    f"WORK, SHORT = {WORK!r}, {{}}",
    *map(inspect.getsource, (cpu_work.prompts, cpu_work.rate, Transect)),
    "engine, turn = Transect('smollm2-135m', int(sys.argv[1])), iter(range(1_000_000))",
    "def measure(work):",
    "    count, length, new = WORK[work]",
    "    return rate(work, *engine.run(prompts(count, length, next(turn)), new))",
])  # fmt: skip
"""The work of the other benchmark as a program of its own, which imports the package of the tree alone."""
ON_GPU = """
import json, sys, torch
from transect import LLM
from transect.bench.offline import decode_steps, run_all
from transect.bench.workload import throughput_protocol

llm = LLM(sys.argv[1], load_format="dummy", enable_prefix_caching=False, max_model_len=2048, seed=0,
          num_kv_blocks=20480)  # as many as the protocol needs, so that two engines fit
protocol = throughput_protocol()

def measure(work):
    if work == "protocol":
        return sum(each.output_tokens for each in protocol) / run_all(llm, protocol)[0]
    prompts = torch.randint(0, 10000, (int(work), 512), generator=torch.Generator().manual_seed(0)).tolist()
    return int(work) / decode_steps(llm, prompts, 100, int(work) * 512 // 8192 + 3).per_token
"""
ANSWER = """
for line in sys.stdin:
    print(json.dumps({"rate": measure(line.strip())}), flush=True)
"""
NAMES = {
    "decode": "decode, one stream",
    "prefill": f"prefill of {WORK['prefill'][1]}",
    "batch": f"{WORK['batch'][0]} streams",
    "1": "decode, one stream",
    "64": "64 streams",
    "256": "256 streams",
    "protocol": "throughput protocol",
}
GPU_WORK = ("1", "64", "256", "protocol")


class Tree:
    """One tree's engine, in a process that measures when it is asked to; it imports the package of ``source`` alone."""

    def __init__(self, source: Path, program: str, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", program + ANSWER, *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(source), os.environ.get("PYTHONPATH", "")])},
        )  # fmt: skip

    def rate(self, work: str) -> float:
        """Measure the tokens per second of one piece of work, once."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(work + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith('{"rate"'):  # other lines are the engine's messages
                return json.loads(line)["rate"]
        raise RuntimeError(f"the program of one tree ended with code {self._process.wait()}: see its messages above")


def losses(rounds: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Return the loss of each work in percent, with its 95% interval; a gain is below 0."""
    found = {}
    for work in rounds[0]["now"]:
        logs = [math.log(each["before"][work] / each["now"][work]) for each in rounds]
        mean = statistics.fmean(logs)
        ends = ratio_bounds(logs, [1.0] * len(logs), 0.95) if len(logs) >= FEWEST else (mean, mean)
        low, middle, high = (100 * math.expm1(value) for value in (ends[0], mean, ends[1]))
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
    parser.add_argument("--rounds", type=int, default=40)
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
        if options.gpu:
            trees = {side: Tree(tree, ON_GPU, options.gpu) for side, tree in sides.items()}
            import torch

            environment["gpu"] = torch.cuda.get_device_name()
        else:
            trees = {side: Tree(tree, ON_CPU, str(options.threads)) for side, tree in sides.items()}
        works = GPU_WORK if options.gpu else tuple(WORK)
        for tree in trees.values():
            for work in works:
                tree.rate(work)  # warms up
        for number in range(len(rounds), len(rounds) + options.rounds):
            order = list(sides) if number % 2 == 0 else list(reversed(sides))
            measured: dict[str, dict[str, float]] = {side: {} for side in sides}
            for work in works:
                for side in order:
                    measured[side][work] = trees[side].rate(work)
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
