"""Compiles one share of a launcher's configurations, by running each once: what ``transect tune --workers`` starts.

python -m transect.ops.tools.search_worker OP LAUNCHER CASE SHARE OF
"""

from __future__ import annotations

import subprocess
import sys

import torch

from ..registry import all_ops, get
from . import bench, search


def start(op: str, launcher: str, case: str, count: int) -> None:
    """Run ``count`` processes side by side and wait for them; what fails there is found by the search."""
    command = [sys.executable, "-m", f"{__package__}.search_worker", op, launcher, case]
    workers = [
        subprocess.Popen([*command, str(share), str(count)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for share in range(count)
    ]
    for worker in workers:
        try:
            worker.wait(timeout=180)
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()


def main() -> None:
    name, launcher, case_name, share, count = sys.argv[1:]
    all_ops()
    op = get(name)
    knobs = next(k for k in op.knobs if k.name == launcher)
    case = next(c for c in op.cases() if c.name == case_name)
    arguments = case.make(torch.device("cuda"), 0)
    default, others = search.configurations(knobs, knobs.size(arguments))
    prepared = knobs.prepare(arguments)
    for config in [default, *others][int(share) :: int(count)]:
        try:
            knobs.launch(**prepared, config=config)
        except bench.EXPECTED:
            continue


if __name__ == "__main__":
    main()
