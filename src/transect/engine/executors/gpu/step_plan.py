"""Lay out a batch of the scheduler as a step of ``GPURunner``: positions of rows and tokens, and all inputs.

There are three layouts. In each, padding rows and tokens (``-``) extend a step to one of the few sizes that kernels and
CUDA graphs are made for (``step_sizes.py``).

1. Steps that only decode. One token and one draw a row, the longest sequence first; a graph for each number of rows.

       rows    0    1    2   |  3    4   ..  last
             +----+----+----+-----------------------+
       tokens| a  | b  | c  |  -    -   -    -    - |     padding rows: length 0, so attention and the cache leave
             +----+----+----+-----------------------+     them out, and their input is zeros

2. Steps with prefill chunks. Prompts first, in ``chunk_rows`` rows, then rows of one token. A graph if there are few
   tokens (``graph_tokens``).

       rows      0           1        2 ..        | chunk_rows ..           last
             +-----------+---------+--------------+----+----+----+--------------+
       tokens| a a a a a | b b b b |  (no tokens) | c  | d  | e  |  (no tokens) | - - - - -
             +-----------+---------+--------------+----+----+----+--------------+
               several tokens each                  one token each                tokens of no row

3. Steps with whole prompts: those that stand in the step from their first token on come last, after all others, where
   an attention kernel of their own finds them (``WholePrompts``). Every token has a row.

       rows    0    1    2    3  ..     | whole_row ..                       |                  last
             +----+----+----+-----------+-------------+----------------+-----+--------------------+
       tokens| a  | b  | c  | -  -  -   | d d d d d d | e e e e e e e e | - -|  (no tokens)       |
             +----+----+----+-----------+-------------+----------------+-----+--------------------+
               others         padding     ^ whole_from  the whole prompts  tail: one row up to a multiple
                                                                           of ``pad_tokens``

   Others that only decode are filled up like a step of layout 1, a padding row for each token; else one padding row
   has all tokens up to ``whole_from``.

In layouts 2 and 3 padding rows and tokens write to a block of the cache that no sequence has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ....models.context import WholePrompts
from ...scheduling.batch import PLACEHOLDER, Draw, ScheduledBatch, ScheduledRow
from ..adapter_slots import AdapterSlots
from .adjust_state import AdjustState
from .sequence_table import SequenceTable
from .step_inputs import StepFields, StepLayout, StepMemory
from .step_sizes import FEWEST_ROWS, mixed_size, ragged_rows, row_bucket, width_bucket


class Variant(NamedTuple):
    """Extra sampling work in a step. If any is set, the step runs as two CUDA graphs; each combination has its own
    graph of the draws."""

    adjust: bool = False
    logprobs: bool = False
    masked: bool = False
    """True if some draws are under a grammar: all draws then wait for the masks."""


class StepPlan(NamedTuple):
    """A step in host memory."""

    layout: StepLayout
    decode: bool
    """True if each row has one token and one draw: the step is padded, and can use a graph."""
    seq_ids: list[int]
    """Sequences of the draws."""
    draws: Sequence[Draw]
    variant: Variant
    alternatives: Sequence[int]
    starts: list[int]
    """Index of each row's first token."""
    rows: Sequence[ScheduledRow] = ()
    """Scheduled rows, in the order of ``starts``."""
    whole: WholePrompts | None = None
    graph: bool = False
    """True if the step does not only decode, but is of a kind that recurs."""
    prune: bool = False
    """True if the last layer computes only the tokens that the draws need."""
    chunk_rows: int | None = None
    """Rows of the layout reserved for prompts, before the rows of one token; None if both kinds are mixed."""
    adapters: bool = False
    """A row has an adapter."""
    fresh: bool = False
    """Rows are drafts, and attend to keys of each other that this step writes."""


