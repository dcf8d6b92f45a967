"""``GPURunner``: the executor for a device that works beside the host. It takes the same batches as ``Runner``.

A step is prepared in one piece of pinned memory, copied to the device once, computed and sampled there, and its tokens
come back by a copy that only ``result`` waits for. So with ``EngineCore(lag=1)`` the host prepares step n + 1 while the
device computes step n: the input tokens of step n + 1 that step n is about to draw are read on the device, from where
step n leaves them.

Steps that only decode are padded to one of a few sizes (``row_bucket``, ``width_bucket``) and replayed as CUDA graphs;
the rows added belong to no sequence and have no length. Of the steps with prefill chunks the small ones are too, when
their size comes again (rows added there write to a block of the cache that no sequence has); large ones are launched
kernel by kernel, under the arithmetic of which the launches are hidden.

Penalties, logit_bias and min_tokens, and logprobs of drawn tokens, are part of the graph where a step has them; the
step's graph is then another one. ``prompt_logprobs`` are computed within ``submit``, which waits for the device.

All of it runs on CPU tensors too, without graphs and at once: that is how it is tested without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from ..models.context import PagedContext, Wanted, WholePrompts
from ..models.decoder import Decoder
from ..ops.paged_batch import PagedBatch
from .adjust_state import AdjustState
from .batch import Handle, ScheduledBatch, ScheduledRow, StepResult, TokenLogprobs
from .device_sampling import OUTPUT_BYTES, Drawn, LogprobTensors, device_sampler
from .gpu_graphs import GraphCache
from .penalties import Pick
from .runner import Done
from .sampler import NOT_FINITE, NOTHING_LEFT, Sampler, token_logprobs
from .step_inputs import ALIGNMENT, Fields, StepLayout, StepMemory
from .step_plan import StepPlan, StepPlanner, Variant
from .step_sizes import FEWEST_ROWS, SMALLEST_WIDTH, row_bucket, token_bucket, width_bucket

LOGPROB_ROWS = 32
"""Rows of logits held at a time for prompt logprobs."""
RING = 3
"""Steps whose host memory is apart: one being prepared, one or two in flight."""

Sampled = LogprobTensors | Tensor | None
"""What ``_compute`` returns beside the hidden states."""


@dataclass(slots=True)
class _Pending:
    """A submitted step. ``result`` waits for its tokens."""

    ready: torch.cuda.Event | None
    output: np.ndarray
    """uint8, the step's part of the ring."""
    seq_ids: list[int]
    prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]]
    max_draws: int
    adjusted: bool
    """Logits were adjusted before the draws."""
    logprobs: LogprobTensors | None = None
    """On the host once ``ready``."""
    alternatives: Sequence[int] = ()
    """For each draw, how many; -1 for none."""
    _result: StepResult | None = None

    def result(self) -> StepResult:
        """What the step drew; blocks until the device is done with it."""
        if self._result is None:
            if self.ready is not None:
                self.ready.synchronize()
            self._result = self._read()
        return self._result

    def _read(self) -> StepResult:
        drawn = Drawn.numpy(self.output, self.max_draws)
        count = len(self.seq_ids)
        ids = drawn.token[:count].tolist()
        result = StepResult(dict(zip(self.seq_ids, ids, strict=True)), prompt_logprobs=self.prompt_logprobs)
        finite = drawn.finite[:count]
        if not finite.all():
            for index in np.flatnonzero(finite == 0).tolist():
                seq_id = self.seq_ids[index]
                del result.tokens[seq_id]
                nothing_left = self.adjusted and drawn.raw_finite[index]
                result.errors[seq_id] = NOTHING_LEFT if nothing_left else NOT_FINITE
        if self.logprobs is not None:
            wanted = [i for i, number in enumerate(self.alternatives) if number >= 0 and finite[i]]
            entries = self.logprobs.entries(wanted, [ids[i] for i in wanted], [self.alternatives[i] for i in wanted])
            result.logprobs.update(zip((self.seq_ids[i] for i in wanted), entries, strict=True))
        return result


