"""Three autoscaling policies over a day's load, predicted by the shipping scheduler and router on a virtual clock.

    python benchmarks/plan/scaling.py [--hours 2.5] [--peak 8] [--out ...]

The day is generated: a night, a steep morning, a peak at noon, a dip, an evening, with bursts (gamma) and a spike of
twice the rate for five minutes. ``--hours`` compresses it. Each policy begins with one engine, looks every 15 s, and an
engine takes 120 s to start. A fixed number, enough for the peak, stands beside them.
"""

from __future__ import annotations

import argparse
import math
import time
from itertools import islice
from pathlib import Path
from typing import Any

import _paths  # noqa: F401
from benchmarks import record
from transect.bench.lengths import Lengths
from transect.bench.traces.asked import Asked, warped
from transect.bench.traces.mix import Mix
from transect.costs.presets import preset
from transect.engine.scheduling.policies.scaling import Backlog, Concurrency, Fixed, Forecast, Queue, Scaler
from transect.plan.capacity import MixLoad, highest_rate, summary_of
from transect.plan.choices import CardChoice
from transect.plan.fleet import Fleet
from transect.plan.target import LatencyTarget
from transect.spec.layouts.ranks import RankLayout
from transect.spec.shapes import PRESETS

MODEL, CARD = "llama-3.1-8b", "l4"
MIX = Mix(prompt=Lengths.parse("uniform:100-900"), output=Lengths.parse("uniform:50-250"), burstiness=2.0)
TARGET = "ttft.p99=5s,itl.p99=200ms"
SPAN = 60.0
START_S, LOOK_S, PATIENCE_S = 120.0, 15.0, 600.0


def day(hours: float, peak: float) -> list[Asked]:
    """Generate the requests of a day that lasts ``hours``."""
    spans = int(hours * 3600 / SPAN)
    rates = []
    for number in range(spans):
        hour = 24 * number / spans
        noon = math.exp(-(((hour - 12.5) / 3.0) ** 2))
        evening = 0.7 * math.exp(-(((hour - 19.5) / 2.0) ** 2))
        rates.append(peak * (0.1 + 0.9 * max(noon, evening)))
    spike = int(spans * 15.5 / 24)
    for number in range(spike, min(spans, spike + int(300 / SPAN))):
        rates[number] *= 2
    count = int(sum(rates) * SPAN * 1.2) + 100
    return list(warped(islice(MIX.generate(1.0, count, seed=7), count), rates, SPAN))


def table(result: dict[str, Any]) -> str:
    """Format one line for each policy."""
    lines = [
        "| policy | engine hours | most engines | TTFT p50 | p99 | ITL p99 | requests with TTFT within 5 s |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in result["policies"]:
        lines.append(
            f"| {row['policy']} | {row['engine_hours']:.1f} | {row['most']} | {row['ttft']['p50']:.2f} s | "
            f"{row['ttft']['p99']:.1f} s | {1e3 * row['itl']['p99']:.0f} ms | {row['within']:.1%} |"
        )
    machine = result["environment"]
    lines.append(
        f"\n{result['requests']:,} requests in {result['hours']:g} hours, {MODEL} on {CARD}s, {START_S:g} s to start "
        f"an engine; predicted. `{result['command']}`, {record.made_at([machine])}.\n"
    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=2.5)
    parser.add_argument("--peak", type=float, default=8.0, help="requests per second at noon")
    parser.add_argument("--out", type=Path, default=record.RESULTS / "cpu" / "plan_scaling.json")
    options = parser.parse_args()
    model = CardChoice(PRESETS[MODEL], preset(CARD), RankLayout(), "bf16", "auto", 2048).engine
    best, _ = highest_rate(model, MixLoad(MIX, 300), LatencyTarget.parse(TARGET), 1.0)
    assert best is not None, "the target is missed at any rate"
    enough = math.ceil(options.peak / best.rate)
    asked = day(options.hours, options.peak)
    print(f"one engine: {best.rate:.2f} requests/s; {len(asked)} requests", flush=True)
    each = best.summary["concurrency"]
    policies = {
        f"fixed, {enough}": Scaler(Fixed(enough), enough, enough),
        f"concurrency, {0.7 * each:.0f} per engine": Scaler(Concurrency(0.7 * each), 1, 16, PATIENCE_S),
        "backlog, 5 s of tokens": Scaler(Backlog(5.0), 1, 16, PATIENCE_S),
        "queue": Scaler(Queue(long=0.5, idle=0.15), 1, 16, PATIENCE_S),
        f"forecast, {best.rate:.2f} requests/s per engine": Scaler(
            Forecast(capacity=best.rate, ahead=START_S + LOOK_S), 1, 16, PATIENCE_S
        ),
    }
    rows = []
    for name, scaler in policies.items():
        began = time.process_time()
        first = scaler.policy.engines if isinstance(scaler.policy, Fixed) else 1
        run = Fleet(model, first, scaler=scaler, interval=LOOK_S, start_s=START_S).run(asked)
        summary = summary_of(run)
        within = sum(record_.ttft <= 5.0 for record_ in run.records) / len(run.records)
        rows.append({
            "policy": name, "engine_hours": run.engine_seconds / 3600, "most": max(size for _, size in run.sizes),
            "within": within, **{figure: summary[figure] for figure in ("ttft", "itl", "e2e")}, "sizes": run.sizes,
            "processor_s": time.process_time() - began,
        })  # fmt: skip
        print({key: value for key, value in rows[-1].items() if key != "sizes"}, flush=True)
    result = {
        "command": "python benchmarks/plan/scaling.py", "environment": record.environment(), "hours": options.hours,
        "peak": options.peak, "requests": len(asked), "capacity": best.rate, "policies": rows,
    }  # fmt: skip
    record.write(options.out, result)
    print(table(result))


if __name__ == "__main__":
    main()