class _RaggedShape(NamedTuple):
    """Layout of a step with prefill chunks."""

    tokens: int
    rows: int
    places: list[int]
    """Row of the layout for each scheduled row."""
    first_whole: int
    """Number of rows before the whole prompts."""
    whole_row: int
    whole_from: int
    """Index, of row and token, at which the whole prompts begin."""
    width: int
    """Columns of the block table."""
    padding: list[tuple[int, int]]
    """Padding rows and their tokens. With whole prompts every token has a row, so that all computed values are
    finite. (A tile of values that reaches past the end of a prompt is multiplied with zeros, and 0 * NaN is
    NaN.)"""
    graph: bool = False
    chunk_rows: int | None = None


def _only_decode(rows: Sequence[ScheduledRow]) -> bool:
    """Return True if each row has one token, and one draw for its own sequence."""
    return all(
        row.num_tokens == 1
        and len(row.draws) == 1
        and row.draws[0].seq_id == row.seq_id
        and row.prompt_logprobs is None
        and row.pooling is None
        for row in rows
    )


class _Group:
    """Sequences that decode together over several steps, with the inputs that do not change between the steps.

    The longest come first: programs of attention start in this order, and the last to end should be short ones.
    """

    __slots__ = ("adapters", "draws", "fresh", "grown", "order", "sampling", "seq_ids", "slots", "starts")

    def __init__(
        self, rows: Sequence[ScheduledRow], table: SequenceTable, step: int, adapters: Sequence[int] | None
    ) -> None:
        self.order = sorted(range(len(rows)), key=lambda index: rows[index].start, reverse=True)
        """Order of the rows as indices of the scheduled rows; all other fields follow this order."""
        self.adapters = None if adapters is None else np.array([adapters[index] for index in self.order], np.int32)
        """Slots of the rows' adapters; None if no row has one."""
        self.slots = np.array([table.row(rows[index], step) for index in self.order])
        self.starts = np.array([rows[index].start for index in self.order], np.int32)
        self.draws = [rows[index].draws[0] for index in self.order]
        for draw in self.draws:
            table.draw(draw, step)
        self.seq_ids = [draw.seq_id for draw in self.draws]
        self.fresh = any(row.drafts for row in rows)
        """See ``StepPlan.fresh``."""
        self.sampling: tuple[Variant, Sequence[int]] = Variant(), ()
        self.grown: deque[tuple[int, np.ndarray]] = deque(maxlen=8)
        """Latest steps, each with the rows that had a new block."""


