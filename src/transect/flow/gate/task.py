"""The share of questions that a model answers right, by an exact checker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .answering import checker_of, program_of, read_questions, verdict_of
from .measure import GateMeasure, GateVerdict, Samples, TestedModel
from .rates import RateBars, describe_rate, judge_rate


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskBars(RateBars):
    """A task of the gate.

    Attributes:
        file: rows with a question (``prompt`` or ``question``) and its ``answer``. They are left out of the training
            data.
        check: ``exact``, ``contains``, ``number`` (the first number of the answer) or ``FILE.py:FUNCTION``, called with
            the answer and the row.
        max_tokens: length of an answer at the most.
    """

    file: str
    check: str = "exact"
    max_tokens: int = 64


def _take(candidate: TestedModel, current: TestedModel, settings: TaskBars, path: Callable[[str], Path]) -> Samples:
    questions = read_questions(path(settings.file))
    checker = checker_of(settings.check, path)
    samples: Samples = {}
    for name, model in (("candidate", candidate), ("current", current)):
        answers = model.answer([messages for messages, _ in questions], settings.max_tokens)
        samples[name] = [verdict_of(checker, text, row) for text, (_, row) in zip(answers, questions, strict=True)]
        samples[f"{name} answers"] = list(answers)
    return samples


def _judge(samples: Samples, settings: TaskBars, confidence: float) -> GateVerdict:
    return judge_rate(samples, settings, confidence, "right")


TASK = GateMeasure(
    name="task",
    settings=TaskBars,
    take=_take,
    judge=_judge,
    describe=describe_rate,
    files=lambda settings: (settings.file,),
    programs=lambda settings: program_of(settings.check),
)
