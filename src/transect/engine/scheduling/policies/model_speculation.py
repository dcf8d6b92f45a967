"""Choose how many tokens a small model drafts, so that steps yield the most tokens per second.

A draft of a model costs time, unlike one that is looked up. So the number is chosen before anything is drafted, from
the measured acceptance of a sequence and of all. It maximizes (expected tokens) / (time of the drafts + time of the
step that verifies them). The times of the small model are learned from its steps. The time to catch up with known
tokens, a prompt above all, is spread over the steps that can use them.

Where drafts do not pay, acceptance is measured by probes: a few drafts for one sequence, as soon as ``PROBE_SHARE`` of
the time since the last probe pays for them.
"""

from __future__ import annotations

from collections.abc import Sequence as Listed
from functools import cache

from ....costs.learning import StepTimes
from ....costs.steps import StepLoad
from ..drafters.drafter import Timed
from ..drafters.drawn import DrawnDrafts
from ..drafters.registry import SpeculativeConfig
from ..request import Sequence
from .speculation import (
    COMMON_DECAY,
    LEARN_STEPS,
    LEAST_CHANCE,
    Acceptance,
    Speculation,
    Track,
    in_order,
    next_count,
)

PROBE_SHARE = 0.01
"""Share of the time that probes may take."""
FIRST_PROBES = 3
"""Probes that need not be paid for: nothing is known of a new engine."""
PROBE_TOKENS = 2
LEAST_REST, MOST_REST = 16, 512
"""Fewest and most steps after one without drafts in which none is considered: nothing is learned of drafts meanwhile,
and the choice would take time in each step."""
HORIZON = 64
"""Most steps over which the time to catch up with a sequence is spread."""
PRIOR = 0.6
"""Acceptance of a token before any was measured."""

RULES = {
    "model_speculation": {
        "by": ("ModelSpeculation._chosen",),
        "settings": {"speculation": {"method": "draft_model", "model": "small"}},
        "acceptance": 0.8,
        "bounds": {"answer": 1.03},
    }
}


