"""Step times learned from the steps themselves, as they run, so that the next steps can be sized by time.

A step's time is a sum of parts:

    seconds = base + f(tokens) + a * keys + b * pairs + c * scored + d * context

``base`` is the time of any step: a model's weights are read however few tokens there are. ``f`` rises from knot to knot
(1, 16, 64, ... tokens): nearly flat where weights are read anyway, then as steep as arithmetic makes it. ``keys`` are
positions of the cache that rows read, once for each row, and ``pairs`` those that each token of a prompt attends to:
bytes and arithmetic of attention. ``scored`` are tokens of prompts whose log-probabilities are requested: their logits
are computed and ranked. ``context`` are positions before and in the chunks of prompts: a chunk's few tiles walk over
them one after another, which takes a GPU far longer than the keys of as many rows.

The parts are the state of a Kalman filter (Kalman 1960). Every measured step corrects the parts that it consists of, in
proportion to their uncertainty. Nothing is assumed of the device: the first step sets the scale, and a token of a part
that was never measured is taken to cost as much as a token of that first step. So steps grow carefully, a little beyond
the known range. ``fitting.py`` fits a model with more terms on a whole log.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from copy import deepcopy
from itertools import accumulate, pairwise
from typing import Any

from .steps import StepLoad

KNOTS = (1, 16, 64, 128, 256, 384, 512, 1024, 2048, 4096, 8192, 16384, 65536)
"""Tokens of a step between which its time is modelled as linear."""
NOISE = 0.05
"""Standard deviation of one measured step, as a share of its time."""
DRIFT = 1e-3
"""Drift of a part from one step to the next, as a share of its initial uncertainty."""
DEVIATIONS = 3.0
SMOOTHING = 0.02
"""Weight of the newest step in ``StepTimes.error``."""
FEW_KEYS, FEW_PAIRS = 16_384, 1 << 16
"""Keys, and pairs, that may take as long as the first step. On a processor 65,536 pairs take as long as a token of the
same model, on a GPU a fortieth of that: an uncertainty that is too small would have their time taken for that of
tokens, and steps deep in a long prompt be too long."""
FEW_TOKENS, FEW_SMOOTHING = 2, 0.25
"""Most tokens of a chunk whose time is mainly that of reading its context, and the weight of the newest measurement in
``_few``."""
SHORTEST = 1e-7
"""Seconds below which a step is shorter than the resolution of clocks, and is not learned from."""
SURPRISE = 3.0
"""Longest measured time that is learned from, in predictions: a longer step was delayed by other work. Two consecutive
steps below the inverse show that earlier ones were delayed. One shows nothing: its start may have been observed too
late."""

Part = tuple[int, float]
"""A part of the time, and the amount of it in a step."""
_BASE, _KEYS, _PAIRS, _SCORED, _CONTEXT = 0, *range(len(KNOTS), len(KNOTS) + 4)
"""Indices of the parts; those of the tokens are between, one for each stretch between two knots."""
_STATE = ("steps", "error", "measured", "predicted", "_parts", "_unknown", "_first", "_few")
_WHOLE = [(part, 1.0) for part in range(len(KNOTS))]
"""Parts of ``base`` and whole stretches."""


class StepTimes:
    """Step times that are learned from measured steps. Times are seconds."""

    def __init__(self) -> None:
        self.steps = 0
        """Number of steps learned from."""
        self.error = 0.0
        """Smoothed mean of the relative errors of predictions."""
        self.measured = self.predicted = 0.0
        """Total seconds of those steps: measured, and as predicted before each."""
        self._parts = [0.0] * (_CONTEXT + 1)
        self._unknown = [[0.0] * (_CONTEXT + 1) for _ in self._parts]
        """Covariance of ``_parts``."""
        self._short = False
        """True if the last step took less time than the learned times allow."""
        self._first = [0.0] * (_CONTEXT + 1)
        """Initial uncertainty of each part."""
        self._few = 0.0
        """Smoothed seconds per context position in chunks of few tokens; 0 before the first. If all chunks have similar
        sizes, the times of positions and of pairs cannot be separated."""
        self._ends = [0.0] * len(KNOTS)
        """Predicted seconds of a step without attention, at each knot."""
        self._keys = self._pairs = self._scored = self._context = 0.0
        """Predicted seconds of a position that a row reads, of one that a prompt's token attends to, of a scored token,
        and of a position of a chunk's context."""

    def predict(self, load: StepLoad) -> float:
        """Predict the seconds of a step; 0 before the first measurement. More work never takes less time: a part with
        little data may be negative, and then counts as zero."""
        return self._seconds(load[0], load[1], load[2], load.scored, load.context)

    def with_chunk(self, beside: StepLoad, tokens: int, context: int = 0, *, unscored: float = math.inf) -> float:
        """Predict the seconds of a step like ``beside`` with ``tokens`` in all; arguments as of ``most_tokens``."""
        more = tokens - beside.tokens
        pairs = beside.pairs + more * context + more * (more + 1) // 2
        scored = int(max(0, more - unscored))
        return self._seconds(tokens, beside.keys, pairs, scored, beside.context + context + more)

    def read(self, context: int) -> float:
        """Predict the seconds in which a chunk's context is read, however few tokens attend to it: at most what
        chunks of few tokens took."""
        return (min(self._context, self._few) if self._few else self._context) * context

    def _seconds(self, tokens: int, keys: int, pairs: int, scored: int, context: int) -> float:
        ends = self._ends
        place = bisect_left(KNOTS, tokens)
        if place == 0:
            found = ends[0]
        elif place == len(KNOTS):
            found = ends[-1]
        else:
            low, high = KNOTS[place - 1], KNOTS[place]
            before = ends[place - 1]
            found = before + (ends[place] - before) * ((tokens - low) / (high - low))
        attention = self._keys * keys + self._pairs * pairs + self._context * context
        return found + attention + self._scored * scored

    def soonest(self, load: StepLoad) -> float:
        """Return the earliest likely end of a step: the prediction less ``DEVIATIONS`` standard deviations."""
        parts = _parts_of(load)
        expected = self._expected(parts)
        variance = sum(share * self._covariance(part, parts) for part, share in parts)
        return expected - DEVIATIONS * math.sqrt(max(variance, 0.0) + (self.error * expected) ** 2)

    def learn(self, load: StepLoad, seconds: float, count: int = 1) -> None:
        """Learn from a step's time; a step below ``SHORTEST`` is ignored. ``count``: number of steps with this work and
        this time on average: as many measurements have a part of one's variance."""
        if seconds < SHORTEST:
            return
        parts = _parts_of(load)
        if not self.steps:
            self._begin(load, seconds)
        expected = self._expected(parts)
        self.steps += count
        self.measured += count * seconds
        self.predicted += count * expected
        seconds = min(seconds, SURPRISE * expected) if expected > 0 else seconds
        if load.chunks and load.pairs <= FEW_TOKENS * load.context:
            beside = self._seconds(load.rows - load.chunks, load.keys, 0, 0, 0)
            each = max(seconds - beside, SHORTEST) / load.context
            self._few += (each - self._few) * (FEW_SMOOTHING if self._few else 1.0)
        spread = self._spread(parts)
        sure = expected - DEVIATIONS * math.sqrt(max(sum(share * spread[part] for part, share in parts), 0.0))
        before, self._short = self._short, SURPRISE * seconds < sure
        if not self._short:
            weight = SMOOTHING if count == 1 else 1 - (1 - SMOOTHING) ** count
            self.error += weight * (abs(seconds - expected) / max(seconds, SHORTEST) - self.error)
        elif before:
            self._shrink(parts, seconds / expected)
            expected, spread = self._expected(parts), self._spread(parts)
        noise = (NOISE * max(expected, seconds, SHORTEST)) ** 2 / count
        variance = sum(share * spread[part] for part, share in parts) + noise
        for part, covariance in enumerate(spread):
            gain = covariance / variance
            if gain:
                self._parts[part] += gain * (seconds - expected)
                row = self._unknown[part]
                self._unknown[part] = [known - gain * other for known, other in zip(row, spread, strict=True)]
        for part, _ in parts:
            self._unknown[part][part] += count * (DRIFT * self._first[part]) ** 2
        self._sum_up()

    def state(self) -> dict[str, Any]:
        """Return what was learned, as plain values."""
        return {name: deepcopy(getattr(self, name)) for name in _STATE}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what another instance has learned: its ``state``."""
        for name in _STATE:
            setattr(self, name, deepcopy(state[name]))
        self._sum_up()

    def most_tokens(
        self, seconds: float, beside: StepLoad, context: int, limit: int, *, unscored: float = math.inf
    ) -> int:
        """Return the most tokens that a step may have to end within ``seconds``.

        Args:
            beside: the part of the step that is fixed; its tokens are part of the answer.
            context: positions before the tokens beyond those, all of which each of them attends to.
            limit: the largest answer.
            unscored: tokens beyond those of ``beside`` that certainly need no log-probabilities; all others may.
        """
        least = beside.tokens

        def fits(tokens: int) -> bool:
            return self.with_chunk(beside, tokens, context, unscored=unscored) <= seconds

        low, high = least, max(limit, least)
        if fits(high):
            return high
        while high - low > max(1, low // 32):  # to 3%, as good as predictions are
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def _expected(self, parts: list[Part]) -> float:
        return sum(share * self._parts[part] for part, share in parts)

    def _covariance(self, part: int, parts: list[Part]) -> float:
        row = self._unknown[part]
        return sum(share * row[other] for other, share in parts)

    def _sum_up(self) -> None:
        """Update the tables for predictions."""
        known = [max(part, 0.0) for part in self._parts]
        self._ends = list(accumulate(known[:_KEYS]))
        self._keys, self._pairs, self._scored, self._context = known[_KEYS:]

    def _spread(self, parts: list[Part]) -> list[float]:
        """Compute covariances of all parts with the prediction of a step."""
        spread = [0.0] * len(self._parts)
        for part, share in parts:  # the covariance is symmetric
            spread = [known + share * other for known, other in zip(spread, self._unknown[part], strict=True)]
        return spread

    def _shrink(self, parts: list[Part], ratio: float) -> None:
        """Scale the parts of a step, each with its initial uncertainty on the new scale."""
        for part, _ in parts:
            self._parts[part] *= ratio
            self._first[part] *= ratio
            for other in range(len(self._parts)):
                self._unknown[part][other] *= ratio
                self._unknown[other][part] *= ratio
            self._unknown[part][part] += self._first[part] ** 2

    def _begin(self, load: StepLoad, seconds: float) -> None:
        """Start from the first step: half of it base, half tokens, and each part as uncertain as if the step had
        consisted of it alone, with at least ``FEW_KEYS`` keys and ``FEW_PAIRS`` pairs."""
        each = seconds / load.tokens
        widths = [each * (after - before) for before, after in pairwise(KNOTS)]
        attention = [seconds / max(load.keys, FEW_KEYS), seconds / max(load.pairs, FEW_PAIRS)]
        self._first = [seconds, *widths, *attention, each, seconds / max(load.context, FEW_KEYS)]
        self._parts = [0.5 * seconds, *(0.5 * width for width in widths), 0.0, 0.0, 0.5 * each, 0.0]
        for part, first in enumerate(self._first):
            self._unknown[part][part] = first**2


def _parts_of(load: StepLoad) -> list[Part]:
    """List the parts of a step's time with their amounts."""
    place = bisect_left(KNOTS, load.tokens)
    parts: list[Part] = list(_WHOLE[: max(place, 1)])
    if 0 < place < len(KNOTS):
        low = KNOTS[place - 1]
        parts.append((place, (load.tokens - low) / (KNOTS[place] - low)))
    if load.keys:
        parts.append((_KEYS, load.keys))
    if load.pairs:
        parts.append((_PAIRS, load.pairs))
    if load.scored:
        parts.append((_SCORED, load.scored))
    if load.context:
        parts.append((_CONTEXT, load.context))
    return parts
