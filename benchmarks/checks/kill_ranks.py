"""Kills either of two training ranks with SIGKILL at random moments, resumes, and compares every bit with a calm run.

    python benchmarks/checks/kill_ranks.py [--kills 30] [--zero 3]

Two ranks train by ``transect train`` and save after every step, each its part of the optimizer's state. After a kill
the other rank must end by itself, and every checkpoint that has its name must be whole: all files there, each with its
sum, and no part of a tensor missing. Then the run continues with ``--resume``. At its end the losses of all steps, the
weights and the optimizer's state must be those of a run that nobody disturbed, and the next run begins. Writes
benchmarks/results/cpu/kill_ranks.json.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import _paths  # noqa: F401
from benchmarks import record

sys.path.insert(0, str(record.ROOT / "examples" / "pretrain"))

import torch
from byte_model import Shape, write_model
from safetensors.torch import load_file

from transect.train.loop.checkpoint import list_steps, newest, read
from transect.train.loop.report import read_log

STEPS = 60
ENDS_S = 30.0
"""Within which the rank that is left must have ended."""


def write_run(folder: Path, zero: int) -> Path:
    """Write a small model of bytes and the file of its run."""
    write_model(folder / "shape", Shape(dim=64, layers=3, heads=2, ffn=192, context=64), chat=True)
    (folder / "text.txt").write_text("".join(f"{i} times {j} is {i * j}.\n" for i in range(40) for j in range(12)))
    file = folder / "run.toml"
    file.write_text(
        f'model = "{folder}/shape"\ntask = "pretrain"\nsteps = {STEPS}\naccumulate = 2\nsave_every = 1\nkeep = 3\n'
        f'device = "cpu"\nthreads = 1\nlog_to = []\n[data]\ntrain = ["{folder}/text.txt"]\nseq_len = 64\n'
        f"micro_batch = 128\n[parallel]\ndata = 2\nzero = {zero}\n"
    )
    return file


def start(file: Path, run_dir: Path) -> subprocess.Popen[bytes]:
    """Start the command, from the beginning or from the last checkpoint."""
    command = [sys.executable, "-m", "transect", "train"]
    if list_steps(run_dir):
        command += ["--resume", "--run", str(run_dir)]
    else:
        shutil.rmtree(run_dir, ignore_errors=True)
        command += [str(file), "--set", f'run_dir="{run_dir}"']
    environment = os.environ | {"PYTHONPATH": str(record.ROOT / "src"), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)


def second_rank(process: subprocess.Popen[bytes]) -> int | None:
    """Find the process of the rank that the first one has started, if it exists yet."""
    try:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    except OSError:
        return None
    return int(children[0]) if children else None


def gone(pid: int) -> bool:
    """Check if a process ends soon."""
    until = time.monotonic() + ENDS_S
    while time.monotonic() < until:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


def bits(run_dir: Path) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    """Read the data that must be equal: losses and norms of all steps, and the tensors of the last checkpoint."""
    lines = [(line["loss"], line["gradient_norm"]) for line in read_log(run_dir) if "gradient_norm" in line]
    last = newest(run_dir)
    return lines, {**last.tensors, **load_file(last.path / "model.safetensors")}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--zero", type=int, default=3)
    arguments = parser.parse_args()
    rng = random.Random(0)
    counts: dict[str, int] = {"kills of the first rank": 0, "kills of the second rank": 0}
    in_write = whole = finished = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = write_run(folder, arguments.zero)
        assert start(file, folder / "calm").wait() == 0
        lines, tensors = bits(folder / "calm")
        assert len(lines) == STEPS
        run_dir = folder / "killed"
        while sum(counts.values()) < arguments.kills or not finished:
            process = start(file, run_dir)
            before = len(list_steps(run_dir)) and newest(run_dir).step
            child = None
            while process.poll() is None:  # until it takes steps
                child = child or second_rank(process)
                steps = list_steps(run_dir)
                if steps and int(steps[-1].name[5:]) > before:
                    break
                time.sleep(0.005)
            time.sleep(rng.uniform(0.0, 0.5))
            if process.poll() is None and child and sum(counts.values()) < arguments.kills:
                first = rng.random() < 0.5
                os.kill(process.pid if first else child, signal.SIGKILL)
                counts["kills of the first rank" if first else "kills of the second rank"] += 1
                process.wait(ENDS_S)
                assert gone(child), "the other rank is still there"
                in_write += any(run_dir.glob(".partial-[0-9]*"))
                for path in list_steps(run_dir):
                    found = read(path)
                    assert all(found.tensors[key] is not None for key in found.tensors)
                    whole += 1
                print(counts, f"{in_write} within a write, at step {newest(run_dir).step}", flush=True)
                continue
            assert process.wait() == 0, "a resumed run failed"
            again, others = bits(run_dir)
            assert again == lines, "a step differs"
            assert set(others) == set(tensors) and all(torch.equal(tensors[key], others[key]) for key in tensors)
            finished += 1
            shutil.rmtree(run_dir)
    result: dict[str, Any] = {
        "command": f"python benchmarks/checks/kill_ranks.py --kills {arguments.kills} --zero {arguments.zero}",
        "zero": arguments.zero,
        **{key.replace(" ", "_"): value for key, value in counts.items()},
        "kills_within_a_write": in_write,
        "checkpoints_read_after_a_kill_all_whole": whole,
        "runs_that_reached_their_end_with_the_same_bits": finished,
        "steps_of_a_run": STEPS,
        "commit": record.commit(),
        "environment": record.environment(),
    }
    record.write(record.RESULTS / "cpu" / "kill_ranks.json", result)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
