"""Random schedules of clients, weights and priorities: no inversion, and no wait beyond the bound.

    python benchmarks/checks/shares.py [--schedules 10000] [--minutes 4] [--processes 2]

Each number is a schedule: 2 to 60 requests of four clients with different weights and priorities, which come at once,
one by one, or behind a backlog, to an engine on a virtual clock with 1 to 8 tokens a step and 1 or 2 places, under
``fcfs`` or ``priority``. The shipping scheduler runs each to its end. Checked are the order within each client, and,
with one place, the bound on the tokens that others get while a request waits, which docs/understand/policies.md states.
A schedule that fails ends the check, and is named. Writes benchmarks/results/cpu/shares.json after each piece, and
continues one of the same commit.
"""

from __future__ import annotations

import random
import sys
from collections import Counter

import _paths  # noqa: F401
from benchmarks import record
from benchmarks.checks._pieces import parser_of, run_pieces

sys.path.append(str(record.ROOT / "tests" / "helpers"))
from share_schedules import WEIGHTS, Coming, Engine, check_order, check_waits

SCHEDULES = 250
"""Schedules of a piece."""
SEED = 1


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


def run(number: int) -> int:
    """Run one schedule to its end. Returns its number of requests.

    Raises:
        AssertionError: a request came out of order, or waited beyond the bound.
    """
    chance = random.Random(f"{SEED} {number}")
    policy, places = chance.choice(("fcfs", "priority")), chance.choice((1, 1, 2))
    coming = schedule(chance)
    if places == 1:
        coming = [Coming(each.step, each.client, each.prompt, each.outputs, each.priority, 1) for each in coming]
    engine = Engine(policy, places, max(places, chance.randint(1, 8)))
    engine.run(coming)
    assert len(engine.admitted) == len(engine.states), f"schedule {number}: a request never got its turn"
    check_order(engine)
    if places == 1:
        check_waits(engine)
    return len(coming)


def piece(number: int) -> Counter[str]:
    """Run the ``SCHEDULES`` schedules of a piece. Returns numbers of schedules and requests."""
    numbers = range(number * SCHEDULES, (number + 1) * SCHEDULES)
    return Counter(schedules=SCHEDULES, requests=sum(run(each) for each in numbers))


def main() -> None:
    parser = parser_of(__doc__, record.RESULTS / "cpu" / "shares.json", 4.0)
    parser.add_argument("--schedules", type=int, default=10_000)
    options = parser.parse_args()
    wanted = {"schedules": options.schedules, "requests": 0}
    run_pieces(piece, wanted, options)


if __name__ == "__main__":
    main()
