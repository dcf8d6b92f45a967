"""Long prompts among short ones: what those who send short ones feel of them.

A prompt of ``LONG`` tokens comes every ``EVERY_S`` seconds among the requests of a level. The level's figures are those
of the others; when the long ones begin to be answered stands beside them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import _paths  # noqa: F401
from transect.bench.levels import Level, Result
from transect.bench.load import Run
from transect.bench.summary import distribution, summarize
from transect.bench.workload import Work

LONG, EVERY_S, ANSWER = 12_000, 1.0, 150


def with_long(level: Level, seed: int, word: Sequence[str]) -> Level:
    """Return the level with long prompts among its own.

    Args:
        word: texts of one token each.
    """
    rng = random.Random(f"long {seed}")
    count = int(max(each.at for each in level.work) / EVERY_S)
    long = [Work("".join(rng.choices(word, k=LONG)), ANSWER, EVERY_S * (1 + index)) for index in range(count)]
    return replace(level, work=sorted([*level.work, *long], key=lambda each: each.at))


def of_short(result: Result) -> Result:
    """Return the same with the figures of all but the long prompts, and with ``long_ttft``, theirs."""
    short = [each for each in result.records if each.error is not None or each.input_tokens < LONG]
    long = [each for each in result.records if each.error is None and each.input_tokens >= LONG]
    run = Run(short, result.summary["seconds"], result.summary["generator"]["cpu"], result.began)
    summary = summarize(run) | {"long_ttft": distribution([each.ttft for each in long])}
    return replace(result, summary=summary, records=short)
