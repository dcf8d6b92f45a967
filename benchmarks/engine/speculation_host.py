"""Measure the host's time of a step while drafts rest, beside an engine without speculation: no device is needed.

    python benchmarks/engine/speculation_host.py [--rows 1 4 16 64 256] [--rounds 9]

The shipping scheduler and engine loop plan steps for a device on a virtual clock. A head is right too seldom to pay
there, so nearly all steps rest. The seconds are those of the process, a step's share of planning, learning and
committing. Contenders take turns within each round.
"""

from __future__ import annotations

import argparse
import gc
import time
from itertools import repeat
from pathlib import Path
from typing import Any

import _paths  # noqa: F401
from benchmarks import record
from transect.engine.scheduling.request import Request
from transect.engine.scheduling.sampling_params import SamplingParams
from transect.engine.scheduling.scheduler_config import SchedulerConfig
from transect.engine.scheduling.simulation import SimulatedEngine

DEVICE, HEAD = 1e-3, 5e-4
"""Seconds of a step of the device and of a head's: about those of a model of 135M parameters on an H200."""
ACCEPTANCE, TOKENS = 0.2, 128


def engine(rows: int, speculation: dict[str, Any] | None) -> SimulatedEngine:
    """Build an engine for ``rows`` sequences."""
    config = SchedulerConfig(
        num_blocks=64 * rows, max_num_seqs=4 * rows, max_model_len=512, seed=1, speculation=speculation
    )
    rests = {"acceptance": ACCEPTANCE, "drafter": lambda load: HEAD} if speculation else {}
    found = SimulatedEngine(config, lambda batch: DEVICE, lag=1, **rests)
    found._looks_ahead = True  # outputs are read alike
    return found


def seconds_of_a_step(simulated: SimulatedEngine, rows: int, turn: int) -> float:
    """Decode ``rows`` sequences to their ends. Returns the host's seconds of a step."""
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    for number in range(rows):
        simulated.add(Request(f"{turn}-{number}", (number + 1,) * 24, params), [repeat(5)])
    began, steps = time.process_time(), simulated.device.steps
    simulated.run()
    return (time.process_time() - began) / (simulated.device.steps - steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64, 256])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, default=record.RESULTS / "cpu" / "speculation_host.json")
    options = parser.parse_args()
    found: dict[str, Any] = {"device_seconds": DEVICE, "cells": {}, "environment": record.environment()}
    found["command"] = record.command("benchmarks/engine/speculation_host.py")
    gc.disable()
    for rows in options.rows:
        engines = {"off": engine(rows, None), "resting": engine(rows, {"method": "eagle3", "model": "head"})}
        seconds: dict[str, list[float]] = {name: [] for name in engines}
        for turn in range(options.rounds + 1):
            for name, each in engines.items():
                took = seconds_of_a_step(each, rows, turn)
                if turn:  # the first round probes
                    seconds[name].append(took)
        found["cells"][str(rows)] = {name: record.summary(times) for name, times in seconds.items()}
        print(
            rows,
            {name: f"{1e6 * record.summary(times)['median']:.0f} us" for name, times in seconds.items()},
            flush=True,
        )
        record.write(options.out, found)


def host_table(result: dict[str, Any]) -> str:
    """Format the host's time of a step, by sequences."""
    lines = ["| sequences | off | resting | more, of a step of 1 ms |", "|---" * 4 + "|"]
    for rows, cell in result["cells"].items():
        off, rests = (cell[name]["median"] for name in ("off", "resting"))
        lines.append(
            f"| {rows} | {1e6 * off:.0f} us | {1e6 * rests:.0f} us | {(rests - off) / result['device_seconds']:.1%} |"
        )
    machine = result["environment"]
    where = f"{machine['cores']} cores of an {machine['processor']}, Python {machine['python']}"
    return "\n".join(lines) + f"\n\n`{result['command']}` on {where}, {record.made_at([machine])}.\n"


if __name__ == "__main__":
    main()
