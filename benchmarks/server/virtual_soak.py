"""Latencies of ordinary users beside attackers: the shipping scheduler on a virtual clock. The server is ``soak.py``'s.

Four users ask short questions one after another. Attackers of another client join: crowds that leave after a second,
requests of 64 answers, long prompts, embeddings. A step takes the time that it takes two cores with a model of 135M
parameters (``tests/helpers/timed_device.py``). The users' times to the first token and between tokens are compared with
and without attackers, for several seeds. Nothing depends on the machine: these are the same numbers everywhere.

    python benchmarks/server/virtual_soak.py [--seconds 120] [--seeds 8] [--out FILE]

About a minute.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import structs

import _paths  # noqa: F401
from benchmarks import record
from transect.engine.scheduling.request import Request

sys.path.insert(0, str(record.ROOT / "tests" / "helpers"))
from small_engine import request
from timed_device import Processor, engine

USERS = 4
THINKING_S = 0.2
"""Seconds between an answer and the next question, and between two attacks of a kind."""
CROWD_LEAVES_S = 1.0


class Attack(NamedTuple):
    """Requests that come at the same time."""

    requests: int
    prompt: int
    """Tokens of each prompt, a few more or less."""
    max_tokens: int


ATTACKS = {
    "leave": Attack(50, 6, 500),
    "many": Attack(64, 5, 30),
    "long": Attack(1, 2200, 1),
    "embeddings": Attack(64, 25, 1),
}
LIMITS = {"num_blocks": 6000, "max_num_seqs": 64, "max_num_batched_tokens": 512, "max_model_len": 4000}


class Soak:
    """Users and attackers around one engine.

    Args:
        attacks: names of ``ATTACKS``.
        seconds: of virtual time.
        seed: of prompts and their lengths.
        lag: 1 plans steps ahead, as on a GPU.
    """

    def __init__(self, attacks: Sequence[str], seconds: float, seed: int, lag: int = 0) -> None:
        self.first: list[float] = []
        """Seconds to the first token of each question."""
        self.between: list[float] = []
        """Seconds between tokens of the users."""
        self._core = engine(lag, device=Processor, itl_target=0.0, **LIMITS)
        self._clock = self._core.executor.clock
        self._chance = random.Random(seed)
        self._numbers = 0
        self._due = {f"user-{number}": 0.3 * number for number in range(USERS)} | dict.fromkeys(attacks, 2.0)
        """Next question of each user, next attack of each kind; without those under way."""
        self._live: dict[str, set[str]] = {name: set() for name in self._due}
        self._told: dict[str, float] = {}
        """Time of the last news of each question: its arrival, then its newest token."""
        self._leaves = 0.0
        while self._clock.now() < seconds:
            self._arrive()
            if (early := self._core.time_to_plan()) > 0:
                self._clock.advance(early)
            elif self._core.has_work:
                self._step()
            else:
                self._clock.advance(max(1e-3, min(self._due.values()) - self._clock.now()))

    def _add(self, owner: str, client: str, prompt: int, max_tokens: int) -> None:
        self._numbers += 1
        name, first = f"{owner} {self._numbers}", self._chance.randrange(50)
        asked: Request = request(name, first=first, prompt=prompt, max_tokens=max_tokens)
        self._core.add(structs.replace(asked, client=client))
        self._live[owner].add(name)

    def _arrive(self) -> None:
        now = self._clock.now()
        for name, at in [(name, at) for name, at in self._due.items() if at <= now]:
            del self._due[name]
            if name not in ATTACKS:
                self._add(name, name, self._chance.randint(8, 14), 24)
                self._told[f"{name} {self._numbers}"] = at
                continue
            for number in range(ATTACKS[name].requests):
                self._add(name, "attacker", ATTACKS[name].prompt + number % 3, ATTACKS[name].max_tokens)
            self._leaves = now + CROWD_LEAVES_S if name == "leave" else self._leaves
        if self._live.get("leave") and self._leaves <= now:
            for name in self._live["leave"]:
                self._core.abort(name)
            self._live["leave"].clear()
            self._due["leave"] = now + THINKING_S

    def _step(self) -> None:
        outputs, now = self._core.step(), self._clock.now()
        for output in outputs:
            name, owner = output.request_id, output.request_id.split()[0]
            if owner not in ATTACKS and output.new_token_ids:
                (self.first if output.times and not output.finish_reason else self.between).append(
                    now - self._told[name]
                )
                self._told[name] = now
            if output.finish_reason and name in self._live[owner]:
                self._live[owner].remove(name)
                if not self._live[owner]:
                    self._due[owner] = now + THINKING_S


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Return p50 and p99."""
    ordered = sorted(values)
    return {"p50": ordered[len(ordered) // 2], "p99": ordered[len(ordered) * 99 // 100]}


def measure(seconds: float, seeds: int) -> dict[str, Any]:
    """Run users alone, beside each attack, and beside all, for each seed."""
    cases = {"none": [], **{name: [name] for name in ATTACKS}, "all": list(ATTACKS)}
    found: dict[str, dict[str, list[dict[str, float]]]] = {name: {"first": [], "between": []} for name in cases}
    for seed in range(1, seeds + 1):
        for name, attacks in cases.items():
            soak = Soak(attacks, seconds, seed)
            found[name]["first"].append(percentiles(soak.first))
            found[name]["between"].append(percentiles(soak.between))
    for part in ("first", "between"):
        quiet = [each["p99"] for each in found["none"][part]]
        for name in cases:
            for each, alone in zip(found[name][part], quiet, strict=True):
                each["p99_over_quiet"] = each["p99"] / alone
    return {
        name: {
            part: {key: record.summary([each[key] for each in runs]) for key in runs[0]} for part, runs in parts.items()
        }
        for name, parts in found.items()
    }


def table(result: dict[str, Any]) -> str:
    """Format the users' latencies beside each attack."""
    lines = ["| attackers | first token, p50 and p99 | over none | between tokens, p50 and p99 | over none |"]
    lines.append("|---|---|---|---|---|")
    for name, parts in result["cases"].items():
        cells = [name]
        for part in ("first", "between"):
            p50, p99, ratio = (parts[part][key] for key in ("p50", "p99", "p99_over_quiet"))
            cells.append(f"{1e3 * p50['median']:.0f} and {1e3 * p99['median']:.0f} ms")
            cells.append("" if name == "none" else f"{ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f})")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + (
        f"\n\n`{result['command']}`: {USERS} users for {result['seconds']:g} s of virtual time, medians and extremes "
        f"of {result['seeds']} seeds; p99 over that without attackers. {record.made_at([result['environment']])}.\n"
    )


def main() -> None:
    """Measure and record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--out", type=Path, default=record.RESULTS / "cpu" / "virtual_soak.json")
    options = parser.parse_args()
    result = {
        "command": record.command("benchmarks/server/virtual_soak.py"),
        "environment": record.environment(),
        "seconds": options.seconds,
        "seeds": options.seeds,
        "cases": measure(options.seconds, options.seeds),
    }
    record.write(options.out, result)
    print(table(result))


if __name__ == "__main__":
    main()
