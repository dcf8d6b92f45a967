"""The process that measures for ``bench_run.py``: it reads a job from stdin and writes one JSON object a line.

A kernel that hangs, or that leaves the device unusable, takes this process with it and not the results so far.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TextIO

import torch
import torch._functorch.config as functorch

from ...costs.ceilings import Ceilings
from ..registry import Case, OnHost, Op, all_ops
from . import bench


def warm_up(op: Op, case: Case, device: str) -> None:
    """Run every contender once at a case, in every direction, so that kernels are compiled and kept on disk."""
    place = torch.device(device)
    inputs = case.make(place, 0)
    for entry in bench.contenders(op, case, inputs, place):
        for direction in bench.directions_of(op, case):
            call = entry.plain if direction == "forward" else entry.differentiable
            if call is not None and not isinstance(call, OnHost):
                try:
                    bench.run_once(op, call, inputs, direction)
                except bench.EXPECTED:
                    continue  # run again, and reported, by the process that measures


def give_up(device: str, say: Callable[..., None]) -> None:
    """End this process after a failure on a GPU: memory, or a capture, may be left in a state that others suffer
    from."""
    if device != "cpu":
        say("again")
        sys.stdout.flush()
        os._exit(0)


def main(out: TextIO) -> None:
    """Run one job, as ``bench_run.py`` describes it; messages are written to ``out``."""

    def say(kind: str, **fields: Any) -> None:
        print(json.dumps({"kind": kind, **fields}), file=out, flush=True)

    job = json.loads(sys.stdin.read())
    registry = {op.name: op for op in all_ops()}
    if job["device"] == "cpu":
        torch.set_num_threads(job["threads"])
    if job["warm_up"]:
        for name, index in job["warm_up"]:
            warm_up(registry[name], bench.cases_on(registry[name], torch.device(job["device"]))[index], job["device"])
            torch.cuda.empty_cache()
        return
    ceilings = Ceilings(**job["ceilings"])
    # Compiled peers give their buffers away in the backward pass, which then runs only once; here it runs many times.
    functorch.donated_buffer = False  # type: ignore[attr-defined]
    skip = frozenset(tuple(entry) for entry in job["skip"])
    for name, index in job["units"]:
        op = registry[name]
        case = bench.cases_on(op, torch.device(job["device"]))[index]
        say("unit", op=name, index=index, case=case.name)
        left_out = frozenset((c, d) for o, i, c, d in skip if (o, i) == (name, index))
        try:
            for row in bench.bench_case(
                op,
                case,
                ceilings,
                job["device"],
                check=job["check"],
                skip=left_out,
                started=lambda contender, direction: say("start", contender=contender, direction=direction),
                failed=lambda: give_up(job["device"], say),
            ):
                say("row", **asdict(row))
        except bench.EXPECTED as error:
            say("failed", reason=bench.sentence(error))
            if job["device"] != "cpu":
                torch.cuda.synchronize()  # raises, and ends this process, when the device is unusable
        if job["device"] != "cpu":
            torch.cuda.empty_cache()
        say("done")


if __name__ == "__main__":
    messages = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints goes to stderr
    main(messages)
