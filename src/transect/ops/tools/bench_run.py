"""Runs a benchmark of many operators in a process of its own, and continues after a crash of that process.

A case that takes longer than its limit, or that ends the process, is a row with its reason; the rest continues in a new
process.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from ...costs.ceilings import Ceilings
from ..registry import Op
from .bench import Timing, cases_on

Unit = tuple[str, int]
CASE_SECONDS = 30.0
START_SECONDS = 120.0
"""Time for the first message of a process: imports, and making the device's context."""


class _Worker:
    """One measuring process, with its messages in a queue; None in the queue is its end."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed in ``end``)
        command = [sys.executable, "-m", f"{__package__}.bench_worker"]
        interpret = {"TRITON_INTERPRET": "1"} if job["check"] and job["device"] == "cpu" else {}
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env={**os.environ, **interpret},
        )
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(job))
        self.process.stdin.close()
        self.messages: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.messages.put(json.loads(line))
        self.messages.put(None)

    def end(self) -> str:
        """Stop it; the last line that it wrote to stderr."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.reader.join()
        if self.process.stdout is not None:
            self.process.stdout.close()
        self.errors.seek(0)
        lines = self.errors.read().strip().splitlines()
        self.errors.close()
        return lines[-1][:200] if lines else ""


def run(
    ops: Sequence[Op],
    ceilings: Ceilings,
    device: str,
    *,
    check: bool = False,
    matching: str = "",
    left_out: frozenset[tuple[str, str]] = frozenset(),
    limit: float = CASE_SECONDS,
    warm_up_workers: int = 0,
    say: Callable[[str], None] = lambda line: None,
) -> Iterator[Timing]:
    """Measure every case of ``ops`` whose name contains ``matching``; rows are yielded as they finish.

    Args:
        left_out: (operator, case) pairs not to run.
        limit: seconds for one contender in one direction (with making the inputs, for the first).
        warm_up_workers: processes that compile the kernels first, side by side (for a GPU).
        say: told about what goes wrong.
    """
    place = torch.device(device)
    units = [
        (op.name, i)
        for op in ops
        for i, case in enumerate(cases_on(op, place))
        if matching in case.name and (op.name, case.name) not in left_out
    ]
    implementations = {op.name: op.implementations for op in ops}
    names = {op.name: [case.name for case in cases_on(op, place)] for op in ops}
    job: dict[str, Any] = {
        "device": device,
        "threads": torch.get_num_threads(),
        "ceilings": asdict(ceilings),
        "check": check,
        "warm_up": [],
    }
    if warm_up_workers:
        _warm_up(job, units, warm_up_workers)
    skip: list[tuple[str, int, str, str]] = []
    while units:
        worker = _Worker({**job, "units": units, "skip": skip})
        current: tuple[str, str] | None = None
        started = False
        reason = ""
        again = False
        while True:
            try:
                message = worker.messages.get(timeout=limit if started else START_SECONDS)
            except queue.Empty:
                reason = f"took more than {limit if started else START_SECONDS:.0f} s"
                break
            if message is None:
                break
            kind = message.pop("kind")
            if kind == "unit":
                started, current = True, None
            elif kind == "start":
                current = (message["contender"], message["direction"])
            elif kind == "row":
                current = None
                skip.append((*units[0], message["contender"], message["direction"]))
                yield Timing(**message)
            elif kind == "failed":
                yield _without_time(units[0], names, ("", "forward"), message["reason"])
            elif kind == "again":
                again = True
            elif kind == "done":
                units.pop(0)
        last = worker.end()
        if not units:
            break
        if again and not reason:
            continue
        reason = reason or f"the process ended ({last or worker.process.returncode})"
        say(f"{units[0][0]}, {names[units[0][0]][units[0][1]]}: {current[0] if current else 'making inputs'}: {reason}")
        if not started:
            raise RuntimeError(f"the measuring process did not start: {reason}")
        ended = _without_time(units[0], names, current or ("", "forward"), reason)
        yield replace(ended, wrong=current is not None and current[0] in implementations[units[0][0]])
        if current is None:
            units.pop(0)
        else:
            skip.append((*units[0], *current))


def _without_time(unit: Unit, names: dict[str, list[str]], who: tuple[str, str], reason: str) -> Timing:
    return Timing(unit[0], names[unit[0]][unit[1]], who[1], who[0], False, reason=reason)


def _warm_up(job: dict[str, Any], units: list[Unit], count: int) -> None:
    """Run at most ``count`` processes, each with a share of the cases, to warm up; failures there are found when
    measured."""
    shares = [units[i::count] for i in range(count) if units[i::count]]
    workers = [_Worker({**job, "warm_up": share}) for share in shares]
    for worker in workers:
        try:
            worker.process.wait(timeout=180)
        except subprocess.TimeoutExpired:
            continue
        finally:
            worker.end()
