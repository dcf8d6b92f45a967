"""Draft with a smaller model of the same vocabulary (Leviathan et al. 2023; Chen et al. 2023).

The drafts are *draws* of the small model with the noise of the large one: the same seed, choice and position. So where
both models agree on the distribution, they draw the same token at any temperature, and a draft is accepted where it
equals the draw of the large model.

The small model has an executor and a pool of KV blocks of its own. A sequence that drafts for the first time, or again
after steps without drafts, is caught up with: tokens that its prefix cache holds are not computed again. After wrong
drafts the KV after the last right one is overwritten. When the pool is full, sequences that have not drafted for the
longest time lose their blocks.

Plain Python: batches go to an ``Executor``, as those of the engine do. All sequences that draft are one batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Listed

import msgspec

from ....costs.learning import StepTimes
from ....costs.steps import StepLoad
from ..batch import Clock, Executor, Handle, ScheduledBatch, ScheduledRow, StepResult
from ..kv_cache import KVCache
from ..request import Sequence
from ..sequence_blocks import SequenceBlocks
from .drafter import Timed

Drafts = dict[int, tuple[int, ...]]
"""Drafts by seq_id."""


class ModelDrafter:
    """Drafts for many sequences at once.

    Args:
        executor: runs the small model.
        num_blocks, block_size: its KV pool.
        max_tokens, max_rows: largest batch of the executor.
        max_model_len: most positions of a sequence that the small model knows.
        clock: measures its steps.
        enable_prefix_caching: find the KV of prompts that begin alike.
        agree: makes the drafts of several ranks the same; every rank must call it. None for one rank.
    """

    def __init__(
        self,
        executor: Executor,
        *,
        num_blocks: int,
        block_size: int,
        max_tokens: int,
        max_rows: int,
        max_model_len: int,
        clock: Clock,
        enable_prefix_caching: bool = True,
        agree: Callable[[Drafts], Drafts] | None = None,
    ) -> None:
        self.executor = executor
        self.max_rows, self.max_model_len = max_rows, max_model_len
        self.times = StepTimes()
        """Learned step times of the small model."""
        self.measured: list[Timed] = []
        """Steps since the last call of ``take_measured``."""
        self.seconds_spent = 0.0
        """Seconds of the last call of ``draft``."""
        self._max_tokens, self._clock, self._agree = max_tokens, clock, agree
        cache = KVCache(num_blocks, enable_prefix_caching=enable_prefix_caching)
        self._blocks = SequenceBlocks(cache, block_size)
        self._mirrors: dict[int, Sequence] = {}
        """The small model's state of each sequence that holds blocks, by seq_id; the last that drafted comes last."""
        self._known: dict[int, int] = {}
        """By seq_id: output tokens that were known at its last drafts."""
        self._step = self._number = 0
        self._ended = 0.0
        """When the last step was done."""

    def behind(self, seq: Sequence) -> int:
        """Return the number of known tokens that a first draft for ``seq`` has to compute, as far as is known."""
        mirror = self._mirrors.get(seq.seq_id)
        if mirror is None:
            return seq.length
        return seq.length - min(mirror.scheduled, seq.prompt_len + self._known[seq.seq_id])

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
            drafts by seq_id; fewer than wanted, or none, where there are no blocks, after a stop token, or where the
            small model finds no token to draw.
        """
        began = self._clock.now()
        counts: dict[int, int] = {}
        mirrors: dict[int, Sequence] = {}
        for seq, count in wanted:
            count = min(count, self.max_model_len - seq.length)
            if count <= 0 or len(mirrors) >= self.max_rows:
                continue
            mirror = self._prepare(seq, count, mirrors)
            if mirror is not None:
                mirrors[seq.seq_id], counts[seq.seq_id] = mirror, count
        self._catch_up(list(mirrors.values()))
        drafts: dict[int, list[int]] = {seq_id: [] for seq_id in mirrors}
        self._draw(mirrors, counts, drafts)
        for seq_id, mirror in mirrors.items():
            self._blocks.register(mirror, min(mirror.scheduled, mirror.prompt_len + self._known[seq_id]))
        found = {seq_id: tuple(tokens) for seq_id, tokens in drafts.items() if tokens}
        found = found if self._agree is None else self._agree(found)
        self.seconds_spent = self._clock.now() - began
        return found

    def ended(self, seq_id: int, output: list[int]) -> None:
        """Forget a sequence; its blocks may be found again by the prefix cache."""
        mirror = self._mirrors.pop(seq_id, None)
        if mirror is not None:
            del self._known[seq_id]
            self._blocks.release(mirror)

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
        self._mirrors.clear()
        self._known.clear()
        self.measured = []
        self._blocks.reset(self._step)

    def clear_cache(self) -> None:
        """Forget the KV of prefixes that no sequence holds."""
        self._blocks.cache.clear()

    # One call of ``draft``

    def _prepare(self, seq: Sequence, count: int, kept: dict[int, Sequence]) -> Sequence | None:
        """Bring the state of a sequence up to its known tokens, with blocks for ``count`` drafts; None if there are too
        few blocks. Sequences in ``kept`` keep theirs."""
        mirror, output = self._mirrors.pop(seq.seq_id, None), seq.output_token_ids
        end = seq.length + count - 1  # the last draft is not computed
        if mirror is None:
            mirror = Sequence(seq.request, seq.seq_id, seq.index, seq.rank, seq.draws[0].seed)
            mirror.output_token_ids.extend(output)
            mirror.length = seq.length
            cached = self._blocks.find_prefix(mirror)
            needed = self._blocks.blocks_for(end) - len(cached) + self._blocks.cache.count_unused(cached)
            if not self._free_blocks(needed, kept):
                return None
            cached = self._blocks.find_prefix(mirror)  # some may have been evicted
            needed = self._blocks.blocks_for(seq.length) - len(cached) + self._blocks.cache.count_unused(cached)
            if needed > self._blocks.cache.num_free:
                return None
            self._blocks.place(mirror, cached)
        else:
            tokens, same = mirror.output_token_ids, self._known[seq.seq_id]
            while same < min(len(tokens), len(output)) and tokens[same] == output[same]:
                same += 1
            del tokens[same:]
            tokens.extend(output[same:])
            mirror.length = seq.length
            mirror.scheduled = min(mirror.scheduled, seq.prompt_len + same, seq.length - 1)
        self._mirrors[seq.seq_id] = mirror
        self._known[seq.seq_id] = len(output)
        while len(mirror.block_ids) < self._blocks.blocks_for(end):
            if not self._free_blocks(1, kept | {seq.seq_id: mirror}) or not self._blocks.grow(mirror):
                return None
        self._number += 1  # executors remember what a number drew last, which may have been wrong
        mirror.constraint = None if seq.constraint is None else seq.constraint.fork()
        mirror.draws = (msgspec.structs.replace(mirror.draws[0], seq_id=self._number, constraint=mirror.constraint),)
        return mirror

    def _free_blocks(self, needed: int, kept: dict[int, Sequence]) -> bool:
        """Take blocks of sequences that are not in ``kept`` until ``needed`` are free."""
        for seq_id in list(self._mirrors):
            if self._blocks.cache.num_free >= needed:
                return True
            if seq_id not in kept:
                self.ended(seq_id, [])
        return self._blocks.cache.num_free >= needed

    def _catch_up(self, mirrors: list[Sequence]) -> None:
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

    def _draw(self, mirrors: dict[int, Sequence], counts: dict[int, int], drafts: dict[int, list[int]]) -> None:
        """Draw token after token. An executor that computes beside the host gets the next step before its result is
        taken."""
        live = set(mirrors)
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
                    if seq_id in live and not self._take(mirrors[seq_id], result, drafts[seq_id]):
                        live.discard(seq_id)

        for depth in range(max(counts.values(), default=0)):
            ids = [seq_id for seq_id in mirrors if seq_id in live and counts[seq_id] > depth]
            if not ids:
                break
            rows = []
            for seq_id in ids:
                mirror = mirrors[seq_id]
                rows.append(self._row(mirror, mirror.length - mirror.scheduled, draws=True))
                mirror.scheduled = mirror.length
                mirror.length += 1
            handle, load, began = self._submit(rows, again=depth > 0 and ids == before)
            take()
            handle.draw()
            pending, before = (ids, handle, load, began), ids
            if getattr(handle, "over", False):
                take()
        take()

    def _take(self, mirror: Sequence, result: StepResult, drafts: list[int]) -> bool:
        """Append what was drawn for a sequence. False if nothing can follow."""
        token = result.tokens.get(mirror.draws[0].seq_id)
        if token is None:
            return False
        constraint = mirror.constraint
        if constraint is not None and constraint.accept(token) is not None:
            return False
        mirror.output_token_ids.append(token)
        drafts.append(token)
        return token not in mirror.stop_ids and not (constraint is not None and constraint.terminated)

    def _row(self, mirror: Sequence, take: int, *, draws: bool) -> ScheduledRow:
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
