"""Speeds of replicas, relative to each other, from their step times.

Tokens per second alone do not tell a slow replica from one with small batches. So the time of a step is fitted on all
replicas, as a time for the step and a time for each of its tokens; the pace of a replica is the time that its steps
took, over the time that the fit gives to their work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

DECAY = 0.98
"""Share of earlier measurements that is kept at each new one of a replica."""
FEWEST_STEPS = 30.0
"""Steps of a replica before its pace is used."""
EIGHTH = 8
"""Paces are rounded to eighths: smaller differences are noise."""
SLOWEST = 8.0
ROUNDS = 8


@dataclass(slots=True)
class _Sums:
    """Decayed sums over measurements: work, seconds, and products of both by step."""

    steps: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0
    steps_steps: float = 0.0
    steps_tokens: float = 0.0
    tokens_tokens: float = 0.0
    steps_seconds: float = 0.0
    tokens_seconds: float = 0.0

    def values(self) -> tuple[float, ...]:
        return tuple(getattr(self, name) for name in _Sums.__slots__)


class Paces:
    """Paces of replicas, by any key."""

    def __init__(self) -> None:
        self._sums: dict[Any, _Sums] = {}

    def learn(self, replica: Any, steps: int, tokens: int, seconds: float) -> None:
        """Take a measurement: ``steps`` steps computed ``tokens`` tokens in ``seconds`` busy seconds."""
        before = self._sums.get(replica, _Sums())
        weight = 1.0 / steps  # of the squared error: long measurements do not outweigh many short ones
        new = (
            *(steps, tokens, seconds),
            *(steps * steps * weight, steps * tokens * weight, tokens * tokens * weight),
            *(steps * seconds * weight, tokens * seconds * weight),
        )
        self._sums[replica] = _Sums(*(DECAY * old + each for old, each in zip(before.values(), new, strict=True)))

    def forget(self, replica: Any) -> None:
        """Forget a replica that has ended."""
        self._sums.pop(replica, None)

    def pace(self, replica: Any) -> float:
        """Return the time that a replica's work takes, relative to the mean of the fleet; 1 if it is not known."""
        known = {key: sums for key, sums in self._sums.items() if sums.steps >= FEWEST_STEPS}
        if replica not in known:
            return 1.0
        paces = dict.fromkeys(known, 1.0)
        for _ in range(ROUNDS):  # the fit and the paces, in turn
            by_step, by_token = _fit([(sums, paces[key]) for key, sums in known.items()])
            ratios = {
                key: sums.seconds / (by_step * sums.steps + by_token * sums.tokens) for key, sums in known.items()
            }
            mean = sum(ratios.values()) / len(ratios)
            paces = {key: ratio / mean for key, ratio in ratios.items()}
        return min(SLOWEST, max(1 / EIGHTH, round(EIGHTH * paces[replica]) / EIGHTH))


def _fit(measured: Sequence[tuple[_Sums, float]]) -> tuple[float, float]:
    """Return the seconds of a step and of a token that fit all measurements best, each divided by its replica's pace.
    None is negative."""
    ss = sum(sums.steps_steps for sums, _ in measured)
    st = sum(sums.steps_tokens for sums, _ in measured)
    tt = sum(sums.tokens_tokens for sums, _ in measured)
    sy = sum(sums.steps_seconds / pace for sums, pace in measured)
    ty = sum(sums.tokens_seconds / pace for sums, pace in measured)
    determinant = ss * tt - st * st
    if determinant > 1e-9 * ss * tt:
        by_step, by_token = (sy * tt - ty * st) / determinant, (ty * ss - sy * st) / determinant
        if by_step >= 0 and by_token >= 0:
            return by_step, by_token
    return (sy / ss, 0.0) if sy * sy * tt >= ty * ty * ss else (0.0, ty / tt)
