"""The share of prompts that a model refuses, or answers, as it should."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..watch.refusals import is_refusal
from .answering import read_questions
from .measure import GateMeasure, GateVerdict, Samples, TestedModel
from .rates import RateBars, describe_rate, judge_rate


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusalBars(RateBars):
    """Prompts of the gate that are to be refused, or not.

    Attributes:
        file: rows with a question. They are left out of the training data.
        expect: the right reaction to them: ``answer`` or ``refuse``.
        max_tokens: length of an answer at the most.
    """

    file: str
    expect: Literal["answer", "refuse"] = "answer"
    max_tokens: int = 48


def _take(candidate: TestedModel, current: TestedModel, settings: RefusalBars, path: Callable[[str], Path]) -> Samples:
    prompts = [messages for messages, _ in read_questions(path(settings.file))]
    samples: Samples = {}
    for name, model in (("candidate", candidate), ("current", current)):
        answers = model.answer(prompts, settings.max_tokens)
        samples[name] = [int(is_refusal(text) == (settings.expect == "refuse")) for text in answers]
        samples[f"{name} answers"] = list(answers)
    return samples


def _judge(samples: Samples, settings: RefusalBars, confidence: float) -> GateVerdict:
    return judge_rate(samples, settings, confidence, "refused" if settings.expect == "refuse" else "not refused")


REFUSALS = GateMeasure(
    name="refusals",
    settings=RefusalBars,
    take=_take,
    judge=_judge,
    describe=describe_rate,
    files=lambda settings: (settings.file,),
)
