"""Compiles one share of launchers' configurations, by running each once: what ``transect tune --workers`` starts.

python -m transect.ops.tools.search_worker SHARE OF < a JSON list of [operator, launcher, case]
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence

import torch

from ..registry import all_ops, get
from . import bench, search

Unit = tuple[str, str, str]
"""The names of an operator, of one of its launchers, and of a case."""


def start(units: Sequence[Unit], count: int, seconds: float = 180.0) -> None:
    """Run ``count`` processes side by side and wait for them; what fails there is found by the search."""
    workers = []
    for share in range(count):
        command = [sys.executable, "-m", f"{__package__}.search_worker", str(share), str(count)]
        worker = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True
        )
        assert worker.stdin is not None
        worker.stdin.write(json.dumps(list(units)))
        worker.stdin.close()
        workers.append(worker)
    end = time.monotonic() + seconds
    for worker in workers:
        try:
            worker.wait(timeout=max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()


def main() -> None:
    share, count = map(int, sys.argv[1:])
    all_ops()
    number = 0
    for name, launcher, case_name in json.loads(sys.stdin.read()):
        op = get(name)
        knobs = next(k for k in op.knobs() if k.name == launcher)
        case = next(c for c in op.cases() if c.name == case_name)
        arguments = case.make(torch.device("cuda"), 0)
        default, others = search.configurations(knobs, knobs.size(arguments))
        prepared = knobs.prepare(arguments)
        for config in [default, *others]:
            number += 1
            if number % count != share:
                continue
            try:
                knobs.launch(**prepared, config=config)
            except bench.EXPECTED:
                continue
        del arguments, prepared
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