class GPURunner:
    """Runs batches on the device of the caches, each within ``submit`` as far as the host is concerned.

    Args:
        model: computes hidden states and logits.
        k_cache, v_cache: ``[layers, blocks + 1, kv_heads, block_size, head_dim]``; the last block is for padding.
        max_num_seqs, max_num_batched_tokens, max_model_len: the scheduler's limits.
        graphs: capture steps that only decode (on CUDA); False launches every kernel of every step.
        sample_on_device: False draws on the host from the step's logits, within ``submit``: there to compare with.
        whole_prompts: (tokens in all, tokens a row) from which prompts that a step holds from their first token on
            attend to their keys where the projection left them, not through the cache: another kernel, of other
            rounding. None: never.
        graph_tokens: steps with prefill chunks of up to so many tokens are captured too, when one of their size comes
            for the second time; their prompts go through the cache.
        fine_rows: see ``step_sizes.row_bucket``.
        prune_last_layer: steps with prefill chunks compute the last layer for those tokens only that something is drawn
            from (keys and values for all).
        pad_tokens: steps with prefill chunks are filled up to a multiple of so many tokens, so that kernels meet few
            kinds of sizes and are not compiled while requests wait; None: 16 on a GPU, else 1.
    """

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
        pad_tokens: int | None = None,
    ) -> None:
        self._model = model
        self._k_cache, self._v_cache = k_cache, v_cache
        self._device = k_cache.device
        self._block_size = k_cache.shape[3]
        self._padding_block = k_cache.shape[1] - 1
        self._max_blocks = -(-max_model_len // self._block_size)
        self._max_draws = row_bucket(max_num_seqs)
        self._adjust = AdjustState(model.config.vocab_size, self._device, lines=4)
        self._sampler = device_sampler(self._device)
        self._host_sampler = None if sample_on_device else Sampler()
        self._host_tokens: dict[int, int] = {}
        self._whole_prompts = whole_prompts
        self._prune_last_layer = prune_last_layer
        pad_tokens = pad_tokens or (16 if self._device.type == "cuda" else 1)
        # A step with prefill chunks is filled up in two places (see StepPlanner).
        rows = max(FEWEST_ROWS, self._max_draws)
        self._full_step = token_bucket(max_num_batched_tokens) if graph_tokens >= max_num_batched_tokens else 0
        """Tokens of the largest step, if it is captured."""
        most = max(max_num_batched_tokens, self._max_draws) + rows + 3 * pad_tokens
        most = max(most, token_bucket(min(graph_tokens, max_num_batched_tokens)))
        largest = StepLayout(most, 3 * rows + 2 * FEWEST_ROWS, self._max_draws, self._max_blocks)
        self._inputs_at = -(-OUTPUT_BYTES * self._max_draws // ALIGNMENT) * ALIGNMENT
        cuda = self._device.type == "cuda"
        self._arena = torch.zeros(self._inputs_at + largest.nbytes, dtype=torch.uint8, device=self._device)
        """What steps draw, then what they read."""
        self._drawn = Drawn.tensors(self._arena, self._max_draws)
        self._inputs = [torch.zeros(largest.nbytes, dtype=torch.uint8, pin_memory=cuda) for _ in range(RING)]
        self._memory = [StepMemory(inputs.numpy()) for inputs in self._inputs]
        self._outputs = [torch.zeros(self._inputs_at, dtype=torch.uint8, pin_memory=cuda) for _ in range(RING)]
        self._busy: list[torch.cuda.Event | None] = [None] * RING
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
        )

    @torch.inference_mode()
    def submit(self, batch: ScheduledBatch) -> Handle:
        """Start a step: copy blocks, compute the rows, draw. A row whose logits are not finite fails alone."""
        with self._on_stream():
            turn = self._planner.step % RING
            busy = self._busy[turn]
            if busy is not None:
                busy.synchronize()
            self._copy_blocks(batch.block_copies)
            plan = self._planner.plan(batch, self._memory[turn])
            used = plan.layout.nbytes
            self._arena[self._inputs_at : self._inputs_at + used].copy_(self._inputs[turn][:used], non_blocking=True)
            hidden, sampled = self._run(plan)
            prompt_logprobs = {
                row.seq_id: self._prompt_logprobs(row, hidden[start : start + row.num_tokens])
                for row, start in zip(plan.rows, plan.starts, strict=True)
                if row.prompt_logprobs is not None and row.next_prompt_token_ids
            }
            if self._host_sampler is not None:
                return Done(self._draw_on_host(self._host_sampler, batch, plan, sampled, prompt_logprobs))
            self._outputs[turn].copy_(self._arena[: self._inputs_at], non_blocking=True)
            logprobs = sampled.to_host() if isinstance(sampled, LogprobTensors) else None
            ready = self._busy[turn] = self._record()
        output = self._outputs[turn].numpy()
        if ready is None:
            output = output.copy()
        more = plan.variant.adjust, logprobs, plan.alternatives
        return _Pending(ready, output, plan.seq_ids, prompt_logprobs, self._max_draws, *more)

    @torch.inference_mode()
    def warm(self, rows: Sequence[int], widths: int) -> None:
        """Run decode steps of these numbers of rows once, on padding alone, for the ``widths`` narrowest block tables:
        kernels are compiled, and graphs captured. Where steps full of prompt tokens are captured, those too."""
        for number in range(widths):
            width = width_bucket((SMALLEST_WIDTH // self._block_size) << number, self._block_size, self._max_blocks)
            for count in rows:
                with self._on_stream():
                    self._run(self._padding_step(StepLayout(count, count, count, width)))
                    each = self._full_step // count
                    if count >= FEWEST_ROWS and count == row_bucket(count) and 0 < each <= width * self._block_size:
                        layout = StepLayout(self._full_step, count, min(count, self._max_draws), width)
                        plan = self._padding_step(layout)
                        plan = plan._replace(decode=False, graph=True, prune=self._prune_last_layer)
                        self._run(plan)
                        self._run(plan)
        if self._stream is not None:
            self._stream.synchronize()

    @torch.inference_mode()
    def compile(self, rows: int, tokens_each: int, draws: int, variant: Variant | None = None) -> None:
        """Run one kind of step on padding alone, eagerly, so that its kernels are compiled; with ``tokens_each`` 1 a
        step that only decodes, at both widths of ``warm``."""
        narrow = width_bucket(-(-tokens_each // self._block_size), self._block_size, self._max_blocks)
        wide = width_bucket(narrow + 1, self._block_size, self._max_blocks)
        with self._on_stream():
            for width in {narrow, wide} if tokens_each == 1 else {narrow}:
                plan = self._padding_step(StepLayout(rows * tokens_each, rows, draws, width))
                self._compute(plan._replace(decode=tokens_each == 1, variant=variant or Variant()))
        if self._stream is not None:
            self._stream.synchronize()

    @torch.inference_mode()
    def compile_whole(self, rows: int, prompts: int, tokens_each: int) -> None:
        """As ``compile``, for a step in which whole prompts stand behind ``rows`` that decode, or alone."""
        width = width_bucket(-(-tokens_each // self._block_size), self._block_size, self._max_blocks)
        layout = StepLayout(rows + prompts * tokens_each, rows + prompts, 0, width)
        with self._on_stream():
            plan = self._padding_step(layout)
            fields = self._fields(layout)
            starts = [*range(rows), *range(rows, layout.tokens + 1, tokens_each)]
            fields.start.copy_(torch.tensor(starts, dtype=torch.int32))
            fields.length.copy_(fields.start.diff())
            self._compute(plan._replace(decode=False, whole=WholePrompts(rows, rows)))
        if self._stream is not None:
            self._stream.synchronize()

    def _fields(self, layout: StepLayout) -> Fields:
        """The inputs of a step on the device."""
        return layout.tensors(self._arena[self._inputs_at : self._inputs_at + layout.nbytes])

    def _padding_step(self, layout: StepLayout) -> StepPlan:
        """A step of padding rows alone, all of one length, on the device."""
        each = layout.tokens // layout.rows
        memory = torch.zeros(layout.nbytes, dtype=torch.uint8)
        fields = layout.numpy(memory.numpy())
        fields.length[:], fields.state[:] = each, -1
        fields.start[:], fields.last[:] = np.arange(layout.rows + 1) * each, np.arange(layout.draws)
        fields.table[:] = self._padding_block
        fields.source[:] = self._planner.token_source(layout)
        inputs = self._arena[self._inputs_at : self._inputs_at + layout.nbytes]
        inputs.copy_(memory)
        return StepPlan(layout, True, [], (), Variant(), (), [])

    # ---- on the device

    def _run(self, plan: StepPlan) -> tuple[Tensor, Sampled]:
        work: Callable[[], tuple[Tensor, Sampled]] = partial(self._compute, plan)
        if self.graphs is None or not (plan.decode or plan.graph):
            return work()
        generation = self._adjust.generation if plan.variant.adjust else 0
        key = plan.layout, plan.variant, generation
        if plan.decode:
            return self.graphs.run(key, work)
        return self.graphs.run_rare((*key, plan.prune), work)

    def _compute(self, plan: StepPlan) -> tuple[Tensor, Sampled]:
        """Hidden states ``[T, D]`` of the step (of its draws alone where the plan prunes); its draws are left in the
        arena, and logprobs returned (or, where the host draws, the logits)."""
        fields = self._fields(plan.layout)
        context = PagedContext(
            self._k_cache,
            self._v_cache,
            fields.table,
            fields.start,
            fields.length,
            self._model.ops,
            max_query_len=1 if plan.decode else plan.layout.tokens,
            whole=plan.whole,
            wanted=self._wanted(fields) if plan.prune else None,
        )
        hidden_TD = self._model(self._arena.view(torch.int64), fields.position, context, fields.source)
        if not plan.layout.draws:
            return hidden_TD, None
        hidden_RD = hidden_TD if plan.decode or plan.prune else hidden_TD.index_select(0, fields.last)
        logits_RV = self._model.head(hidden_RD)
        if self._host_sampler is not None:
            return hidden_TD, logits_RV
        return hidden_TD, self._sampler(logits_RV, fields, self._drawn, self._adjust, *plan.variant)

    def _wanted(self, fields: Fields) -> Wanted:
        """What the draws need: the last token of each draw's sequence, which then is ``draw_position`` long."""
        starts = torch.arange(len(fields.last) + 1, dtype=torch.int32, device=self._device)
        tables = fields.table.index_select(0, fields.draw_row)
        rows = PagedBatch(tables, starts, fields.draw_position, self._block_size, max_query_len=1, fresh=True)
        return Wanted(fields.last, rows)

    def _draw_on_host(
        self,
        sampler: Sampler,
        batch: ScheduledBatch,
        plan: StepPlan,
        logits_RV: Sampled,
        prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]],
    ) -> StepResult:
        """Draws as ``Runner`` makes them; the tokens go back to the device for the next step."""
        ends = {draw.seq_id: row.end for row in batch.rows for draw in row.draws}
        picks = [Pick(draw, ends[draw.seq_id], row) for row, draw in enumerate(plan.draws)]
        if not picks:
            return StepResult({}, prompt_logprobs=prompt_logprobs)
        assert isinstance(logits_RV, Tensor)
        samples = sampler.sample(logits_RV.float(), picks, self._host_tokens)
        self._host_tokens = samples.tokens
        drawn = torch.tensor([samples.tokens.get(seq_id, 0) for seq_id in plan.seq_ids])
        self._drawn.token[: len(drawn)].copy_(drawn)
        return StepResult(samples.tokens, samples.logprobs, prompt_logprobs, samples.errors)

    def _copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        if copies:
            pairs = torch.tensor(copies).to(self._device)
            for cache in (self._k_cache, self._v_cache):
                cache[:, pairs[:, 1]] = cache[:, pairs[:, 0]]

    def _prompt_logprobs(self, row: ScheduledRow, hidden_TD: Tensor) -> tuple[TokenLogprobs, ...]:
        """One entry for each prompt token that the row's tokens predict."""
        following = row.next_prompt_token_ids
        entries: list[TokenLogprobs] = []
        for first in range(0, len(following), LOGPROB_ROWS):
            part = following[first : first + LOGPROB_ROWS]
            logits_RV = self._model.logits(hidden_TD[first : first + len(part)])
            entries.extend(token_logprobs(logits_RV, part, [row.prompt_logprobs or 0] * len(part)))
        return tuple(entries)

    def _record(self) -> torch.cuda.Event | None:
        if self._stream is None:
            return None
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
