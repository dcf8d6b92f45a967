"""From the moment a request is sent to its first token at the client: where the time goes, stage by stage.

The client's moments and the engine's decision log are on the same clock (the system's monotonic one), if both run on
one machine. A request's stages add up to its TTFT:

* ``late``: the generator sent it after it was due.
* ``to the engine``: HTTP, JSON, checks, tokens, the message to the engine process, and the wait until the loop there
  reads it: between two steps it reads all that has come.
* ``to a plan``: until a step is planned that computes a part of the prompt.
* ``to the device``: until that step begins there.
* ``prompt``: the steps of the prompt. ``steps`` is their number.
* ``to the client``: from the result of the last of them: the message back, text, an event, the socket.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import _paths  # noqa: F401
from transect.bench.load import Record
from transect.bench.summary import percentile
from transect.explain.engine.log import DecisionRunLog, Life

STAGES = ("late", "to the engine", "to a plan", "to the device", "prompt", "to the client")


def in_engine(log: DecisionRunLog, life: Life) -> dict[str, float] | None:
    """Return the stages of one request that the engine knows, in seconds; None if its prompt was not finished."""
    prompt = [log.steps[index] for index, row in life.steps if row[1] < life.added.prompt_tokens]
    if not prompt or prompt[-1].at is None:
        return None
    first = prompt[0]
    return {
        "to a plan": first.planned.began - life.added.at,
        "to the device": first.begins - first.planned.began,
        "prompt": prompt[-1].at - first.begins,
        "steps": float(len(prompt)),
    }


def matched(log: DecisionRunLog, records: Sequence[Record], began: float) -> list[tuple[Record, Life]]:
    """Match each request that got its answer with its entry in the log.

    They are matched by the length of their prompts, in the order in which they were sent.

    Args:
        began: of the records' clock, in seconds of the system's monotonic clock.
    """
    lives = [life for life in log.lives if life.added.at >= began]
    found = []
    for record in sorted(records, key=lambda each: each.sent):
        if record.error is not None:
            continue
        sent = began + record.sent
        mine = (
            index
            for index, life in enumerate(lives)
            if life.added.at >= sent and life.added.prompt_tokens == record.input_tokens
        )
        index = next(mine, None)
        if index is not None:
            found.append((record, lives.pop(index)))
    return found


def request_stages(log: DecisionRunLog, records: Sequence[Record], began: float) -> dict[str, Any]:
    """Compute the length of each stage over all requests: mean, p50 and p99 in seconds, and means of the slowest
    hundredth."""
    rows = []
    for record, life in matched(log, records, began):
        inside = in_engine(log, life)
        if inside is None:
            continue
        sent, shown = began + record.sent, began + record.moments[0]
        result = life.added.at + inside["to a plan"] + inside["to the device"] + inside["prompt"]
        rows.append(
            inside
            | {
                "late": record.sent - record.due,
                "to the engine": life.added.at - sent,
                "to the client": shown - result,
                "ttft": record.ttft,
            }
        )
    if not rows:
        return {}
    slowest = sorted(rows, key=lambda row: -row["ttft"])[: max(1, len(rows) // 100)]
    names = (*STAGES, "steps", "ttft")
    return {
        "requests": len(rows),
        **{name: _spread([row[name] for row in rows]) for name in names},
        "slowest": {name: sum(row[name] for row in slowest) / len(slowest) for name in names},
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"mean": sum(values) / len(values), "p50": percentile(values, 50), "p99": percentile(values, 99)}


def stages_line(stages: dict[str, Any]) -> str:
    """Format p50 and p99 of each stage, milliseconds."""
    parts = [f"{name} {stages[name]['p50'] * 1e3:.1f}/{stages[name]['p99'] * 1e3:.1f}" for name in STAGES]
    return ", ".join(parts) + f", {stages['steps']['p50']:.0f} steps"