class StepPlanner:
    """Plan steps in order; values of sequences that do not change between steps are kept.

    Args:
        adjust: device state of requests with penalties or biases.
        block_size, max_blocks, padding_block: of the KV cache; of one sequence; the block that padding writes to.
        max_num_seqs: sequences that a step may have.
        max_draws: draws that a step may have.
        inputs_at: offset of the step's inputs on the device, in bytes from the beginning of the arena.
        whole_prompts, prune_last_layer, graph_tokens, fine_rows, pad_tokens: see ``GPURunner``.
        depth: stages of the pipeline, which is also the number of groups that decode in turns.
        ahead: positions between the end of a row and the token that it draws; its block table covers them.
    """

    def __init__(
        self,
        adjust: AdjustState,
        *,
        block_size: int,
        max_blocks: int,
        padding_block: int,
        max_num_seqs: int,
        max_draws: int,
        inputs_at: int,
        whole_prompts: tuple[int, int] | None,
        prune_last_layer: bool,
        graph_tokens: int,
        fine_rows: bool,
        pad_tokens: int,
        depth: int,
        ahead: int = 0,
    ) -> None:
        self._adjust = adjust
        self._sequences = SequenceTable(max_num_seqs, max_blocks, block_size, depth, ahead)
        self._ahead = ahead
        self._block_size, self._max_blocks, self._padding_block = block_size, max_blocks, padding_block
        self._max_num_seqs = max_num_seqs
        self._max_draws = max_draws
        self._inputs_at = inputs_at
        self._whole_prompts = whole_prompts
        self._prune_last_layer = prune_last_layer
        self._graph_tokens = graph_tokens
        self._fine_rows = fine_rows
        self._pad_tokens = pad_tokens
        self._groups: deque[_Group | None] = deque([None] * depth, maxlen=depth)
        """Group decoded by each of the last steps, if the step did nothing else; oldest first."""
        self.step = 0
        """Steps planned so far."""
        self.feeds = True
        """True if a step reads its tokens where the step before leaves them on the device."""

    def forget(self) -> None:
        """Forget all sequences: the steps before are void."""
        self._sequences.forget()
        self._groups.extend([None] * len(self._groups))

    def plan(self, batch: ScheduledBatch, memory: StepMemory, slots: AdapterSlots | None = None) -> StepPlan:
        """Plan the next step, with its numbers in ``memory``.

        ``slots``: of the rows' adapters; None if no row has one.
        """
        self.step += 1
        rows = batch.rows
        group = self._groups[0]
        if group is not None and batch.again:
            group.starts = group.starts + 1
        else:
            adapters = None if slots is None else slots.place(rows)
            group = _Group(rows, self._sequences, self.step, adapters) if _only_decode(rows) else None
        self._groups.append(group)
        if group is None:
            memory.holds = None
            return self._ragged(batch, memory.memory, adapters)
        return self._decode(rows, group, memory)

    def _decode(self, rows: Sequence[ScheduledRow], group: _Group, memory: StepMemory) -> StepPlan:
        """Plan a step of one token and one draw a row, padded to the size of a graph."""
        table, step, slots, starts = self._sequences, self.step, group.slots, group.starts
        count = len(rows)
        ends = starts + 1
        grown = table.grown(slots, ends, step)
        for index in grown.tolist():
            table.row(rows[group.order[index]], step)
        group.grown.append((step, grown))
        bucket = row_bucket(count, self._fine_rows)
        width = width_bucket(-(-int(ends.max() + self._ahead) // self._block_size), self._block_size, self._max_blocks)
        layout = StepLayout(bucket, bucket, bucket, width)
        fields = memory.fields(layout)
        fields.position[:count], fields.length[:count] = starts, ends
        fed = (table.drawn_step[slots] == step - 1) & (table.drawn_position[slots] == starts) & self.feeds
        source = self.token_source(layout)
        source[:count][fed] = table.drawn_index[slots[fed]]
        source[count:] = -1  # no token: zeros all the way, which take less power than numbers
        fields.source[:] = source
        fields.token[:] = 0
        for index in np.flatnonzero(~fed).tolist():
            fields.token[index] = max(0, rows[group.order[index]].token_ids[0])
        if memory.holds == (group, layout) and group.grown[0][0] <= memory.step + 1:
            for written, grown in group.grown:
                if written > memory.step:
                    fields.table[grown] = table.table[slots[grown], :width]
            fields.draw_position[:count] = ends + self._ahead
            self._note_draws(slots, ends)
            variant, alternatives = group.sampling
        else:
            fields.table[:count] = table.table[slots, :width]
            # No length: attention spends no time on these rows, and nothing of theirs is written to the cache.
            fields.position[count:], fields.length[count:], fields.table[count:] = 0, 0, self._padding_block
            fields.start[:], fields.last[:] = np.arange(bucket + 1), np.arange(bucket)
            fields.adapter[:count] = -1 if group.adapters is None else group.adapters
            fields.adapter[count:] = -1
            group.sampling = variant, alternatives = self._draws(fields, group.draws, slots, ends)
            # Where logits are adjusted, what is done to them may be another thing at the next position.
            memory.holds = None if variant.adjust else (group, layout)
        memory.step = step
        plan = StepPlan(layout, True, group.seq_ids, group.draws, variant, alternatives, [])
        if group.adapters is None and not group.fresh:
            return plan
        return plan._replace(adapters=group.adapters is not None, fresh=group.fresh)

    def _ragged(self, batch: ScheduledBatch, memory: np.ndarray, adapters: Sequence[int] | None) -> StepPlan:
        """Plan a step with rows of any kind; tokens, rows and draws are padded."""
        table, step = self._sequences, self.step
        shape, rows = self._ragged_shape(batch)
        slots = [table.row(row, step) for row in rows]
        draws = [draw for row in rows for draw in row.draws]
        draw_slots = np.array([table.draw(draw, step) for draw in draws], np.int64)
        ends = np.array([row.end for row in rows], np.int32)
        room = row_bucket(len(draws)) if draws else 0
        if shape.graph:
            room = min(max(shape.rows, room), self._max_draws)
        layout = StepLayout(shape.tokens, shape.rows, room, shape.width)
        width = shape.width
        fields = layout.numpy(memory)
        places = np.array(shape.places)
        fields.length[:], fields.table[:] = 0, self._padding_block
        fields.length[places], fields.table[places] = ends, table.table[slots, :width]
        fields.source[:] = self.token_source(layout)
        fields.token[:], fields.position[:], fields.adapter[:] = 0, 0, -1
        adapter_of = dict(zip((row.seq_id for row in batch.rows), adapters or (), strict=False))
        starts: list[int] = []
        positions: list[int] = []
        last: list[int] = []
        draw_rows: list[int] = []
        at = 0
        counts = np.zeros(shape.rows, np.int32)
        for index, (row, slot, place) in enumerate(zip(rows, slots, shape.places, strict=True)):
            if index == shape.first_whole:
                at = shape.whole_from
            starts.append(at)
            tokens_new = row.token_ids
            at += len(tokens_new)
            counts[place] = len(tokens_new)
            if tokens_new[-1] == PLACEHOLDER:
                tokens_new[-1] = 0  # a sequence that failed has no token; its step is void
                if table.drawn_step[slot] == step - 1 and table.drawn_position[slot] == row.end - 1:
                    fields.source[at - 1] = table.drawn_index[slot]
            fields.token[starts[-1] : at] = tokens_new
            fields.position[starts[-1] : at] = np.arange(row.start, row.end)
            fields.adapter[starts[-1] : at] = adapter_of.get(row.seq_id, -1)
            for _ in row.draws:
                last.append(at - 1)
                draw_rows.append(place)
                positions.append(row.end)
        for place, tokens in shape.padding:
            counts[place] = fields.length[place] = tokens
        fields.start[0] = 0
        np.cumsum(counts, out=fields.start[1:])
        fields.last[: len(last)], fields.last[len(last) :] = last, 0
        fields.draw_row[: len(last)], fields.draw_row[len(last) :] = draw_rows, 0
        variant, alternatives = self._draws(fields, draws, draw_slots, np.array(positions, np.int32))
        whole = WholePrompts(shape.whole_row, shape.whole_from) if shape.first_whole < len(rows) else None
        prune = self._prune_last_layer and all(row.prompt_logprobs is None and row.pooling is None for row in rows)
        plan = StepPlan(layout, False, [draw.seq_id for draw in draws], draws, variant, alternatives, starts)
        plan = plan._replace(rows=rows, whole=whole, prune=prune, graph=shape.graph, chunk_rows=shape.chunk_rows)
        return plan._replace(adapters=adapters is not None, fresh=any(row.drafts for row in rows))

    def _ragged_shape(self, batch: ScheduledBatch) -> tuple[_RaggedShape, Sequence[ScheduledRow]]:
        """Place the rows of a step with prefill chunks; returns the shape, and the rows in its order.

        Prompts that stand in the step from their first token on come last, if they are worth a kernel of their own;
        else all prompts come first.
        """
        pad = self._pad_tokens
        rows: Sequence[ScheduledRow] = batch.rows
        blocks = -(-(max(row.end for row in rows) + self._ahead) // self._block_size)
        width = width_bucket(blocks, self._block_size, self._max_blocks)
        graph = batch.num_tokens <= self._graph_tokens
        if not graph and self._whole_prompts is not None:
            whole = [row for row in rows if row.start == 0 and row.num_tokens > 1]
            tokens = sum(row.num_tokens for row in whole)
            least, mean = self._whole_prompts
            tail = -tokens % pad
            filled = -(-(len(whole) + bool(tail)) // FEWEST_ROWS) * FEWEST_ROWS
            if whole and tokens >= max(least, mean * filled):
                others = [row for row in rows if row.start or row.num_tokens == 1]
                before = sum(row.num_tokens for row in others)
                padding: list[tuple[int, int]] = []
                place = start = 0
                if before == len(others) > 0:  # they only decode, and go the way of steps that do
                    place = start = max(FEWEST_ROWS, row_bucket(before))
                    padding = [(row, 1) for row in range(before, place)]
                elif others:
                    place = max(FEWEST_ROWS, row_bucket(len(others) + 1))
                    start = -(-before // pad) * pad
                    start += pad if start == place else 0
                    padding = [(len(others), start - before)]
                if tail:
                    padding.append((place + len(whole), tail))
                tokens += start + tail
                count = place + filled + (FEWEST_ROWS if place + filled == tokens else 0)
                places = [*range(len(others)), *range(place, place + len(whole))]
                return _RaggedShape(tokens, count, places, len(others), place, start, width, padding), [*others, *whole]
        chunks = [row for row in rows if row.num_tokens > 1]
        singles = [row for row in rows if row.num_tokens == 1]
        first = None
        places = list(range(len(rows)))
        if graph or (chunks and singles):
            first = max(FEWEST_ROWS, row_bucket(len(chunks)))
            places[len(chunks) :] = range(first, first + len(singles))
        if graph:
            room = (first or 0) + len(singles), blocks, self._block_size, self._max_blocks
            tokens, count, width = mixed_size(batch.num_tokens, *room, FEWEST_ROWS + self._max_num_seqs)
        else:
            tokens = -(-batch.num_tokens // pad) * pad
            count = ragged_rows(tokens, places[-1] + 1)
        shape = _RaggedShape(tokens, count, places, len(rows), 0, 0, width, [], graph, first)
        return shape, [*chunks, *singles]

    def _draws(
        self, fields: StepFields, draws: Sequence, slots: np.ndarray, positions: np.ndarray
    ) -> tuple[Variant, Sequence[int]]:
        """Fill in the parameters of the draws; draws beyond the last are greedy."""
        table, step = self._sequences, self.step
        count = len(draws)
        for name in ("seed", "choice", "top_k", "temperature", "top_p", "min_p", "repetition", "frequency", "presence"):
            field = getattr(fields, name)
            field[:count] = getattr(table, name)[slots]
            field[count:] = 0
        ends, positions = positions, positions + self._ahead
        fields.draw_position[:count], fields.draw_position[count:] = positions, 0
        fields.state[:] = -1
        adjusted = table.adjusted[slots] | (positions < table.masked_until[slots])
        for index in np.flatnonzero(adjusted).tolist():
            fields.state[index] = self._adjust.line(draws[index], int(positions[index]), step)
        fields.mask[:] = -1
        masked = [index for index, draw in enumerate(draws) if draw.constraint is not None]
        fields.mask[masked] = np.arange(len(masked))
        self._note_draws(slots, ends)
        alternatives = table.logprobs[slots]
        wanted = bool((alternatives >= 0).any())
        variant = Variant(bool(adjusted.any()), wanted, bool(masked))
        return variant, alternatives.tolist() if wanted else ()

    def _note_draws(self, slots: np.ndarray, positions: np.ndarray) -> None:
        """Record the locations of this step's drawn tokens."""
        table = self._sequences
        table.drawn_step[slots], table.drawn_position[slots] = self.step, positions
        table.drawn_index[slots] = np.arange(len(slots))

    def token_source(self, layout: StepLayout) -> np.ndarray:
        """Return the locations of ``token``, as int64 indices from the beginning of the arena."""
        at = layout.places()[StepFields._fields.index("token")][0]
        return np.arange(layout.tokens, dtype=np.int32) + (self._inputs_at + at) // 8