class ModelSpeculation(Speculation):
    """Has a model draft for the sequences of a scheduler.

    Args:
        config: method and limits.
        times: learned step times of the large model.
    """

    def __init__(self, config: SpeculativeConfig, times: StepTimes) -> None:
        super().__init__(config, times)
        self.model: DrawnDrafts | None = None
        """The small model; nothing is drafted without."""
        self._all = Acceptance(decay=COMMON_DECAY)
        self._credit = 0.0
        """Seconds that probes may take."""
        self._probes = 0
        self._expected = self._drafting = 0.0
        """Expected seconds of the probe in flight, and measured seconds of its drafts."""
        self._considered = 0
        """Drafts that the last choice has considered."""
        self._unlearned = 0
        """Steps since one that was learned from."""

    def rests(self, running: int) -> bool:
        """Return True if no drafts are considered for the next step; see ``Speculation.rests``."""
        found = super().rests(running)
        self._unlearned += not self.wants_times
        return found

    def drafts(self, sequences: Listed[Sequence], room: int, *, known: bool = True) -> dict[int, tuple[int, ...]]:
        """Return drafts by seq_id; see ``Speculation.drafts``."""
        model = self.model
        self.seconds_spent = 0.0
        if model is None:
            return {}
        most = [self._most(seq, model) for seq in sequences]
        if not self.config.adaptive:
            counts = self._even(most, room)
        elif self._times.steps < LEARN_STEPS:
            return {}
        else:
            counts = self._chosen(sequences, most, room, model, known)
        probe = 0.0
        if not counts and self.config.adaptive:
            counts, probe = self._probe(sequences, most, room, model)
        rest = 0
        if self.config.adaptive:
            rest = min(max(LEAST_REST, self._rest(sequences, self._considered)), MOST_REST)
        self._chose(bool(counts), known, rest, len(sequences))
        if not counts or not known:
            return {}
        self._credit -= probe
        self._probes += probe > 0
        self._expected = probe
        found = model.draft((sequences[at], count) for at, count in counts.items())
        self.seconds_spent = model.seconds_spent
        return found

    def verified(self, seq_id: int, drafted: int, accepted: int) -> None:
        """Count the drafts of a row, and learn from them."""
        super().verified(seq_id, drafted, accepted)
        track = self._tracks.get(seq_id)
        if track is None:
            track = self._tracks[seq_id] = Track()
        for acceptance in (track.acceptance, self._all):
            acceptance.add(accepted, accepted < drafted)

    def ended(self, seq: Sequence) -> None:
        """Forget a sequence that has ended."""
        self._tracks.pop(seq.seq_id, None)
        if self.model is not None:
            self.model.ended(seq.seq_id, seq.output_token_ids)

    def timed(self, load: StepLoad, seconds: float, drafted: bool) -> None:
        """Learn from a decode step, see ``Speculation``; steps without drafts pay for probes, those of a rest too."""
        super().timed(load, seconds, drafted)
        if drafted and self._expected:
            self._credit -= max(seconds + self._drafting - self._expected, 0.0)
            self._expected = 0.0
        if not drafted:
            self._credit += PROBE_SHARE * seconds * (1 + self._unlearned)
            self._unlearned = 0

    def take_measured(self) -> list[Timed]:
        """Return the measured steps of the small model since the last call."""
        return [] if self.model is None else self.model.take_measured()

    def learn(self, measured: Listed[Timed]) -> None:
        """Learn the times of the small model."""
        self._drafting = sum(seconds for _, seconds in measured)
        if self.model is not None:
            self.model.learn(measured)

    def abandon(self) -> None:
        """Forget the state of the small model, because a step has raised."""
        if self.model is not None:
            self.model.abandon()

    def clear_cache(self) -> None:
        """Forget the KV of prefixes that no sequence holds."""
        if self.model is not None:
            self.model.clear_cache()

    def _most(self, seq: Sequence, model: DrawnDrafts) -> int:
        """Return the most drafts that a sequence can use."""
        longest = min(seq.max_length - 1, model.max_model_len)
        return max(0, min(self.config.num_speculative_tokens, longest - seq.length))

    @staticmethod
    def _even(most: Listed[int], room: int) -> dict[int, int]:
        counts = {}
        for at, count in enumerate(most):
            if min(count, room) > 0:
                counts[at] = min(count, room)
                room -= counts[at]
        return counts

    def _rate_of(self, seq: Sequence) -> float:
        """Estimate the chance that a draft for a sequence is right."""
        common, track = self._all.rate(PRIOR), self._tracks.get(seq.seq_id)
        return common if track is None else track.acceptance.rate(common)

    def _chosen(
        self, sequences: Listed[Sequence], most: Listed[int], room: int, model: DrawnDrafts, known: bool = True
    ) -> dict[int, int]:
        """Choose the drafts of each sequence, by its place, that maximize tokens per second."""
        verify, rows = self._seconds_of(sequences, known), len(sequences)
        length = sum(seq.length for seq in sequences) // rows
        gains: list[tuple[float, int]] = []
        for at, seq in enumerate(sequences):
            chance, rate = 1.0, self._rate_of(seq)
            for _ in range(most[at]):
                chance *= rate
                if chance < LEAST_CHANCE:
                    break
                gains.append((chance, at))
        self._considered = len(gains)
        gains = in_order(gains, sequences)
        best_rate, best, expected = self._least_gain(rows) * rows / verify(0), 0, float(rows)
        depths: dict[int, int] = {}
        drafting: list[int] = []  # sequences that draft a first, a second, ... token
        cost = cache(lambda count: model.seconds([count], 0, length))
        late, coming, last = 0.0, 1, min(len(gains), max(room, 0))
        for count, (chance, at) in enumerate(gains[:last], 1):
            depth = depths[at] = depths.get(at, 0) + 1
            if depth == 1:
                late += self._late(sequences[at], model)
            if depth > len(drafting):
                drafting.append(0)
            drafting[depth - 1] += 1
            expected += chance
            if count < coming and count < last:
                continue
            coming = next_count(count)
            rate = expected / (verify(count) + sum(map(cost, drafting)) + late)
            if rate > best_rate:
                best_rate, best = rate, count
        counts: dict[int, int] = {}
        for _, at in gains[:best]:
            counts[at] = counts.get(at, 0) + 1
        return counts

    def _late(self, seq: Sequence, model: DrawnDrafts) -> float:
        """Return the seconds to catch up with a sequence, as far as they count for one step."""
        more = model.behind(seq) - 1
        if more <= 0:
            return 0.0
        seconds = model.seconds([1], 1 + more, seq.length) - model.seconds([1], 1, seq.length)
        return seconds / max(1, min(HORIZON, seq.max_length - seq.length))

    def _probe(
        self, sequences: Listed[Sequence], most: Listed[int], room: int, model: DrawnDrafts
    ) -> tuple[dict[int, int], float]:
        """Choose the place and the drafts of the sequence to probe, and its cost in seconds; nothing if the cost is too
        high."""
        behind = [(model.behind(seq), at) for at, seq in enumerate(sequences) if most[at]]
        if not behind or room < 1:
            return {}, 0.0
        tokens, at = min(behind)
        count = min(most[at], room, PROBE_TOKENS)
        verify = self._seconds_of(sequences)
        # The whole step counts: the host's work for it, and for the one after, is not hidden behind the device.
        seconds = model.seconds([1] * count, tokens, sequences[at].length) + verify(count)
        if self._probes >= FIRST_PROBES and seconds > self._credit:
            return {}, 0.0
        return {at: count}, max(seconds, 1e-9)


def speculation_of(config: SpeculativeConfig, times: StepTimes) -> Speculation:
    """Return the policy of a method."""
    return ModelSpeculation(config, times) if config.drafts_by_model else Speculation(config, times)
