"""Tokens per second beside the current model, in rounds that alternate between the two if they share a base."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from ...bench.intervals import FEWEST, mean_difference
from .measure import GateMeasure, GateVerdict, Samples, TestedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedBars:
    """The speed of the gate.

    Attributes:
        slower: largest loss of tokens per second, as a share of the current model's; the lower end of the interval
            counts.
        rounds: measured rounds of each model, after one that warms up.
        prompt_tokens, new_tokens: lengths of random prompts and of answers.
        batch: sequences at a time.
    """

    slower: float = 0.2
    rounds: int = 7
    prompt_tokens: int = 64
    new_tokens: int = 32
    batch: int = 2

    def __post_init__(self) -> None:
        if not 0 < self.slower < 1:
            raise ValueError(f"slower is a share, more than 0 and less than 1, not {self.slower}")
        if self.rounds < FEWEST:
            raise ValueError(f"rounds must be at least {FEWEST} for an interval, not {self.rounds}")
        for name in ("prompt_tokens", "new_tokens", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")


def _take(candidate: TestedModel, current: TestedModel, settings: SpeedBars, path: Callable[[str], Path]) -> Samples:
    samples: Samples = {"candidate": [], "current": []}
    models = {"candidate": candidate, "current": current}
    rounds = [(number, name) for number in range(settings.rounds + 1) for name in models]
    if candidate.base != current.base:  # one engine after the other
        rounds.sort(key=lambda each: each[1])
    for number, name in rounds:
        lengths = settings.prompt_tokens, settings.new_tokens, settings.batch
        seconds = models[name].generate_seconds(*lengths, number)
        if number:
            samples[name].append(settings.batch * settings.new_tokens / seconds)
    return samples


def _judge(samples: Samples, settings: SpeedBars, confidence: float) -> GateVerdict:
    logs = [[math.log(rate) for rate in samples[name]] for name in ("candidate", "current")]
    low, high = (math.expm1(bound) for bound in mean_difference(logs[0], logs[1], confidence))
    mine, now = fmean(samples["candidate"]), fmean(samples["current"])
    text = f"{mine:.1f} tokens/s, current {now:.1f}, change {low:+.0%} to {high:+.0%}"
    failed = low < -settings.slower
    if failed:
        text += f"; a loss of {-low:.0%} cannot be excluded, and {settings.slower:.0%} is allowed"
    return GateVerdict(not failed, text, mine, now, (low, high))


SPEED = GateMeasure(
    name="speed",
    settings=SpeedBars,
    take=_take,
    judge=_judge,
    describe=lambda bars: f"at most {bars.slower:.0%} slower",
)
