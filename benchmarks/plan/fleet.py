"""The 70B question: serve Llama-3.3-70B to 10,000 users. All figures are predicted; nothing here is measured.

    python benchmarks/plan/fleet.py [--users 10000] [--think 30] [--simulated 8] [--out ...]

Every card, layout and format is ranked by arithmetic; the cheapest of each card and some more are simulated, the
shipping scheduler on a virtual clock. Prices are examples, not quotations: ``--price`` gives others. A second question
is answered by arithmetic: 10,000 requests under way at the same moment, without any pause.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import _paths  # noqa: F401
from benchmarks import record
from transect.bench.lengths import Lengths
from transect.bench.traces.mix import Mix
from transect.costs.model import kv_bytes_per_token, weight_bytes
from transect.costs.presets import preset
from transect.plan.capacity import MixLoad, Shape
from transect.plan.choices import CardChoice, choices
from transect.plan.report import as_json
from transect.plan.serving import Demand, FleetPlan, plan_serving
from transect.plan.target import LatencyTarget
from transect.spec.shapes import PRESETS

MODEL = "llama-3.3-70b"
CARDS = ("h100-80gb", "h200", "b200", "mi300x")
TENSOR, FORMATS = (2, 4, 8), ("bf16", "fp8", "int4")
PROMPT, OUTPUT = "lognormal:1000,0.8,6000", "lognormal:250,0.6,1500"
TARGET = "ttft.p99=2s,itl.p99=50ms"
CONTEXT = 8192
PRICES = {"h100-80gb": 2.5, "h200": 3.5, "b200": 5.5, "mi300x": 3.0}
"""Dollars per hour of a card: examples."""


def memory(ways: list[tuple[CardChoice, str]]) -> list[dict[str, Any]]:
    """Compute the bytes of weights and of a token's KV, and the sequences of a mean request that a card's group
    holds."""
    found = []
    for choice, why in ways:
        model, storage = choice.model, choice.storage
        found.append({
            "choice": str(choice), "gpu": choice.card.name, "tp": choice.layout.tensor, "weights": choice.weights,
            "weight_bytes": weight_bytes(model, storage), "kv_bytes_per_token": kv_bytes_per_token(model, storage),
            "kv_tokens": 0 if why else choice.kv_tokens, "refused": why,
        })  # fmt: skip
    return found


def memory_table(result: dict[str, Any]) -> str:
    """Format the tokens of KV cache that an engine of each choice has."""
    rows = result["memory"]
    lines = [
        "| cards per engine | " + " | ".join(f"{card}, {form}" for card in CARDS for form in FORMATS) + " |",
        "|---" * (1 + len(CARDS) * len(FORMATS)) + "|",
    ]
    for size in TENSOR:
        cells = []
        for card in CARDS:
            for form in FORMATS:
                (row,) = [each for each in rows if (each["gpu"], each["tp"], each["weights"]) == (card, size, form)]
                cells.append(f"{row['kv_tokens'] / 1e3:,.0f}k" if row["kv_tokens"] else "does not fit")
        lines.append(f"| {size} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def table(result: dict[str, Any]) -> str:
    """Format the simulated choices."""
    lines = [
        "| choice | engines | cards | req/s | TTFT p50, p99 | ITL p50, p99 | E2E p50, p99 | KV used | $/h | $/M out | "
        "J/token | bound |",
        "|---" * 12 + "|",
    ]
    for each in result["plan"]["choices"]:
        level, cost = each["level"], each["cost"]
        pairs = [f"{_ms(level[name]['p50'])}, {_ms(level[name]['p99'])}" for name in ("ttft", "itl", "e2e")]
        lines.append(
            f"| {each['choice']} | {each['engines']} | {each['cards']} | {each['requests_per_second']:.0f} | "
            + " | ".join(pairs)
            + f" | {level['kv_usage']['max']:.0%} | {cost['dollars_per_hour']:.0f} | "
            f"{cost['dollars_per_million_output_tokens']:.2f} | {cost['joules_per_output_token']:.2f} | "
            f"{', '.join(each['missed_above'][:1])}: {each['bound_by']} |"
        )
    return "\n".join(lines) + "\n"


def arithmetic(result: dict[str, Any]) -> str:
    """Format the other choices, by arithmetic alone."""
    lines = ["| choice | engines | cards | req/s per engine | bound |", "|---|---|---|---|---|"]
    for each in result["plan"]["by_arithmetic"]:
        if each["rate"] < 1e-3:
            lines.append(f"| {each['choice']} | - | - | - | misses the target at any rate |")
            continue
        rate = f"{each['rate']:.2f}"
        lines.append(f"| {each['choice']} | {each['engines']} | {each['cards']} | {rate} | {each['bound']} |")
    lines += [f"| {each['choice']} | - | - | - | {each['why']} |" for each in result["plan"]["refused"]]
    return "\n".join(lines) + "\n"


def _ms(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1e3 * seconds:.0f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--users", type=int, default=10_000)
    parser.add_argument("--think", type=float, default=30.0)
    parser.add_argument("--simulated", type=int, default=2, help="choices of each card")
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--out", type=Path, default=record.RESULTS / "cpu" / "plan_fleet.json")
    options = parser.parse_args()
    mix = Mix(prompt=Lengths.parse(PROMPT), output=Lengths.parse(OUTPUT), longest=CONTEXT)
    load, target = MixLoad(mix, options.requests), LatencyTarget.parse(TARGET)
    demand = Demand(load=load, users=options.users, think=options.think)
    ways = list(
        choices(
            PRESETS[MODEL], [preset(card) for card in CARDS], tensor=TENSOR, weights=FORMATS, caches=("auto",),
            context=CONTEXT,
        )
    )  # fmt: skip
    whole: FleetPlan | None = None
    for card in CARDS:
        own = [way for way in ways if way[0].card.name == card]
        found = plan_serving(own, demand, target, prices=PRICES, simulated=options.simulated)
        for answer in found.answers:
            print(
                f"{answer.cards} x {card} as {answer.engines} of {answer.choice.how}: {found.cost(answer)}", flush=True
            )
        if whole is None:
            whole = found
            continue
        whole = dataclasses.replace(
            whole,
            answers=sorted([*whole.answers, *found.answers], key=lambda each: whole.cost(each)["dollars_per_hour"]),
            estimated=sorted([*whole.estimated, *found.estimated], key=lambda each: each.per_hour),
            refused=[*whole.refused, *found.refused],
        )  # fmt: skip
    assert whole is not None
    shape = Shape.of(load.at(1.0))
    settings = {"model": MODEL, "users": options.users, "think": options.think, "prompt": PROMPT, "output": OUTPUT}
    result = {
        "command": "python benchmarks/plan/fleet.py", "environment": record.environment(), "prices": PRICES,
        "shape": {"prompt": shape.prompt, "output": shape.output}, "memory": memory(ways),
        "plan": as_json(whole, settings),
    }  # fmt: skip
    record.write(options.out, result)
    print(table(result))


if __name__ == "__main__":
    main()
