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
from typing import Any, NamedTuple

from ....costs.learning import StepTimes
from ....costs.steps import StepLoad
from ..drafters.drafter import Drafter, Guess, Timed, under_grammar
from ..drafters.registry import SpeculativeConfig
from ..request import Sequence

LEAST_GAIN = 1.03
"""Expected ratio of tokens per second, with drafts to without, below which nothing is drafted."""
FIRST_GAIN, FIRST_STEPS = 1.2, 24
"""The same ratio until that many steps without drafts of similar sizes are measured: while drafts are used, their times
are not measured again."""
LEARN_STEPS = 4
"""Steps whose times must be known before the first draft."""
DECAY = 0.9
"""Factor on older guesses at each new one: estimates follow the last ten or so. (Decay at each token would favour the
newest trial, which is a miss whenever a guess was wrong.)"""
COMMON_DECAY = 0.985
"""The same for guesses of all sequences together."""
UNLIKELY = 0.002
"""Estimated chance of a series of wrong guesses below which earlier guesses are forgotten."""
UNLIKELY_FOR_ALL = 1e-5
"""The same for guesses of all sequences, whose own earlier guesses are then forgotten too."""
CAME_DECAY = 0.995
"""Factor on older guesses where estimates are compared with what came: it lasts over several changes of the text."""
PRIOR_TRIALS = 12.0
"""Weight of the acceptance of all sequences in the estimate of one, in trials."""
PROBES = 2
"""Steps of a size that must be measured before its predicted time counts; until then such a step is assumed to cost
``TRIAL_COST`` steps without drafts, so that sizes are tried. Sizes up to the same power of two count as one."""
TRIAL_COST = 1.1
FINE_ROWS, COARSE_ROWS = 64, 16
"""Corrections are kept for each number of rows up to the first number, and beyond it for each range of the second."""
MEDIAN_OF = 31
"""Steps of a size that its measured time is the median of."""
SIMILAR = 127
"""The same for similar sizes together."""
PRIOR_STEPS = 20
"""Weight of the steps of similar sizes in the measured time of a size, in steps. The best of many sizes is chosen: with
a few noisy measurements of each, that would be the one that was measured at a lucky moment."""
ALL_COUNTS, COARSE = 16, 8
"""Numbers of drafts of a step that are compared: each up to the first, then larger ones an eighth apart. With many
sequences the choice would take longer than the step."""
CHOICE_SHARE = 0.005
"""Share of the time that choices of no drafts may take: none is made in as many of the next steps as that needs."""
CHOICE_SECONDS, EACH_SECONDS = 1e-4, 2e-6
"""Assumed seconds of a choice, and of each draft that it considers: all ranks must rest for the same steps, so these
are not measured."""
MOST_RESTS, REST_ROWS = 16, 16
"""Most steps in a row in which no drafts are considered, and the sequences that add one such step: guesses are then not
marked either."""
RECENT = 4
"""Last steps of a rest whose times are learned."""
FIRST_RUN, MOST_RUN, RUN_DECAY, RUN_DRIFT = 1.0, 16, 0.8, 0.005
"""Assumed and most steps with drafts in a row; factor on the mean at each new run; and the share by which that mean
goes back to what is assumed in each choice of none, so that drafts are tried again."""
LEAST_CHANCE = 0.01
"""Chance of a draft below which it is not considered."""
MOST_KEPT = 4096
MATCHES = (2, 4, 8)
"""Lengths of matches whose acceptance is estimated separately."""
LEVELS = 10
"""Ranges of estimated acceptance that are compared with what came."""

RULES = {
    "speculation": {"by": ("Speculation._best_counts",), "settings": {"speculation": {"method": "ngram"}}},
    "acceptance": {"by": ("Acceptance.add", "Acceptance.rate"), "settings": {"speculation": {"method": "suffix"}}},
}


