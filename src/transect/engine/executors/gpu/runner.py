"""``GPURunner``: the executor for a device that works beside the host. It takes the same batches as ``Runner``.

A step is prepared in one piece of pinned memory, copied to the device once, computed and sampled there. Its tokens come
back by a copy that only ``result`` waits for (``step_ring.py``). So with ``EngineCore(lag=1)`` the host prepares step n
+ 1 while the device computes step n. Step n + 1 reads the input tokens that step n is about to draw on the device, from
where step n leaves them.

Steps that only decode are padded to one of a few sizes (``row_bucket``, ``width_bucket``) and replayed as CUDA graphs.
Padding rows belong to no sequence and have length 0. Small steps with prefill chunks are captured too, when their size
comes again (their padding rows write to a block of the cache that no sequence has). Large ones are launched kernel by
kernel; the arithmetic hides the launches.

Where draws need more than their logits (penalties, logit_bias, min_tokens, logprobs, grammars) a step is two graphs:
layers and head, one for all of these, and the draws, which take a millisecond to capture. Under grammars the draws
follow when their masks are known (``mask_table.py``), while the device computes the first.
``prompt_logprobs`` and pooled vectors are computed within ``submit``, which waits for the device.

All of it also runs on CPU tensors, without graphs and at once: that is how it is tested without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ....models.context import PagedContext, Wanted, WholePrompts
from ....models.decoder import Decoder
from ....ops.attention.paged.batch import PagedBatch
from ....ops.lang.jit import count_compilations
from ...scheduling.batch import Handle, LateWork, ScheduledBatch, StepResult
from ...scheduling.constraint import MaskFiller, fill_each
from ..adapter_slots import AdapterSlots
from ..penalties import Pick
from ..prompt_results import prompt_results
from ..runner import CompletedStep, Waiting, copy_blocks
from ..sampler import Sampler
from .adjust_state import AdjustState
from .device_sampling import OUTPUT_BYTES, Drawn, LogprobTensors, device_sampler
from .graphs import GraphCache
from .mask_table import MaskTable
from .pending_step import PendingStep
from .step_inputs import StepFields, StepLayout
from .step_plan import StepPlan, StepPlanner, Variant
from .step_ring import RING, StepRing, whole_lines
from .step_sizes import FEWEST_ROWS, MixedSize, mixed_sizes, row_bucket, token_bucket, width_bucket, widths

Sampled = LogprobTensors | Tensor | None
"""Sampling part of the result of ``_compute``."""


class GPURunner:
    """Run batches on the device of the caches; the host's work for a batch is done within ``submit``.

    Args:
        model: computes hidden states and logits.
        k_cache, v_cache: ``[layers, blocks + 1, kv_heads, block_size, head_dim]``; the last block is for padding.
        max_num_seqs, max_num_batched_tokens, max_model_len: the scheduler's limits.
        graphs: capture steps that only decode (on CUDA); False launches every kernel of every step.
        sample_on_device: False draws on the host from the step's logits, within ``submit``: there to compare with.
        whole_prompts: (tokens in all, tokens a row) from which prompts that a step holds from their first token on
            attend to their keys where the projection left them, not through the cache: another kernel, of other
            rounding. None for never.
        graph_tokens: most tokens of a step with prefill chunks that is captured too, when a step of its size occurs
            for the second time; its prompts go through the cache.
        fine_rows: see ``step_sizes.row_bucket``.
        prune_last_layer: steps with prefill chunks compute the last layer for those tokens only that something is drawn
            from (keys and values for all).
        copy_kernels: copies of inputs and results are kernels of the step, not copies before and after it; None for
            True on a GPU.
        fill_masks: makes the masks of draws under a grammar.
        pad_tokens: steps with prefill chunks are padded to a multiple of this number of tokens, so that kernels meet
            few sizes and none is compiled while requests wait; None for 16 on a GPU, else 1.
        stages: stages of the pipeline that this runner belongs to, which is also the number of steps in flight and of
            groups of sequences that decode in turns.
        anyone: logical OR of a flag over all ranks; every rank must call it.
    """

    ahead = 0
    """Positions between the end of a row and the token that it draws."""

    def __init__(
        self,
        model: Decoder,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        graphs: bool = True,
        sample_on_device: bool = True,
        whole_prompts: tuple[int, int] | None = None,
        prune_last_layer: bool = False,
        graph_tokens: int = 0,
        fine_rows: bool = False,
        copy_kernels: bool | None = None,
        pad_tokens: int | None = None,
        fill_masks: MaskFiller = fill_each,
        stages: int = 1,
        anyone: Callable[[bool], bool] = bool,
    ) -> None:
        pad_tokens = pad_tokens or (16 if k_cache.device.type == "cuda" else 1)
        self.model = self._model = model
        self._anyone = anyone
        self.adapters: AdapterSlots | None = None
        """Slots for the adapters of rows; None if no row has one."""
        self._k_cache, self._v_cache = k_cache, v_cache
        self._device = k_cache.device
        self._block_size = k_cache.shape[3]
        self._padding_block = k_cache.shape[1] - 1
        self._max_blocks = -(-max_model_len // self._block_size)
        self._max_draws = row_bucket(max_num_seqs)
        self._adjust = AdjustState(model.config.vocab_size, self._device, lines=4, depth=stages)
        self._sampler = device_sampler(self._device)
        self._part = model.head.ungathered() if sample_on_device else None
        """Head projection if ranks read each other's logits; None if this rank has all logits."""
        self._host_sampler = None if sample_on_device else Sampler(fill_masks)
        self._masks = MaskTable(model.config.vocab_size, self._max_draws, self._device, fill_masks, stages)
        self._host_tokens: dict[int, int] = {}
        self.graph_tokens = min(graph_tokens, max_num_batched_tokens)
        """Tokens of the largest step with prefill chunks that is captured."""
        sizes = {"graph_tokens": self.graph_tokens, "multiple": pad_tokens, "rows": max_num_seqs}
        self.padding = sizes | {"fine_rows": int(fine_rows)}
        """Padded step sizes, used by the step-time model; see ``step_sizes.py``."""
        self.launched = ""
        """Kind of launch of the newest step, without its draws; see ``Executor``."""
        self._whole_prompts = whole_prompts
        self._prune_last_layer = prune_last_layer
        # A step with prefill chunks is filled up in two places (see StepPlanner).
        rows = max(FEWEST_ROWS, self._max_draws)
        self._compilations: Callable[[], int] = int
        self._compiled_before = 0
        self._max_num_seqs = max_num_seqs
        most = max(max_num_batched_tokens, self._max_draws) + rows + 3 * pad_tokens
        self._most_tokens = most = max(most, token_bucket(self.graph_tokens, 0))
        largest = StepLayout(most, 3 * rows + 2 * FEWEST_ROWS, self._max_draws, self._max_blocks)
        self._inputs_at = whole_lines(OUTPUT_BYTES * self._max_draws)
        nbytes = self._inputs_at + whole_lines(largest.nbytes)
        self._arena = torch.zeros(nbytes, dtype=torch.uint8, device=self._device)
        """Device memory of steps: draws first, then inputs."""
        self._drawn = Drawn.tensors(self._arena, self._max_draws)
        cuda = self._device.type == "cuda"
        kernels = cuda if copy_kernels is None else copy_kernels
        self._ring = StepRing(self._arena, self._inputs_at, kernels=kernels, rows=max(RING, 2 * stages))
        self._stream = torch.cuda.Stream(self._device) if cuda else None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))  # what has been filled so far
        self.graphs = GraphCache(self._stream) if graphs and self._stream is not None else None
        self._planner = StepPlanner(
            self._adjust,
            block_size=self._block_size,
            max_blocks=self._max_blocks,
            padding_block=self._padding_block,
            max_num_seqs=max_num_seqs,
            max_draws=self._max_draws,
            inputs_at=self._inputs_at,
            whole_prompts=whole_prompts,
            prune_last_layer=prune_last_layer,
            graph_tokens=graph_tokens,
            fine_rows=fine_rows,
            pad_tokens=pad_tokens,
            depth=stages,
            ahead=self.ahead,
        )

    def abandon(self) -> None:
        """Wait for the device, and forget earlier steps and sequences (``Executor``)."""
        with self._on_stream():
            self._ring.failed()
        self._planner.forget()
        self._adjust.forget()
        self._host_tokens = {}

    @torch.inference_mode()
    def submit(self, batch: ScheduledBatch) -> Handle:
        """Start a step: copy blocks, compute the rows, draw. A row whose logits are not finite fails alone."""
        with self._on_stream():
            memory = self._ring.memory()
            copy_blocks(self._k_cache, self._v_cache, batch.block_copies)
            if self._model.taps is not None:
                self._model.taps.copy(batch.block_copies)
            plan = self._planner.plan(batch, memory, self.adapters)
            turn, hidden, sampled = self._run(plan)
            known = prompt_results(self._model, plan.rows, plan.starts, hidden)
            if turn is None and plan.variant.masked:
                return Waiting(partial(self._draw_masked, plan, known))
            if turn is None:
                sampled = self._draw(plan)
                return self._pending(self._ring.ended(), plan, sampled, known)
            if self._host_sampler is not None:
                self._ring.results(turn, self._stream)
                draw = partial(self._draw_on_host, self._host_sampler, batch, plan, sampled, known)
                return Waiting(draw) if plan.variant.masked else draw()
            return self._pending(turn, plan, sampled, known)

    @torch.inference_mode()
    def _draw_masked(self, plan: StepPlan, known: StepResult) -> Handle:
        """Launch the second part of a step with draws under grammars."""
        constraints = [draw.constraint for draw in plan.draws if draw.constraint is not None]
        ids = [draw.seq_id for draw in plan.draws if draw.constraint is not None]
        with self._on_stream():
            found = zip(ids, self._masks.send(constraints), strict=True)
            problems = {seq_id: problem for seq_id, problem in found if problem is not None}
            sampled = self._draw(plan)
            self._masks.used()
            return self._pending(self._ring.ended(), plan, sampled, known, problems)

    def _draw(self, plan: StepPlan) -> Sampled:
        """Launch the second part of a step."""
        generation = self._adjust.generation if plan.variant.adjust else 0
        key = "draws", plan.layout, plan.variant, generation
        return self._launch(key, partial(self._second_part, plan), plan)

    def _pending(
        self,
        turn: int,
        plan: StepPlan,
        sampled: Sampled,
        known: StepResult,
        problems: Mapping[int, str] | None = None,
    ) -> PendingStep:
        logprobs = sampled.to_host() if isinstance(sampled, LogprobTensors) else None
        output, ready = self._ring.results(turn, self._stream)
        more = plan.variant.adjust or plan.variant.masked, logprobs, plan.alternatives, problems or {}
        return PendingStep(ready, output, plan.seq_ids, known, self._max_draws, *more)

    @torch.inference_mode()
    def warm(self, rows: Sequence[int], tables: int | None = None, mixed: bool = False, drafts: bool = False) -> None:
        """Capture steps that only decode with these numbers of rows, for the narrowest ``tables`` of blocks (None for
        all), with ``drafts`` also those of drafts, and with ``mixed`` all steps with prefill chunks. Each kind of
        kernel runs once on padding rows, to be compiled and loaded; then graphs are captured without being run."""
        adapted = (False,) if self._model.adapters is None else (False, True)
        for adapters, fresh in product(adapted, (False, True)[: 1 + drafts]):
            self._warm_all(rows, tables, mixed and not fresh, adapters, fresh)
        if self._stream is not None:
            self._stream.synchronize()

    def _warm_all(self, rows: Sequence[int], tables: int | None, mixed: bool, adapters: bool, fresh: bool) -> None:
        """Do ``warm`` for steps in which a row has an adapter, or none has, and with drafts (``fresh``) or without."""
        met: set[tuple[str, int]] = set()
        for width in widths(self._block_size, self._max_blocks)[:tables]:
            for count in rows:
                kinds = {("decodes", count), ("width", width)}
                self._warm(StepLayout(count, count, count, width), run=not kinds <= met, adapters=adapters, fresh=fresh)
                met |= kinds
        for size in self.mixed_sizes() if mixed else ():
            kinds = set(zip(MixedSize._fields, size, strict=True))
            self._run_chunks(size, self._warm, run=not kinds <= met, adapters=adapters)
            met |= kinds

    def _warm(
        self, layout: StepLayout, starts: Sequence[int] | None = None, *, run: bool, decode: bool = True, **changes: Any
    ) -> None:
        """Capture a kind of step; with ``run``, or if that fails, run it on padding first."""
        changes |= {"decode": decode, "graph": True}
        plan = StepPlan(layout, True, [], (), Variant(), (), [])._replace(**changes)
        if run or self.graphs is None:
            self._run_padding(layout, starts, eager=True, **changes)
        if self.graphs is None:
            return
        with self._on_stream():
            key, work = self._key(plan, False), partial(self._step, plan, False)
            failed: RuntimeError | None = None
            try:
                self.graphs.prepare(key, work)
            except RuntimeError as error:  # a kernel that could not be loaded within a capture
                failed = error
            if self._anyone(failed is not None):  # a step takes all ranks
                if run:
                    raise failed or RuntimeError("another rank could not capture a CUDA graph")
                self._run_padding(layout, starts, eager=True, **changes)
                self.graphs.prepare(key, work)

    def started(self) -> None:
        """Mark the end of start-up: from now on ``late_work`` counts."""
        if self.graphs is not None:
            self.graphs.started = True
        self._compilations = count_compilations()
        self._compiled_before = self._compilations()

    def late_work(self) -> LateWork:
        """Return counts of graphs captured and kernels compiled since ``started``; zeros before it."""
        captures = 0 if self.graphs is None else self.graphs.late
        return LateWork(captures, self._compilations() - self._compiled_before)

    def mixed_sizes(self) -> list[MixedSize]:
        """Return the sizes of steps with prefill chunks that have graphs."""
        return mixed_sizes(self.graph_tokens, self._block_size, self._max_blocks, self._max_num_seqs)

    @torch.inference_mode()
    def compile(self, rows: int, tokens_each: int, draws: int, variant: Variant | None = None) -> None:
        """Run one kind of step on padding alone, eagerly, so that its kernels are compiled; ``tokens_each`` 1 is a step
        that only decodes, at both widths of ``warm``."""
        narrow = width_bucket(-(-tokens_each // self._block_size), self._block_size, self._max_blocks)
        wide = width_bucket(narrow + 1, self._block_size, self._max_blocks)
        for width in {narrow, wide} if tokens_each == 1 else {narrow}:
            layout = StepLayout(rows * tokens_each, rows, draws, width)
            self._run_padding(layout, decode=tokens_each == 1, variant=variant or Variant(), eager=True)
        if self._stream is not None:
            self._stream.synchronize()

    @torch.inference_mode()
    def compile_chunks(self, tokens: int, rows: int) -> None:
        """Compile the kernels of a step of ``tokens`` with prompts beside sequences that decode; see ``compile``."""
        width = width_bucket(1, self._block_size, self._max_blocks)
        self._run_chunks(MixedSize(tokens, rows, width), self._run_padding, eager=True)
        if self._stream is not None:
            self._stream.synchronize()

    def _run_chunks(self, size: MixedSize, way: Callable[..., None], **how: bool) -> None:
        """Call ``way`` with a padding step that has one prompt, in the first of the rows for prompts; all other rows
        decode."""
        tokens, rows, width = size
        decodes = min(rows - FEWEST_ROWS, tokens - 2)
        chunk = min(tokens - decodes, width * self._block_size)
        ends = chunk + np.minimum(np.arange(rows + 1 - FEWEST_ROWS), decodes)
        starts = [0, *[chunk] * (FEWEST_ROWS - 1), *ends.tolist()]
        layout = StepLayout(tokens, rows, min(rows, self._max_draws), width)
        prune = self._prune_last_layer
        way(layout, starts, decode=False, prune=prune, chunk_rows=FEWEST_ROWS, **how)

    @torch.inference_mode()
    def compile_whole(self, rows: int, prompts: int, tokens_each: int) -> None:
        """Compile the kernels of a step in which whole prompts follow ``rows`` decoding rows, or run alone; see
        ``compile``."""
        width = width_bucket(-(-tokens_each // self._block_size), self._block_size, self._max_blocks)
        layout = StepLayout(rows + prompts * tokens_each, rows + prompts, 0, width)
        starts = [*range(rows), *range(rows, layout.tokens + 1, tokens_each)]
        self._run_padding(layout, starts, decode=False, whole=WholePrompts(rows, rows), eager=True)
        if self._stream is not None:
            self._stream.synchronize()

    def _fields(self, layout: StepLayout) -> StepFields:
        """Return the inputs of a step on the device."""
        return layout.tensors(self._arena[self._inputs_at : self._inputs_at + layout.nbytes])

    def _run_padding(
        self, layout: StepLayout, starts: Sequence[int] | None = None, *, eager: bool = False, **changes: Any
    ) -> None:
        """Run a step of padding rows that begin at ``starts`` or have equal lengths; ``changes`` override fields of its
        plan."""
        with self._on_stream():
            memory = self._ring.memory()
            memory.holds = None
            memory.memory[: layout.nbytes] = 0
            fields = layout.numpy(memory.memory)
            fields.start[:] = np.arange(layout.rows + 1) * (layout.tokens // layout.rows) if starts is None else starts
            fields.length[:], fields.last[:] = np.diff(fields.start), np.arange(layout.draws) % layout.tokens
            fields.table[:], fields.state[:], fields.mask[:] = self._padding_block, -1, -1
            fields.adapter[:] = -1
            fields.source[:] = self._planner.token_source(layout)
            plan = StepPlan(layout, True, [], (), Variant(), (), [])._replace(**changes)
            turn, _, _ = self._run(plan, eager)
            if turn is None:
                self._launch((), partial(self._second_part, plan), plan, eager=True)
                turn = self._ring.ended()
            self._ring.results(turn, self._stream)

    # ---- on the device

    def _run(self, plan: StepPlan, eager: bool = False) -> tuple[int | None, Tensor, Sampled]:
        """Launch a step whose inputs are in the ring's memory; return its turn there and the result of ``_compute``.

        The turn is None if draws need more than logits; ``_second_part`` then completes the step.
        """
        waits = plan.variant != Variant() and self._host_sampler is None
        self._ring.send(plan.layout.nbytes)
        key = self._key(plan, waits)
        graphs = self.graphs if not eager and (plan.decode or plan.graph) else None
        held, count = graphs is not None and key in graphs, 0 if graphs is None else len(graphs)
        hidden, sampled = self._launch(key, partial(self._step, plan, waits), plan, eager)
        captured = graphs is not None and len(graphs) > count
        self.launched = "graph" if held else "captured" if captured else "eager"
        return None if waits else self._ring.ended(), hidden, sampled

    def _key(self, plan: StepPlan, waits: bool) -> Hashable:
        """Return the key shared by all steps that can replay one graph; ``waits``: the step ends with logits."""
        return plan.layout, waits, plan.prune, plan.chunk_rows, plan.adapters, plan.fresh

    def _launch(self, key: Hashable, work: Callable[[], Any], plan: StepPlan, eager: bool = False) -> Any:
        """Run the work of a step, by a graph if steps of its kind recur."""
        try:
            if self.graphs is None or eager or not (plan.decode or plan.graph):
                return work()
            if plan.decode:
                return self.graphs.run(key, work)
            return self.graphs.run_rare(key, work)
        except BaseException:  # no memory for a graph, say: the step itself has run then
            self._ring.failed()
            raise

    def _step(self, plan: StepPlan, waits: bool) -> tuple[Tensor, Sampled]:
        """Run everything that happens on the device in a step, or its first part."""
        self._ring.take(plan.layout.nbytes)
        found = self._compute(plan, waits)
        if not waits:
            self._ring.give()
        return found

    def _second_part(self, plan: StepPlan) -> Sampled:
        """Draw from the logits that the first part of the step has left."""
        fields = self._fields(plan.layout)
        logits_RV = self._masks.kept(plan.layout.draws)
        adjusts, wants_logprobs, masked = plan.variant
        masks = self._masks.words if masked else None
        sampled = self._sampler(logits_RV, fields, self._drawn, self._adjust, adjusts, wants_logprobs, masks)
        self._ring.give()
        return sampled

    def _compute(self, plan: StepPlan, waits: bool = False) -> tuple[Tensor, Sampled]:
        """Compute hidden states ``[T, D]`` of the step (only for its draws if the plan prunes). The draws are left in
        the arena, and logprobs returned (or the logits, if the host draws). ``waits``: the logits are kept for
        ``_second_part``."""
        fields = self._fields(plan.layout)
        hidden_TD = self._hidden(plan, self._context(plan))
        if not plan.layout.draws:
            return hidden_TD, None
        hidden_RD = hidden_TD if plan.decode or plan.prune else hidden_TD.index_select(0, fields.last)
        self._drawing(plan, fields, hidden_RD)
        if self._part is not None and not waits:
            logits_RV, spread = self._model.capped(self._part.product(hidden_RD)), self._part.spread
            self._sampler(logits_RV, fields, self._drawn, self._adjust, False, False, spread=spread)
            return hidden_TD, None
        logits_RV = self._model.capped(self._model.head(hidden_RD))
        if self._host_sampler is not None:
            return hidden_TD, logits_RV
        if waits:
            self._masks.keep(logits_RV)
        else:
            self._sampler(logits_RV, fields, self._drawn, self._adjust, False, False)
        return hidden_TD, None

    def _drawing(self, plan: StepPlan, fields: StepFields, hidden_RD: Tensor) -> None:
        """Use the hidden states that the draws of a step are made from."""

    def _context(self, plan: StepPlan) -> PagedContext:
        fields = self._fields(plan.layout)
        return PagedContext(
            self._k_cache,
            self._v_cache,
            fields.table,
            fields.start,
            fields.length,
            self._model.ops,
            max_query_len=1 if plan.decode else plan.layout.tokens,
            whole=plan.whole,
            chunk_rows=plan.chunk_rows,
            wanted=self._wanted(fields) if plan.prune else None,
            positions_T=fields.position,
            fresh=plan.fresh,
        )

    def _hidden(self, plan: StepPlan, context: PagedContext) -> Tensor:
        """Compute hidden states of a step's tokens, after the final norm."""
        fields = self._fields(plan.layout)
        if self._model.adapters is not None:
            self._model.adapters.rows.slots_T = fields.adapter if plan.adapters else None
        return self._model(self._arena.view(torch.int64), fields.position, context, fields.source)

    def _wanted(self, fields: StepFields) -> Wanted:
        """Return the tokens that the draws need: the last token of each draw's sequence, which then is
        ``draw_position`` long."""
        starts = torch.arange(len(fields.last) + 1, dtype=torch.int32, device=self._device)
        tables = fields.table.index_select(0, fields.draw_row)
        rows = PagedBatch(tables, starts, fields.draw_position, self._block_size, max_query_len=1, fresh=True)
        return Wanted(fields.last, rows)

    @torch.inference_mode()
    def _draw_on_host(
        self,
        sampler: Sampler,
        batch: ScheduledBatch,
        plan: StepPlan,
        logits_RV: Sampled,
        known: StepResult,
    ) -> CompletedStep:
        """Draw as ``Runner`` does; the tokens are sent back to the device for the next step."""
        ends = {draw.seq_id: row.end + self.ahead for row in batch.rows for draw in row.draws}
        picks = [Pick(draw, ends[draw.seq_id], row) for row, draw in enumerate(plan.draws)]
        if not picks:
            return CompletedStep(known)
        assert isinstance(logits_RV, Tensor)
        with self._on_stream():
            samples = sampler.sample(logits_RV.float(), picks, self._host_tokens)
        self._host_tokens = samples.tokens
        drawn = torch.tensor([samples.tokens.get(seq_id, 0) for seq_id in plan.seq_ids])
        with self._on_stream():
            self._drawn.token[: len(drawn)].copy_(drawn)
        return CompletedStep(samples.added_to(known))

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
