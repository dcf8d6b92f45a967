"""Turns the records of a run into a report: percentiles, rates, goodput, errors by kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from .energy import Energy
from .load import Run
from .objectives import Objectives

PERCENTILES = (50, 90, 95, 99)
LATE_S = 0.01
BUSY = 0.9


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest of the values that ``share`` percent of them do not exceed.

    Raises:
        ValueError: there are no values.
    """
    if not values:
        raise ValueError("there are no values to take a percentile of")
    return sorted(values)[_rank(len(values), share)]


def distribution(values: Sequence[float]) -> dict[str, float] | None:
    """Return the mean, the ``PERCENTILES`` and the largest; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    return {
        "mean": sum(ordered) / len(ordered),
        **{f"p{share}": ordered[_rank(len(ordered), share)] for share in PERCENTILES},
        "max": ordered[-1],
    }


def _rank(count: int, share: float) -> int:
    return max(0, -int(-count * share // 100) - 1)


def summarize(run: Run, objectives: Objectives | None = None, energy: Energy | None = None) -> dict[str, Any]:
    """Summarize one level of load as a JSON object; times in seconds, rates per second.

    Rates are over the time from the first request's due moment to the end of the last answer. Latencies count requests
    that succeeded; failed ones count in ``errors``, and against goodput.
    """
    good = [record for record in run.records if record.error is None]
    begin = min((record.due for record in run.records), default=0.0)
    seconds = max((record.ended for record in run.records), default=0.0) - begin
    tokens_in, tokens_out = sum(r.input_tokens for r in good), sum(r.output_tokens for r in good)
    result: dict[str, Any] = {
        "requests": len(run.records),
        "succeeded": len(good),
        "errors": dict(Counter(record.error for record in run.records if record.error is not None)),
        "error_examples": {record.error: record.detail for record in run.records if record.error is not None},
        "seconds": seconds,
        "requests_per_second": len(good) / seconds,
        "input_tokens": tokens_in,
        "output_tokens": tokens_out,
        "input_tokens_per_second": tokens_in / seconds,
        "output_tokens_per_second": tokens_out / seconds,
        "tokens_per_event": tokens_out / max(1, sum(len(record.moments) for record in good)),
        "concurrency": sum(record.ended - record.sent for record in run.records) / seconds,
        "ttft": distribution([record.ttft for record in good]),
        "itl": distribution([gap for record in good for gap in record.gaps]),
        "tpot": distribution([tpot for record in good if (tpot := record.tpot) is not None]),
        "e2e": distribution([record.latency for record in good]),
        "generator": {
            "lag": distribution([record.sent - record.due for record in run.records]),
            "cpu": run.generator_cpu,
        },
    }
    if objectives is not None:
        met = sum(objectives.met_by(record) for record in run.records)
        result["goodput"] = {
            "objectives": str(objectives),
            "requests_per_second": met / seconds,
            "share": met / len(run.records),
        }
    if energy is not None:
        result["energy"] = energy.per_token(tokens_in, tokens_out)
    return result


def warnings(level: dict[str, Any]) -> list[str]:
    """List reasons to doubt the figures of a level, one sentence each."""
    found = []
    lag, cpu = level["generator"]["lag"], level["generator"]["cpu"]
    if lag is not None and lag["p99"] > LATE_S:
        found.append(f"the generator sent requests late (p99 {lag['p99'] * 1e3:.0f} ms): give it a core of its own")
    if cpu > BUSY:
        found.append(f"the generator used {cpu:.0%} of a core: its own speed may be what was measured")
    if level["tokens_per_event"] > 1.05:
        found.append(
            f"the server sends {level['tokens_per_event']:.2f} tokens an event: ITL is between events, TPOT per token"
        )
    for kind, count in level["errors"].items():
        found.append(f"{count} requests failed: {kind} ({level['error_examples'][kind]})")
    return found
