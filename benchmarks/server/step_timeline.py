"""Where time between two steps of a server goes, and which part of it made tokens late: read from a decision log.

    python benchmarks/server/step_timeline.py LOG [--from SECONDS] [--to SECONDS]

With steps planned ahead the engine's loop does, for each step n: ``take`` (messages, the wait until the device soon
wants a step), ``plan`` step n + 1, ``launch`` it (its numbers, its graph or its kernels one by one; a capture or a
compilation is in here), ``device`` (the wait for step n), ``commit`` its tokens. The parts of a gap between two results
add up to it. A gap counts as often as sequences decoded in step n, so that percentiles are those of their tokens.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import _paths  # noqa: F401
from transect.bench.summary import percentile
from transect.costs.learning import StepTimes
from transect.costs.steps import StepLoad
from transect.engine.executors.gpu.step_sizes import row_bucket, token_bucket
from transect.engine.scheduling.decisions import Done, Planned
from transect.explain.engine.log import DecisionRunLog, StepRow, last_rows_on, load, rows_of

PARTS = ("commit", "take", "plan", "launch", "device")
LONGEST = 16
SEEN_S = 5e-5
"""A step that was waited for this long was seen to end."""
KINDS = (0, 1, 64, 128, 256, 512, 1024, 1 << 20)
"""Prompt tokens of a step: bounds of the kinds in the table."""


@dataclass(slots=True)
class Gap:
    """From the result of one step to that of the next, in seconds."""

    step: int
    at: float
    seconds: float
    parts: dict[str, float]
    tokens: int
    """Tokens of the step whose result ends the gap."""
    prompt_tokens: int
    decodes: int
    launched: tuple[int, int]
    """Tokens and prompt tokens of the step that was launched meanwhile."""
    predicted: float
    """Predicted time of the step, from the steps before it; 0 if there was no prediction."""
    learned: float
    """Measured time of the step."""
    keys: int
    pairs: int
    """See ``StepLoad``."""

    @property
    def cause(self) -> str:
        """The part that took longest."""
        return max(self.parts, key=lambda name: self.parts[name])


def load_of(rows: Sequence[StepRow]) -> StepLoad:
    """Return the work of a step."""
    return StepLoad.of((start, new) for _, start, new in rows)


def gaps(log: DecisionRunLog) -> Iterator[Gap]:
    """Yield all gaps of a log, in their order; only those between steps that share a sequence."""
    times = StepTimes()
    work: dict[int, list[StepRow]] = {}
    rows: list[StepRow] | None = []
    before: Done | None = None
    last: set[int] = set()
    planned: Planned | None = None
    for event in log.events:
        if isinstance(event, Planned):
            planned = event
            if event.step:
                rows = last_rows_on(rows) if event.rows is None else rows_of(event.rows)
                work[event.step] = rows or []
        elif isinstance(event, Done) and event.step:
            mine = work.pop(event.step, [])
            size = load_of(mine)
            predicted = times.predict(size) if times.steps else 0.0
            if event.learned:
                times.learn(size, event.learned)
            went_on = any(row[0] in last for row in mine)
            if before is not None and planned is not None and went_on and planned.began >= before.committed:
                ahead = work.get(planned.step, []) if planned.step else []
                prompt = sum(new for _, _, new in ahead if new > 1)
                yield Gap(
                    event.step,
                    event.at,
                    event.at - before.at,
                    {
                        "commit": before.committed - before.at,
                        "take": planned.began - before.committed,
                        "plan": planned.at - planned.began,
                        "launch": event.waited - planned.at,
                        "device": event.at - event.waited,
                    },
                    size.tokens,
                    sum(new for _, _, new in mine if new > 1),
                    sum(new == 1 for _, _, new in mine),
                    (sum(new for _, _, new in ahead), prompt),
                    predicted,
                    event.learned,
                    size.keys,
                    size.pairs,
                )
            before, planned = event, None
            last = {row[0] for row in mine}


def timeline(log: DecisionRunLog, begin: float = -math.inf, end: float = math.inf) -> dict[str, Any]:
    """Summarize the time from ``begin`` to ``end`` (seconds of the system's monotonic clock, which is the engine's).

    Returns:
        ``causes``: of the gaps from the 99th percentile on, the share that each part took; ``longest`` gaps;
        ``kinds`` of steps with medians; what steps of each of the sizes that they are padded to took; seconds.
    """
    found = [gap for gap in gaps(log) if begin <= gap.at <= end]
    felt = [gap for gap in found if gap.decodes]
    if not felt:
        return {}
    each = [gap.seconds for gap in felt for _ in range(gap.decodes)]
    bound = percentile(each, 99)
    tail = [gap for gap in felt if gap.seconds >= bound]
    total = sum(gap.seconds * gap.decodes for gap in tail)
    shares = {part: sum(gap.parts[part] * gap.decodes for gap in tail) / total for part in PARTS}
    by_cause: dict[str, int] = defaultdict(int)
    for gap in tail:
        by_cause[gap.cause] += 1
    longest = sorted(found, key=lambda gap: -gap.seconds)[:LONGEST]
    return {
        "gaps": len(found),
        "p50": percentile(each, 50),
        "p99": bound,
        "causes": {"shares": shares, "gaps": dict(by_cause)},
        "longest": [asdict(gap) | {"cause": gap.cause} for gap in longest],
        "kinds": [row for low, high in pairwise(KINDS) for row in kind(found, low, high)],
        "sizes": list(sizes(found)),
    }


def sizes(found: Sequence[Gap]) -> Iterator[dict[str, Any]]:
    """Yield steps with prompts (``mixed``) and without, by the tokens that they are padded to: the number measured, and
    medians of their times, of their rows that decode, and of their ``keys`` and ``pairs``."""
    kinds: dict[tuple[bool, int], list[Gap]] = defaultdict(list)
    for gap in found:
        if gap.learned and gap.parts["device"] > SEEN_S:
            mixed = gap.prompt_tokens > 0
            kinds[mixed, token_bucket(gap.tokens) if mixed else row_bucket(gap.tokens, fine=True)].append(gap)
    for (mixed, tokens), mine in sorted(kinds.items()):
        medians = {name: median(getattr(gap, name) for gap in mine) for name in ("learned", "decodes", "keys", "pairs")}
        yield {"mixed": mixed, "tokens": tokens, "steps": len(mine)} | medians


def kind(found: Sequence[Gap], low: int, high: int) -> Iterator[dict[str, Any]]:
    """Yield steps with ``low`` to ``high`` - 1 prompt tokens: their number, medians and p99 of their parts and
    predictions."""
    mine = [gap for gap in found if low <= gap.prompt_tokens < high]
    if not mine:
        return
    measured = [gap for gap in mine if gap.learned and gap.predicted]
    launching = [gap for gap in found if low <= gap.launched[1] < high and gap.launched[0]]
    yield {
        "prompt_tokens": [low, high - 1],
        "steps": len(mine),
        "seconds": {f"p{share}": percentile([gap.seconds for gap in mine], share) for share in (50, 99)},
        "launch": {
            f"p{share}": percentile([gap.parts["launch"] for gap in launching], share)
            for share in (50, 99)
            if launching
        },
        "predicted": sum(gap.predicted for gap in measured),
        "measured": sum(gap.learned for gap in measured),
        "error_p50": percentile([abs(gap.predicted / gap.learned - 1) for gap in measured], 50) if measured else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", type=Path)
    parser.add_argument("--from", dest="begin", type=float, default=-math.inf)
    parser.add_argument("--to", dest="end", type=float, default=math.inf)
    options = parser.parse_args()
    print(json.dumps(timeline(load(options.log), options.begin, options.end), indent=1))


if __name__ == "__main__":
    main()