class Acceptance:
    """Estimates the chance that a guessed token is right, relative to the share of matches that continue with it, from
    a decaying count of guesses. Where matches disagree, a wrong guess says little about the next one.

    Args:
        hits, trials: right tokens, and as many as were expected, to begin with.
        decay: factor on older guesses.
        unlikely: estimated chance of a series of wrong guesses below which earlier ones are forgotten.
    """

    __slots__ = ("_expected", "_misses", "_unlikely", "decay", "hits", "trials")

    def __init__(
        self, hits: float = 0.0, trials: float = 0.0, decay: float = DECAY, unlikely: float = UNLIKELY
    ) -> None:
        self.hits, self.trials, self.decay, self._unlikely = hits, trials, decay, unlikely
        self._misses, self._expected = 0, 0.0
        """Newest guesses of which the first token was wrong, in a row, and the sum of these tokens' shares."""

    def add(self, hits: int, missed: bool, shares: Listed[float] = ()) -> bool:
        """Count ``hits`` right tokens in a row, and a wrong one after them if ``missed``. Returns True if that made it
        forget earlier guesses. ``shares``: see ``Guess``; 1 if not given."""
        trials = sum(shares[: hits + missed]) if shares else float(hits + missed)
        if missed and not hits:
            self._misses, self._expected = self._misses + 1, self._expected + trials
        else:
            self._misses, self._expected = 0, 0.0
        # This number of wrong guesses in a row is unlikely, unless the text has changed.
        if self._misses > 1 and self.trials:
            chance = min(1.0, self.hits / self.trials) * self._expected / self._misses
            if (1.0 - chance) ** self._misses < self._unlikely:
                forgot = self.hits > 0
                self.hits, self.trials = 0.0, self._expected
                return forgot
        self.hits = self.decay * self.hits + hits
        self.trials = self.decay * self.trials + trials
        return False

    def rate(self, prior: float) -> float:
        """Return the estimated chance of a token with a share of 1, given the rate of comparable guesses."""
        return min(1.0, (self.hits + PRIOR_TRIALS * prior) / (self.trials + PRIOR_TRIALS))


class Measured(NamedTuple):
    """A measured step."""

    ratio: float
    """Measured over predicted time, when it was measured."""
    load: StepLoad
    seconds: float


