"""Draft with an executor of its own: all sequences that draft are one batch, and each step draws one token of each.

The drafts are *draws* with the noise of the engine's model: the same seed, choice and position. So where both
distributions agree, they draw the same token at any temperature, and a draft is accepted where it equals the draw of
the engine's model.

Plain Python: batches go to an ``Executor``, as those of the engine do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Listed
from typing import Protocol

from ....costs.learning import StepTimes
from ....costs.steps import StepLoad
from ..batch import Clock, Draw, Executor, Handle, ScheduledBatch, ScheduledRow, StepResult
from ..constraint import Constraint
from ..request import Sequence
from .drafter import Timed, forced_after

Drafts = dict[int, tuple[int, ...]]
"""Drafts by seq_id."""


class Drafting(Protocol):
    """State of a sequence in the executor that drafts; fields as in ``Sequence``, a subset of them."""

    prompt_token_ids: tuple[int, ...]
    output_token_ids: list[int]
    block_ids: list[int]
    length: int
    """Tokens that are known or drafted."""
    scheduled: int
    """Tokens that are computed, or in the step in flight."""
    draws: tuple[Draw, ...]
    constraint: Constraint | None
    stop_ids: tuple[int, ...]


class DrawnDrafts:
    """Drafts for many sequences at once; subclasses keep the state of each sequence.

    Args:
        executor: computes and draws.
        max_tokens, max_rows: largest batch of the executor.
        max_model_len: most positions of a sequence that it knows.
        clock: measures its steps.
        agree: makes the drafts of several ranks the same; every rank must call it. None for one rank.
    """

    def __init__(
        self,
        executor: Executor,
        *,
        max_tokens: int,
        max_rows: int,
        max_model_len: int,
        clock: Clock,
        agree: Callable[[Drafts], Drafts] | None = None,
    ) -> None:
        self.executor = executor
        self.max_rows, self.max_model_len = max_rows, max_model_len
        self.times = StepTimes()
        """Learned step times."""
        self.measured: list[Timed] = []
        """Steps since the last call of ``take_measured``."""
        self.seconds_spent = 0.0
        """Seconds of the last call of ``draft``."""
        self._max_tokens, self._clock, self._agree = max_tokens, clock, agree
        self._step = self._number = 0
        self._ended = 0.0
        """When the last step was done."""

    # For subclasses

    def behind(self, seq: Sequence) -> int:
        """Return the number of known tokens that a first draft for ``seq`` has to compute, as far as is known."""
        raise NotImplementedError

    def ended(self, seq_id: int, output: list[int]) -> None:
        """Forget a sequence."""
        raise NotImplementedError

    def clear_cache(self) -> None:
        """Forget the KV of prefixes that no sequence holds."""

    def _forget_all(self) -> None:
        """Forget all sequences and KV."""
        raise NotImplementedError

    def _prepare(self, seq: Sequence, count: int, kept: set[int]) -> Drafting | None:
        """Bring the state of a sequence up to its known tokens, with room for ``count`` drafts; None if there is none.
        The states of sequences in ``kept`` must stay."""
        raise NotImplementedError

    def _computed(self, seq_id: int, state: Drafting) -> None:
        """Note that drafts for a sequence are done."""

    # For everyone

    def seconds(self, rows: Listed[int], behind: int, length: int) -> float:
        """Predict the seconds of drafting.

        Args:
            rows: sequences that draft a first, a second, ... token.
            behind: known tokens to compute before the first draft, in all.
            length: mean length of the sequences.
        """
        if not rows:
            return 0.0
        more = max(behind - rows[0], 0)
        first = StepLoad(rows[0] + more, rows[0] * length, more * length)
        return self.times.predict(first) + sum(self.times.predict(StepLoad(n, n * length)) for n in rows[1:])

    def draft(self, wanted: Iterable[tuple[Sequence, int]]) -> Drafts:
        """Draft tokens after the known tokens of sequences; all of them must be known.

        Args:
            wanted: sequences, and the number of drafts of each.

        Returns:
            drafts by seq_id; fewer than wanted, or none, where there are no blocks, after a stop token, or where there
            is no token to draw.
        """
        began, steps = self._clock.now(), len(self.measured)
        counts: dict[int, int] = {}
        mirrors: dict[int, Drafting] = {}
        for seq, count in wanted:
            count = min(count, self.max_model_len - seq.length)
            if count <= 0 or len(mirrors) >= self.max_rows:
                continue
            mirror = self._prepare(seq, count, set(mirrors))
            if mirror is not None:
                mirrors[seq.seq_id], counts[seq.seq_id] = mirror, count
        self._catch_up(list(mirrors.values()))
        drafts: dict[int, list[int]] = {seq_id: [] for seq_id in mirrors}
        self._draw(mirrors, counts, drafts)
        for seq_id, mirror in mirrors.items():
            self._computed(seq_id, mirror)
        found = {seq_id: tuple(tokens) for seq_id, tokens in drafts.items() if tokens}
        found = found if self._agree is None else self._agree(found)
        self.seconds_spent = self._clock.now() - began
        # Work of the host before and between the steps is as much a part of drafting: the steps share it.
        taken = sum(seconds for _, seconds in self.measured[steps:])
        if taken > 0:
            share = self.seconds_spent / taken
            self.measured[steps:] = [(load, share * seconds) for load, seconds in self.measured[steps:]]
        return found

    def take_measured(self) -> list[Timed]:
        """Return the steps measured since the last call."""
        measured, self.measured = self.measured, []
        return measured

    def learn(self, measured: Iterable[Timed]) -> None:
        """Learn from measured steps."""
        for load, seconds in measured:
            self.times.learn(load, seconds)

    def abandon(self) -> None:
        """Forget all sequences and KV, because a step has raised."""
        abandon = getattr(self.executor, "abandon", None)
        if abandon is not None:
            abandon()
        self.measured = []
        self._forget_all()

    # One call of ``draft``

    def _catch_up(self, mirrors: list[Drafting]) -> None:
        """Compute known tokens, until the rest fits into the step of the first draft."""
        while sum(mirror.length - mirror.scheduled for mirror in mirrors) > self._max_tokens:
            rows, room = [], self._max_tokens
            for mirror in mirrors:
                take = min(mirror.length - 1 - mirror.scheduled, room)
                if take > 0:
                    rows.append(self._row(mirror, take, draws=False))
                    mirror.scheduled += take
                    room -= take
            handle, load, began = self._submit(rows, again=False)
            handle.draw()
            handle.result()
            self._note(load, began)

    def _draw(self, mirrors: dict[int, Drafting], counts: dict[int, int], drafts: dict[int, list[int]]) -> None:
        """Draw token after token. An executor that computes beside the host gets the next step before its result is
        taken, unless a grammar may force tokens, which join the drafts without a draw."""
        live = set(mirrors)
        left = dict(counts)  # drafts that are not drawn yet
        before: list[int] = []
        pending: tuple[list[int], Handle, StepLoad, float] | None = None

        def take() -> None:
            nonlocal pending
            if pending is not None:
                ids, handle, load, began = pending
                pending = None
                result = handle.result()
                self._note(load, began)
                for seq_id in ids:
                    if seq_id not in live:
                        continue
                    forced = self._take(mirrors[seq_id], result, drafts[seq_id], left[seq_id])
                    if forced is None:
                        live.discard(seq_id)
                    else:
                        left[seq_id] -= forced

        for depth in range(max(counts.values(), default=0)):
            if any(mirrors[seq_id].constraint is not None for seq_id in live):
                take()
            ids = [seq_id for seq_id in mirrors if seq_id in live and left[seq_id] > 0]
            if not ids:
                break
            rows, single = [], True
            for seq_id in ids:
                mirror = mirrors[seq_id]
                rows.append(self._row(mirror, mirror.length - mirror.scheduled, draws=True))
                single = single and rows[-1].num_tokens == 1
                mirror.scheduled = mirror.length
                mirror.length += 1
                left[seq_id] -= 1
            handle, load, began = self._submit(rows, again=depth > 0 and single and ids == before)
            take()
            handle.draw()
            pending, before = (ids, handle, load, began), ids
            if getattr(handle, "over", False):
                take()
        take()

    def _take(self, mirror: Drafting, result: StepResult, drafts: list[int], left: int) -> int | None:
        """Append what was drawn for a sequence, and up to ``left`` tokens that its grammar forces after it. Returns the
        number of those; None if nothing can follow."""
        token = result.tokens.get(mirror.draws[0].seq_id)
        if token is None:
            return None
        constraint = mirror.constraint
        if constraint is not None and constraint.accept(token) is not None:
            return None
        tokens = [token]
        if token not in mirror.stop_ids and constraint is not None and not constraint.terminated:
            tokens += forced_after(constraint, left, mirror.stop_ids)
        mirror.output_token_ids += tokens
        drafts += tokens
        mirror.length += len(tokens) - 1
        ended = tokens[-1] in mirror.stop_ids or (constraint is not None and constraint.terminated)
        return None if ended else len(tokens) - 1

    def _row(self, mirror: Drafting, take: int, *, draws: bool) -> ScheduledRow:
        return ScheduledRow(
            mirror.draws[0].seq_id,
            mirror.scheduled,
            take,
            mirror.prompt_token_ids,
            mirror.output_token_ids,
            mirror.block_ids,
            mirror.draws if draws else (),
        )

    def _submit(self, rows: list[ScheduledRow], *, again: bool) -> tuple[Handle, StepLoad, float]:
        self._step += 1
        batch = ScheduledBatch(self._step, tuple(rows), (), again)
        began = self._clock.now()
        return self.executor.submit(batch), StepLoad.of(batch.spans()), began

    def _note(self, load: StepLoad, began: float) -> None:
        """Measure a step that is done: from its start, or from the end of the step before."""
        now = self._clock.now()
        self.measured.append((load, now - max(began, self._ended)))
        self._ended = now
