"""Choose how many tokens to draft for each sequence, so that steps yield the most tokens per second.

Draws depend on seed, choice and position alone, so the next tokens of a sequence are the same whether they were drafted
or not. That has two uses here. Verification is exact: a draft is accepted where it equals the draw of its position. And
a guess that was *not* drafted can still be marked, once the real tokens are known: acceptance is measured at no cost,
even while nothing is drafted.

The number of drafts maximizes (expected tokens) / (predicted time) over a step of all decoding sequences: the next most
likely draft is added as long as that ratio grows. Step times come from ``costs/learning``, corrected for each number of
rows by the ratio that was measured.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Listed
from typing import Any

from ....costs.learning import StepTimes
from ....costs.steps import StepLoad
from ..drafters.drafter import Guess
from ..drafters.registry import SpeculativeConfig
from ..request import Sequence

LEAST_GAIN = 1.03
"""Expected ratio of tokens per second, with drafts to without, below which nothing is drafted."""
LEARN_STEPS = 4
"""Steps whose times must be known before the first draft."""
DECAY = 0.9
"""Factor on older guesses at each new one: estimates follow the last ten or so. (Decay at each token would favour the
newest trial, which is a miss whenever a guess was wrong.)"""
PRIOR_TRIALS = 4.0
"""Weight of the acceptance of all sequences in the estimate of one, in trials."""
PROBES = 2
"""Steps of a size that must be measured before its predicted time counts; until then additional rows are assumed to be
free, so that sizes are tried. Sizes up to the same power of two count as one."""
FINE_ROWS, COARSE_ROWS = 64, 16
"""Corrections are kept for each number of rows up to the first number, and beyond it for each range of the second."""
CORRECTION_RATE = 0.1
"""Least weight of the newest step in a correction."""
MOST_KEPT = 4096
MATCHES = (2, 4, 8)
"""Lengths of matches whose acceptance is estimated separately."""


class Acceptance:
    """Estimates the chance that a guessed token is right, from a decaying count of guesses."""

    __slots__ = ("hits", "trials")

    def __init__(self, hits: float = 0.0, trials: float = 0.0) -> None:
        self.hits, self.trials = hits, trials

    def add(self, hits: int, missed: bool) -> None:
        """Count ``hits`` right tokens in a row, and a wrong one after them if ``missed``."""
        self.hits = DECAY * self.hits + hits
        self.trials = DECAY * self.trials + hits + missed

    def rate(self, prior: float) -> float:
        """Return the estimated chance, given the rate of comparable guesses."""
        return (self.hits + PRIOR_TRIALS * prior) / (self.trials + PRIOR_TRIALS)


class Corrections:
    """Ratios of measured to predicted time between results, by rows of a step."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[float, int]] = {}
        """(ratio, steps) by range of rows; 0 for all steps together."""

    def learn(self, rows: int, ratio: float) -> None:
        """Record a step."""
        for key in (_range(rows), 0):
            before, count = self._found.get(key, (1.0, 0))
            weight = max(CORRECTION_RATE, 1 / (count + 1))
            self._found[key] = before + weight * (ratio - before), count + 1

    def factor(self, rows: int) -> float:
        """Return the factor for steps of ``rows`` rows, or that of all steps if there was no such step."""
        return self._found.get(_range(rows), self._found.get(0, (1.0, 0)))[0]


class _Track:
    """Guesses for one sequence."""

    __slots__ = ("acceptance", "guess", "length")

    def __init__(self) -> None:
        self.acceptance = Acceptance()
        self.guess = Guess()
        """The newest guess, made when the sequence had ``length`` output tokens."""
        self.length = 0