class Corrections:
    """Measured step times by rows of a step: the median of the newest steps, and of those of similar sizes. A mean
    would follow the few steps that other work on the machine delayed, and the choice of drafts would be random."""

    def __init__(self) -> None:
        self._steps: dict[int, deque[Measured]] = {}
        """The newest steps by range of rows; 0 is for all together, -n for sizes of n bits."""
        self._middle: dict[int, Measured] = {}

    def learn(self, load: StepLoad, seconds: float, expected: float) -> None:
        """Record a step that was predicted to take ``expected`` seconds."""
        step = Measured(seconds / expected, load, seconds)
        for key in (_range(load.tokens), -load.tokens.bit_length(), 0):
            steps = self._steps.get(key)
            if steps is None:
                steps = self._steps[key] = deque(maxlen=MEDIAN_OF if key > 0 else SIMILAR)
            steps.append(step)
            self._middle.pop(key, None)

    def measured(self, rows: int) -> int:
        """Return the number of steps that the measured time of ``rows`` rows is of, those of similar sizes."""
        return len(self._steps.get(-rows.bit_length(), ()))

    def factor(self, rows: int, times: StepTimes) -> float:
        """Return measured over predicted time for steps of ``rows`` rows: that of similar sizes, or of all steps, as
        far as there were few such steps."""
        own, similar = _range(rows), -rows.bit_length()
        if similar not in self._steps:
            return self._median(0).ratio if self._steps else 1.0
        found = self._ratio(similar, times)
        if own in self._steps:
            count = len(self._steps[own])
            found += (self._ratio(own, times) - found) * count / (count + PRIOR_STEPS)
        return found

    def _ratio(self, key: int, times: StepTimes) -> float:
        step = self._median(key)
        return step.seconds / max(times.predict(step.load), 1e-9)

    def _median(self, key: int) -> Measured:
        found = self._middle.get(key)
        if found is None:
            steps = self._steps[key]
            found = self._middle[key] = sorted(steps)[(len(steps) - 1) // 2]
        return found


class Track:
    """Guesses for one sequence, and their acceptance."""

    __slots__ = ("acceptance", "estimate", "guess", "length")

    def __init__(self) -> None:
        self.acceptance = Acceptance()
        self.estimate = 0.0
        """Estimated acceptance of the newest guess, before it was compared with what came of such estimates."""
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
        self.drafter: Drafter = config.drafter()
        self.drafted = 0
        """Tokens drafted for verification."""
        self.accepted_at = [0] * config.num_speculative_tokens
        """Accepted tokens by their index among the drafts of a row."""
        self.last: deque[tuple[int, int]] = deque(maxlen=MOST_KEPT)
        """(seq_id, accepted drafts) of the rows since the decision log last emptied this list."""
        self.worthwhile = False
        """True if drafts pay for the sequences of the last ``drafts`` call. The next step is then planned while the
        device stands still, with or without drafts."""
        self.seconds_spent = 0.0
        """Seconds that a draft model took for the last ``drafts``."""
        self.wants_times = True
        """False during most of a rest: times of steps are not learned, which would take time in each."""
        self._times = times
        self._tracks: dict[int, Track] = {}
        self._common = [Acceptance(1.0, 2.0, COMMON_DECAY, UNLIKELY_FOR_ALL) for _ in range(len(MATCHES) + 1)]
        """Acceptance over all sequences, by length of match."""
        self._came = [Acceptance(decay=CAME_DECAY, unlikely=0.0) for _ in range(LEVELS)]
        """Acceptance of guesses by their estimates. Drafts are taken where estimates are highest, so they are chosen
        where estimates are too high."""
        self._plain, self._drafts, self._after = Corrections(), Corrections(), Corrections()
        """Corrections for steps without drafts, with drafts, and for those without that were planned after the step
        before was done, as those with are: their planning is not hidden behind the device."""
        self._measured = [0] * 32
        """Number of decode steps by the bit length of their tokens."""
        self._resting = 0, 0
        """Steps left without a choice, and the sequences that decode in them."""
        self._run, self._run_mean = 0, FIRST_RUN
        """Steps with drafts so far since the engine waited for tokens, and the mean of that number at the end."""
        self._exposed = False
        """The next step without drafts that is timed belongs to ``_after``."""

    def rests(self, running: int) -> bool:
        """Return True if no drafts are considered for the next step of ``running`` sequences: the choice takes time,
        and its last result was that drafts do not pay for about as many."""
        left, rows = self._resting
        if not left or 4 * abs(running - rows) > rows:
            self.wants_times = True
            return False
        self._resting = left - 1, rows
        self.wants_times = left <= RECENT or self._plain.measured(running) < FIRST_STEPS
        self.worthwhile, self.seconds_spent = False, 0.0
        return True

    def drafts(self, sequences: Listed[Sequence], room: int, *, known: bool = True) -> dict[int, tuple[int, ...]]:
        """Return drafts by seq_id, at most ``room`` tokens, for sequences that decode in the next step together, and
        set ``worthwhile``. ``known``: all of their tokens are known; if not, that alone counts, and it tells if drafts
        will pay once they are."""
        guesses = [(seq, self._guess(seq)) for seq in sequences]
        if not self.config.adaptive:
            fixed = self._fixed(guesses, room)
            self.worthwhile = bool(fixed)
            return _allowed(sequences, fixed)
        if self._times.steps < LEARN_STEPS:
            return {}
        gains: list[tuple[float, int]] = []
        for at, (seq, guess) in enumerate(guesses):
            chance, rate = 1.0, self._rate(seq, guess)
            chances: list[float] = []
            for share in guess.shares[: seq.max_length - 1 - seq.length]:
                chance *= rate * share
                if chance < LEAST_CHANCE:
                    break
                chances.append(chance)
            if not known:  # tokens under way are no drafts of the first step of a run
                drawn = seq.length - seq.prompt_len - len(seq.output_token_ids)
                later = [*chances[drawn:], *[0.0] * drawn]
                first = 1.0 / max(self._run_mean, 1.0)
                chances = [first * b + (1.0 - first) * a for a, b in zip(chances, later, strict=False)]
            gains += [(chance, at) for chance in chances]
        counts = self._best_counts(gains, sequences, room, known)
        rest = min(MOST_RESTS, len(sequences) // REST_ROWS, self._rest(sequences, len(gains)))
        self._chose(bool(counts), known, rest, len(sequences))
        chosen = {seq.seq_id: guess.tokens[: counts[at]] for at, (seq, guess) in enumerate(guesses) if counts.get(at)}
        return _allowed(sequences, chosen) if known else {}

    def _chose(self, drafts: bool, known: bool, rest: int, rows: int) -> None:
        """Note a choice; after one of no drafts there is none for ``rest`` steps, unless the next step is exposed."""
        waited, self.worthwhile = self.worthwhile, drafts
        if known and drafts:
            self._run += 1
        elif known and waited:
            self._exposed = True
            self._run_mean += (1.0 - RUN_DECAY) * (min(self._run, MOST_RUN) - self._run_mean)
            self._run = 0
        elif not drafts:
            self._run_mean += RUN_DRIFT * (FIRST_RUN - self._run_mean)
        self._resting = 0 if drafts or waited else rest, rows

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
        kind = self._drafts if drafted else self._after if self._exposed else self._plain
        self._exposed = self._exposed and drafted
        if expected > 0:
            kind.learn(load, seconds, expected)

    def take_measured(self) -> list[Timed]:
        """Return the measured steps of a draft model since the last call."""
        return []

    def learn(self, measured: Listed[Timed]) -> None:
        """Learn the times of a draft model."""

    def abandon(self) -> None:
        """Forget the state of a draft model, because a step has raised."""

    def clear_cache(self) -> None:
        """Forget the KV of prefixes that no sequence of a draft model holds."""

    def _guess(self, seq: Sequence) -> Guess:
        """Guess the next tokens of a sequence, after marking the last guess by the tokens that came."""
        track = self._tracks.get(seq.seq_id)
        if track is None:
            track = self._tracks[seq.seq_id] = Track()
        output = seq.output_token_ids
        came = output[track.length :]
        if track.guess.tokens and came:
            hits = 0
            for guessed, token in zip(track.guess.tokens, came, strict=False):
                if guessed != token:
                    break
                hits += 1
            missed = hits < min(len(came), len(track.guess.tokens))
            marked = hits, missed, track.guess.shares
            track.acceptance.add(*marked)
            if self._common[_bucket(track.guess.matched)].add(*marked):
                for each in self._tracks.values():
                    each.acceptance = Acceptance()
            self._came[_level(track.estimate)].add(*marked)
        most = self.config.num_speculative_tokens
        track.guess = self.drafter.guess(seq.seq_id, seq.prompt_token_ids, output, most)
        track.length = len(output)
        return track.guess

    def _rate(self, seq: Sequence, guess: Guess) -> float:
        common, track = self._common[_bucket(guess.matched)], self._tracks[seq.seq_id]
        track.estimate = track.acceptance.rate(common.rate(0.5))
        return self._came[_level(track.estimate)].rate(track.estimate)

    def _fixed(self, guesses: Listed[tuple[Sequence, Guess]], room: int) -> dict[int, tuple[int, ...]]:
        found = {}
        for seq, guess in guesses:
            tokens = guess.tokens[: min(room, seq.max_length - 1 - seq.length)]
            if tokens:
                found[seq.seq_id] = tokens
                room -= len(tokens)
        return found

    def _best_counts(
        self, gains: list[tuple[float, int]], sequences: Listed[Sequence], room: int, known: bool
    ) -> dict[int, int]:
        """Choose the number of drafts of each sequence, by its index, that maximizes tokens per second."""
        seconds = self._seconds_of(sequences, known)
        rows = len(sequences)
        best_rate, best = self._least_gain(rows) * rows / seconds(0), 0
        # Chances fall from draft to draft of a sequence, so the most likely drafts of all are prefixes of each.
        gains = in_order(gains, sequences)
        expected, coming, last = float(rows), 1, min(len(gains), max(room, 0))
        for count, (chance, _) in enumerate(gains[:last], 1):
            expected += chance
            if count < coming and count < last:
                continue
            coming = next_count(count)
            rate = expected / seconds(count)
            if rate > best_rate:
                best_rate, best = rate, count
        counts: dict[int, int] = {}
        for _, at in gains[:best]:
            counts[at] = counts.get(at, 0) + 1
        return counts

    def _rest(self, sequences: Listed[Sequence], considered: int) -> int:
        """Return the number of steps without a choice that follow a choice of no drafts among ``considered`` ones."""
        alone = self._seconds_of(sequences, known=False)(0)
        return int((CHOICE_SECONDS + EACH_SECONDS * considered) / (CHOICE_SHARE * alone))

    def _least_gain(self, rows: int) -> float:
        """Return the gain of a step with drafts over one without from which on drafts are made."""
        return LEAST_GAIN if self._plain.measured(rows) >= FIRST_STEPS else FIRST_GAIN

    def _seconds_of(self, sequences: Listed[Sequence], known: bool = True) -> Callable[[int], float]:
        """Return a function from the number of drafts to the predicted seconds of a step with these sequences: at least
        those without drafts.

        After a run of steps with drafts, the step without is planned while the device stands still. That counts as time
        of the drafts, unless all tokens are ``known``: then it costs as much later as now.
        """
        rows = len(sequences)
        keys = sum(seq.length for seq in sequences)
        each = keys / rows
        exposed = 0.0
        if not known and self._after.measured(rows) >= PROBES:
            more = self._after.factor(rows, self._times) - self._plain.factor(rows, self._times)
            exposed = max(0.0, more * self._times.predict(StepLoad(rows, keys))) / max(self._run_mean, 0.5)

        def seconds(drafts: int) -> float:
            tokens, factor = rows + drafts, 1.0
            if self._measured[tokens.bit_length()] < PROBES:
                tokens, drafts, factor = rows, 0, TRIAL_COST
            load = StepLoad(tokens, keys + int(drafts * each))
            factor *= (self._drafts if drafts else self._plain).factor(tokens, self._times)
            return max(self._times.predict(load) * factor, 1e-9)

        alone = seconds(0)
        # If a step with drafts was measured as shorter, that was by chance.
        return lambda drafts: max(seconds(drafts), alone) + exposed if drafts else alone


def in_order(gains: list[tuple[float, int]], sequences: Listed[Sequence]) -> list[tuple[float, int]]:
    """Sort drafts, (chance, sequence), by chance. Of about equal ones those of the sequence with the shortest answer so
    far come first: always drafting for the same sequences would leave others to end alone."""
    lengths = [len(seq.output_token_ids) for seq in sequences]
    keyed = [(-round(chance, 2), lengths[at], at, -chance) for chance, at in gains]
    keyed.sort()
    return [(-chance, at) for _, _, at, chance in keyed]


def next_count(count: int) -> int:
    """Return the number of drafts to compare after ``count``."""
    return count + 1 + (count // COARSE if count >= ALL_COUNTS else 0)


def _allowed(sequences: Listed[Sequence], drafts: dict[int, tuple[int, ...]]) -> dict[int, tuple[int, ...]]:
    """Fit drafts to the grammars of their sequences (``under_grammar``)."""
    for seq in sequences:
        tokens = drafts.get(seq.seq_id)
        if tokens and seq.constraint is not None:
            drafts[seq.seq_id] = under_grammar(seq.constraint, tokens, seq.stop_ids)
    return drafts


def _range(rows: int) -> int:
    return rows if rows <= FINE_ROWS else FINE_ROWS + -(-(rows - FINE_ROWS) // COARSE_ROWS)


def _level(estimate: float) -> int:
    return min(int(LEVELS * estimate), LEVELS - 1)


def _bucket(matched: int) -> int:
    return sum(matched > limit for limit in MATCHES)
