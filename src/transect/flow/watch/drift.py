"""Compare windows of captured requests with a reference: training data, or captures of a good time.

| test | compares | alarm |
|---|---|---|
| ``prompt_vectors``, ``answer_vectors`` | embeddings, by their maximum mean discrepancy | PromptDrift, AnswerDrift |
| ``prompt_lengths`` | characters, by the Kolmogorov-Smirnov distance | PromptLengthDrift |
| ``answer_lengths`` | the same, of answers | AnswerLengthDrift |
| ``refusals`` | rates of answers that refuse, by Fisher's exact test | RefusalDrift |
| ``schema_failures`` | rate of answers without their form, against a limit | SchemaFailures |
| ``judge`` | scores of a judge on a sample, by their means | JudgeScoreDrop |

All p-values are exact or conservative. Each of the m tests that are switched on alarms at ``false_alarms / m``, so a
window without drift raises any alarm with a probability of at most ``false_alarms`` (Bonferroni). Windows do not
overlap, and hold one observation of each user and conversation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from .records import Observation
from .refusals import is_refusal
from .report import DriftReport, DriftTest
from .two_sample import (
    TestResult,
    excess_test,
    lower_mean_statistic,
    ordered_statistic,
    permutation_test,
    rates_test,
    vector_statistic,
)

Embed = Callable[[Sequence[str]], np.ndarray]
"""Returns vectors ``[N, D]`` of texts."""
Judge = Callable[[Sequence[Observation]], list[float | None]]
"""Returns scores of answers, None where the judge gave none."""

LEAST = 16
"""Observations below which a sample is not tested."""


@dataclass(frozen=True, slots=True)
class DriftSettings:
    """Settings of a watch.

    Attributes:
        window: observations in a window.
        false_alarms: probability of an alarm in a window without drift, over all tests.
        schema_failures: rate of answers without their form that is accepted.
        judged: observations of a window that the judge sees.
        seed: of permutations and samples.

    Raises:
        ValueError: a value is out of its range.
    """

    window: int = 256
    false_alarms: float = 1e-3
    schema_failures: float = 0.01
    judged: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        if self.window < LEAST or self.judged < LEAST:
            raise ValueError(f"window and judged must be at least {LEAST}, got {self.window} and {self.judged}")
        for name in ("false_alarms", "schema_failures"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"{name} must be between 0 and 1, got {getattr(self, name)}")


@dataclass(slots=True)
class Baseline:
    """Observations to compare with, with their vectors and scores. ``answered``: those that have an answer."""

    prompts: list[str]
    answers: list[str]
    prompt_vectors: np.ndarray | None = None
    answer_vectors: np.ndarray | None = None
    scores: list[float] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        found: Sequence[Observation],
        settings: DriftSettings,
        embed: Embed | None = None,
        judge: Judge | None = None,
        most: int = 512,
    ) -> Baseline:
        """Build a baseline from a sample of ``most`` observations.

        Raises:
            ValueError: there are too few.
        """
        if len(found) < LEAST:
            raise ValueError(f"the reference holds {len(found)} examples: give at least {LEAST}")
        draw = np.random.default_rng(settings.seed)
        chosen = [found[i] for i in draw.permutation(len(found))[:most]]
        prompts = [each.prompt for each in chosen if each.prompt]
        answers = [each.answer for each in chosen if each.answer]
        baseline = cls(prompts, answers)
        if embed is not None:
            baseline.prompt_vectors = embed(prompts) if len(prompts) >= LEAST else None
            baseline.answer_vectors = embed(answers) if len(answers) >= LEAST else None
        if judge is not None:
            pairs = [each for each in chosen if each.prompt and each.answer][: settings.judged]
            baseline.scores = [score for score in judge(pairs) if score is not None]
        return baseline


def check_window(
    baseline: Baseline,
    window: Sequence[Observation],
    settings: DriftSettings,
    embed: Embed | None = None,
    judge: Judge | None = None,
    number: int = 0,
) -> DriftReport:
    """Test a window against the baseline.

    Args:
        number: of the window; gives each window its own permutations.

    Raises:
        ValueError: the window is too small.
    """
    if len(window) < LEAST:
        raise ValueError(f"the window holds {len(window)} requests: wait until there are at least {LEAST}")
    switched_on = 4 + 2 * (embed is not None) + (judge is not None)
    level = settings.false_alarms / switched_on
    draw = np.random.default_rng((settings.seed, number))
    most = math.ceil(2 / level)
    tests: list[DriftTest] = []

    def add(name: str, result: TestResult, reference: float, value: float) -> None:
        alarm = result.p <= level
        tests.append(DriftTest(name, result.statistic, result.p, level, alarm, reference, value))

    for kind, before, now, vectors in (
        ("prompt", baseline.prompts, [each.prompt for each in window if each.prompt], baseline.prompt_vectors),
        ("answer", baseline.answers, [each.answer for each in window if each.answer], baseline.answer_vectors),
    ):
        if len(before) < LEAST or len(now) < LEAST:
            continue
        sizes = [float(len(text)) for text in (*now, *before)]
        means = float(np.mean(sizes[len(now) :])), float(np.mean(sizes[: len(now)]))
        lengths = permutation_test(ordered_statistic(sizes), len(now), len(before), most, draw)
        add(f"{kind}_lengths", lengths, *means)
        if embed is not None and vectors is not None:
            statistic = vector_statistic(np.concatenate([embed(now), vectors]))
            add(f"{kind}_vectors", permutation_test(statistic, len(now), len(before), most, draw), 0.0, 0.0)
    answers = [each.answer for each in window if each.answer]
    if len(baseline.answers) >= LEAST and answers:
        counts = sum(map(is_refusal, answers)), sum(map(is_refusal, baseline.answers))
        rates = rates_test(counts[0], len(answers), counts[1], len(baseline.answers))
        add("refusals", rates, counts[1] / len(baseline.answers), counts[0] / len(answers))
    formed = [each for each in window if each.form]
    if formed:
        failed = excess_test(sum(not each.valid for each in formed), len(formed), settings.schema_failures)
        add("schema_failures", failed, settings.schema_failures, failed.statistic)
    if judge is not None and len(baseline.scores) >= LEAST:
        pairs = [each for each in window if each.prompt and each.answer]
        chosen = [pairs[i] for i in draw.permutation(len(pairs))[: settings.judged]]
        scores = [score for score in judge(chosen) if score is not None]
        if len(scores) >= LEAST:
            statistic = lower_mean_statistic([*scores, *baseline.scores])
            result = permutation_test(statistic, len(scores), len(baseline.scores), most, draw)
            add("judge", result, float(np.mean(baseline.scores)), float(np.mean(scores)))
    times = [each.time for each in window]
    return DriftReport(min(times), max(times), len(window), settings.false_alarms, tests)
