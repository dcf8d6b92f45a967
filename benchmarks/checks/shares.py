"""Random schedules of clients, weights and priorities: no inversion, and no wait beyond the bound.

    python benchmarks/checks/shares.py [--schedules 10000] [--minutes 4] [--seed 1] [--out FILE]

Each number is a schedule: 2 to 60 requests of four clients with different weights and priorities, which come at once,
one by one, or behind a backlog, to an engine on a virtual clock with 1 to 8 tokens a step and 1 or 2 places, under
``fcfs`` or ``priority``. The shipping scheduler runs each to its end. Checked are the order within each client, and,
with one place, the bound on the tokens that others get while a request waits, which docs/understand/policies.md states.
Writes benchmarks/results/cpu/shares.json after every piece, and continues where a file that is there has ended: run it
as often as it takes.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import _paths  # noqa: F401
from benchmarks import record

sys.path.append(str(record.ROOT / "tests" / "helpers"))
from share_schedules import WEIGHTS, Coming, Engine, check_order, check_waits

PIECE = 250
"""Schedules between two records."""


def schedule(chance: random.Random) -> list[Coming]:
    """Draw requests, in half of the schedules behind a backlog of one client."""
    clients = sorted(WEIGHTS)
    backlog = chance.randint(5, 25) if chance.random() < 0.5 else 0
    late = chance.choice((0, 10, 60))
    found = [Coming(0, chance.choice(clients), 6, 6, 0, 1)] * backlog
    for _ in range(chance.randint(2, 40)):
        step, client, priority = chance.randint(0, late), chance.choice(clients), chance.randint(-3, 3)
        prompt, outputs, n = chance.randint(1, 12), chance.randint(1, 12), chance.choice((1, 1, 1, 2))
        found.append(Coming(step, client, prompt, outputs, priority, n))
    return found


def run(number: int, seed: int) -> dict[str, Any]:
    """Run one schedule. Returns its requests and, if a check has failed, what it said."""
    chance = random.Random(f"{seed} {number}")
    policy, places = chance.choice(("fcfs", "priority")), chance.choice((1, 1, 2))
    coming = schedule(chance)
    if places == 1:
        coming = [Coming(each.step, each.client, each.prompt, each.outputs, each.priority, 1) for each in coming]
    engine = Engine(policy, places, max(places, chance.randint(1, 8)))
    try:
        engine.run(coming)
        if len(engine.admitted) != len(engine.states):
            raise AssertionError("a request never got its turn")
        check_order(engine)
        if places == 1:
            check_waits(engine)
    except AssertionError as error:
        return {"requests": len(coming), "failed": f"schedule {number}: {error}"}
    return {"requests": len(coming), "failed": ""}


def main() -> int:
    """Run schedules until there are as many as wanted, or time is up."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedules", type=int, default=10_000)
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=record.RESULTS / "cpu" / "shares.json")
    options = parser.parse_args()
    kept: dict[str, Any] = json.loads(options.out.read_text()) if options.out.is_file() else {}
    if kept.get("seed") != options.seed:
        kept = {"seed": options.seed, "schedules": 0, "requests": 0, "failures": []}
    end = time.monotonic() + 60 * options.minutes
    while kept["schedules"] < options.schedules and time.monotonic() < end:
        for number in range(kept["schedules"], min(kept["schedules"] + PIECE, options.schedules)):
            found = run(number, options.seed)
            kept["requests"] += found["requests"]
            kept["failures"] += [found["failed"]] if found["failed"] else []
            kept["schedules"] += 1
        kept["command"] = "python benchmarks/checks/shares.py"
        kept["environment"] = record.environment(())
        record.write(options.out, kept)
        print(
            f"{kept['schedules']} schedules, {kept['requests']} requests, {len(kept['failures'])} failures", flush=True
        )
    return int(bool(kept["failures"]))


if __name__ == "__main__":
    sys.exit(main())