class Speculation:
    """Drafts tokens for the sequences of a scheduler.

    Args:
        config: method and limits.
        times: learned step times.
    """

    def __init__(self, config: SpeculativeConfig, times: StepTimes) -> None:
        self.config = config
        self.drafter = config.drafter()
        self.drafted = 0
        """Tokens drafted for verification."""
        self.accepted_at = [0] * config.num_speculative_tokens
        """Accepted tokens by their index among the drafts of a row."""
        self.last: deque[tuple[int, int]] = deque(maxlen=MOST_KEPT)
        """(seq_id, accepted drafts) of the rows since the decision log last emptied this list."""
        self.worthwhile = False
        """True if drafts pay for the sequences of the last ``drafts`` call."""
        self._times = times
        self._tracks: dict[int, _Track] = {}
        self._common = [Acceptance(1.0, 2.0) for _ in range(len(MATCHES) + 1)]
        """Acceptance over all sequences, by length of match."""
        self._corrections = {False: Corrections(), True: Corrections()}
        """Corrections for steps without and with drafts: the latter are planned after the previous step is done, so
        their planning is not hidden behind the device."""
        self._measured = [0] * 32
        """Number of decode steps by the bit length of their tokens."""

    def drafts(self, sequences: Listed[Sequence], room: int) -> dict[int, tuple[int, ...]]:
        """Return drafts by seq_id, at most ``room`` tokens, for sequences that decode in the next step together."""
        guesses = [(seq, self._guess(seq)) for seq in sequences]
        if not self.config.adaptive:
            fixed = self._fixed(guesses, room)
            self.worthwhile = bool(fixed)
            return fixed
        if self._times.steps < LEARN_STEPS:
            return {}
        gains: list[tuple[float, int]] = []
        for at, (seq, guess) in enumerate(guesses):
            chance, rate = 1.0, self._rate(seq, guess)
            for share in guess.shares[: seq.max_length - 1 - seq.length]:
                chance *= rate * share
                gains.append((chance, at))
        counts = self._best_counts(gains, sequences, room)
        self.worthwhile = bool(counts)
        return {seq.seq_id: guess.tokens[: counts[at]] for at, (seq, guess) in enumerate(guesses) if counts.get(at)}

    def verified(self, seq_id: int, drafted: int, accepted: int) -> None:
        """Count the drafts of a row."""
        self.last.append((seq_id, accepted))
        self.drafted += drafted
        for at in range(accepted):
            self.accepted_at[at] += 1

    def counts(self) -> dict[str, Any]:
        """Return the counters as fields of ``SchedulerStats``."""
        accepted = {str(place): count for place, count in enumerate(self.accepted_at)}
        return {"drafted_tokens": self.drafted, "accepted_at": accepted}

    def ended(self, seq: Sequence) -> None:
        """Forget a sequence that has ended."""
        if self._tracks.pop(seq.seq_id, None) is not None:
            self.drafter.ended(seq.seq_id, seq.output_token_ids)

    def timed(self, load: StepLoad, seconds: float, drafted: bool) -> None:
        """Learn how much the time of a decode step differs from its prediction.

        Args:
            seconds: from the result of the step before to that of this one.
            drafted: the step has drafts.
        """
        expected = self._times.predict(load)
        self._measured[load.tokens.bit_length()] += 1
        if expected > 0:
            self._corrections[drafted].learn(load.tokens, min(max(seconds / expected, 0.25), 4.0))

    def _guess(self, seq: Sequence) -> Guess:
        """Guess the next tokens of a sequence, after marking the last guess by the tokens that came."""
        track = self._tracks.get(seq.seq_id)
        if track is None:
            track = self._tracks[seq.seq_id] = _Track()
        output = seq.output_token_ids
        came = output[track.length :]
        if track.guess.tokens and came:
            hits = 0
            for guessed, token in zip(track.guess.tokens, came, strict=False):
                if guessed != token:
                    break
                hits += 1
            missed = hits < min(len(came), len(track.guess.tokens))
            track.acceptance.add(hits, missed)
            self._common[_bucket(track.guess.matched)].add(hits, missed)
        most = self.config.num_speculative_tokens
        track.guess = self.drafter.guess(seq.seq_id, seq.prompt_token_ids, output, most)
        track.length = len(output)
        return track.guess

    def _rate(self, seq: Sequence, guess: Guess) -> float:
        common = self._common[_bucket(guess.matched)]
        return self._tracks[seq.seq_id].acceptance.rate(common.rate(0.5))

    def _fixed(self, guesses: Listed[tuple[Sequence, Guess]], room: int) -> dict[int, tuple[int, ...]]:
        found = {}
        for seq, guess in guesses:
            tokens = guess.tokens[: min(room, seq.max_length - 1 - seq.length)]
            if tokens:
                found[seq.seq_id] = tokens
                room -= len(tokens)
        return found

    def _best_counts(self, gains: list[tuple[float, int]], sequences: Listed[Sequence], room: int) -> dict[int, int]:
        """Choose the number of drafts of each sequence, by its index, that maximizes tokens per second."""
        seconds = self._seconds_of(sequences)
        rows = len(sequences)
        best_rate, best = LEAST_GAIN * rows / seconds(0), 0
        # Chances fall from draft to draft of a sequence, so the most likely drafts of all are prefixes of each.
        gains.sort(key=lambda gain: (-gain[0], gain[1]))
        expected = float(rows)
        for count, (chance, _) in enumerate(gains[: max(room, 0)], 1):
            expected += chance
            rate = expected / seconds(count)
            if rate > best_rate:
                best_rate, best = rate, count
        counts: dict[int, int] = {}
        for _, at in gains[:best]:
            counts[at] = counts.get(at, 0) + 1
        return counts

    def _seconds_of(self, sequences: Listed[Sequence]) -> Callable[[int], float]:
        """Return a function from the number of drafts to the predicted seconds of a step with these sequences."""
        rows = len(sequences)
        keys = sum(seq.length for seq in sequences)
        each = keys / rows

        def seconds(drafts: int) -> float:
            tokens = rows + drafts
            if self._measured[tokens.bit_length()] < PROBES:
                tokens, drafts = rows, 0
            load = StepLoad(tokens, keys + int(drafts * each))
            return max(self._times.predict(load) * self._corrections[drafts > 0].factor(tokens), 1e-9)

        return seconds


def _range(rows: int) -> int:
    return rows if rows <= FINE_ROWS else FINE_ROWS + -(-(rows - FINE_ROWS) // COARSE_ROWS)


def _bucket(matched: int) -> int:
    return sum(matched > limit for limit in MATCHES)
