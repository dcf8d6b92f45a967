"""Runs one compiler in its own interpreter: reads commands as lines of JSON, and answers each with a line of JSON.

``ladder.py`` starts one worker for each peer, with the interpreter that has the peer's packages, and gives them turns.
Needs numpy and the peer's packages; not Transect.

Commands: ``{"make": index}`` prepares a rung, checks its result and answers with the relative error; ``{"time":
seconds}`` calls it for about as long, and answers with seconds per call; ``{"drop": 1}`` frees it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
import traceback
from typing import Any

import _paths  # noqa: F401
from benchmarks.compilers.operators import LADDERS, Work
from benchmarks.peers.peer import Compiler, Prepared

LEAST_S = 2e-2
"""The shortest piece that the clock measures: calls are repeated up to that, and waited for once."""


def made(compiler: Compiler, work: Work) -> tuple[Prepared, dict[str, Any]]:
    """Prepare a rung on all copies of its data; return it with its relative error and the seconds until the first
    result."""
    import numpy as np

    weights, data = work.weights(), [work.data(copy) for copy in range(work.copies())]
    start = time.perf_counter()
    prepared = compiler.prepare(work, weights, data)
    got = prepared.call(0)
    prepared.wait()
    seconds = time.perf_counter() - start
    error = 0.0
    for copy in range(min(2, prepared.copies)):  # the second one shows whether a compiler took data for a constant
        if copy:
            got = prepared.call(copy)
            prepared.wait()
        exact = work.exact(weights, data[copy])
        error = max(error, float(np.linalg.norm(prepared.read(got) - exact) / np.linalg.norm(exact)))
        if not error < (1e-5 if work.dtype == "float32" else 3e-2):
            raise RuntimeError(f"its result for copy {copy} of the data is wrong: relative error {error:.1e}")
    for copy in range(len(data)):  # compilers may compile again, and buffers are allocated
        prepared.call(copy)
    prepared.wait()
    return prepared, {"error": error, "first_s": seconds, "note": prepared.note}


def timed(prepared: Prepared, seconds: float) -> list[float]:
    """Measure seconds per call: at least three measurements, each of calls that last ``LEAST_S`` together."""
    calls, copy, found = 1, 0, []
    begun = time.perf_counter()
    while len(found) < 3 or time.perf_counter() - begun < seconds:
        start = time.perf_counter()
        for _ in range(calls):
            prepared.call(copy)
            copy = (copy + 1) % prepared.copies
        prepared.wait()
        took = time.perf_counter() - start
        if took < LEAST_S / 2 and calls < 10_000:
            calls = min(10_000, max(calls + 1, round(calls * LEAST_S / max(took, 1e-6))))
            continue
        found.append(took / calls)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("peer", help="a file of benchmarks/peers that has COMPILER")
    parser.add_argument("--ladder", choices=LADDERS, default="cpu")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--tuning", type=int, default=0, help="trials of a peer that tunes")
    options = parser.parse_args()
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what compilers print is no answer

    def answer(**values: Any) -> None:
        print(json.dumps(values), file=channel, flush=True)

    try:
        module = importlib.import_module(f"benchmarks.peers.{options.peer}")
        compiler: Compiler = module.COMPILER(options.device, options.threads, options.tuning)
    except Exception as error:
        answer(failed=f"{type(error).__name__}: {error}")
        return
    answer(versions=compiler.versions())
    prepared: Prepared | None = None
    for line in sys.stdin:
        command = json.loads(line)
        try:
            if "make" in command:
                work = LADDERS[options.ladder][command["make"]]
                reason = compiler.lacks(work)
                if reason:
                    answer(lacks=reason)
                else:
                    prepared, found = made(compiler, work)
                    answer(**found)
            elif "time" in command and prepared is not None:
                answer(seconds=timed(prepared, command["time"]))
            else:
                prepared = None
                answer(dropped=True)
        except Exception as error:
            traceback.print_exc()
            prepared = None
            answer(failed=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")


if __name__ == "__main__":
    main()
