"""Kills a process with SIGKILL at random moments of writing large checkpoints, and checks what it leaves.

    python benchmarks/checks/kill_checkpoints.py [--kills 50] [--megabytes 500]

After each kill every directory with the name of a checkpoint must be whole (each file's SHA-256) and hold the values of
its step. Writes benchmarks/results/cpu/kill_checkpoints.json.
"""

from __future__ import annotations

import argparse
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import _paths  # noqa: F401
from benchmarks import record
from transect.train.loop.checkpoint import list_steps, read

WRITER = """
import sys, torch
from pathlib import Path
from transect.train.loop.checkpoint import Snapshot, Writer
run, size, first = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
values = torch.empty(size)
with Writer(run, keep=2) as writer:
    for step in range(first, 10**6):
        values.fill_(step)
        writer.save(Snapshot(step, lambda folder: None, {"values": values}, {"step": step}))
        print(step, flush=True)
        writer.wait()
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--megabytes", type=int, default=500)
    arguments = parser.parse_args()
    rng = random.Random(0)
    size = arguments.megabytes * 10**6 // 4
    in_write = checked = 0
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        step = 1
        for _ in range(arguments.kills):
            command = [sys.executable, "-c", WRITER, str(run), str(size), str(step)]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
                assert process.stdout is not None
                process.stdout.readline()  # the first write of this process has begun
                time.sleep(rng.uniform(0.0, 2.0))
                process.send_signal(signal.SIGKILL)
            in_write += bool(list(run.glob(".partial-[0-9]*")))
            for path in list_steps(run):
                found = read(path)
                assert found.state["step"] == found.step
                assert bool((found.tensors["values"] == found.step).all())
                checked += 1
                step = found.step + 1
    result = {
        "command": "python benchmarks/checks/kill_checkpoints.py "
        f"--kills {arguments.kills} --megabytes {arguments.megabytes}",
        "kills": arguments.kills,
        "kills_within_a_write": in_write,
        "checkpoints_found_and_whole": checked,
        "last_step": step - 1,
        "environment": record.environment(),
    }
    record.write(record.RESULTS / "cpu" / "kill_checkpoints.json", result)
    print(result)


if __name__ == "__main__":
    main()
