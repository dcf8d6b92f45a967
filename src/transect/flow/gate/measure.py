"""The record of a measure, and its verdict."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from ...bench.intervals import Bounds


@dataclass(frozen=True, slots=True)
class GateVerdict:
    """Verdict of a measure.

    Attributes:
        passed: the whole interval is on the good side of every bar.
        reason: figures, interval and bar in one sentence.
        candidate, current: figures of the two models; None if there is none.
        interval: of the compared value, lower and upper end; None if it is exact.
    """

    passed: bool
    reason: str
    candidate: float | None = None
    current: float | None = None
    interval: Bounds | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


class TestedModel(Protocol):
    """A model under test, as a measure asks it (``subject.py``)."""

    size: int
    base: str

    def answer(self, conversations: Sequence[Sequence[Mapping[str, Any]]], max_tokens: int) -> list[str]:
        """Answer conversations greedily."""

    def score(self, path: Path) -> list[tuple[float, int]]:
        """Score rows of a file: (nats, trained tokens) of each document."""

    def generate_seconds(self, prompt_tokens: int, new_tokens: int, batch: int, seed: int) -> float:
        """Time the generation of tokens after random prompts, in seconds."""


Samples = dict[str, list[Any]]
"""Plain samples of both models: lists of equal meaning below ``candidate`` and ``current``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GateMeasure:
    """The record of a measure.

    Attributes:
        name: name in the flow's file.
        settings: frozen dataclass of a table of the gate.
        take: samples of both models. Arguments: candidate, current, settings, path of a file that the settings name.
        judge: verdict from samples, settings and confidence.
        describe: the bar in a few words.
        files: the files that a table names; they must not be trained on.
        programs: files with code of the user; the measure is taken again if they change.
    """

    name: str
    settings: type
    take: Callable[[TestedModel, TestedModel, Any, Callable[[str], Path]], Samples]
    judge: Callable[[Samples, Any, float], GateVerdict]
    describe: Callable[[Any], str]
    files: Callable[[Any], tuple[str, ...]] = lambda settings: ()
    programs: Callable[[Any], tuple[str, ...]] = lambda settings: ()
