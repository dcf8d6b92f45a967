"""``Runner``: the executor of production. A scheduled batch becomes one ragged forward pass and its drawn tokens.

The step's tokens lie flat in one axis, row after row. One forward pass writes their keys and values to the paged cache
and attends through the block tables. Logits are computed only where a token is drawn or a prompt logprob is requested.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...models.context import PagedContext
from ...models.decoder import Decoder
from ..scheduling.batch import PLACEHOLDER, Handle, ScheduledBatch, StepResult
from ..scheduling.constraint import MaskFiller, fill_each
from .penalties import Pick
from .prompt_results import prompt_results
from .sampler import Sampler

if TYPE_CHECKING:
    from ...parallel.experts import ExpertRanks
    from .adapter_slots import AdapterSlots


@dataclass(frozen=True, slots=True)
class CompletedStep:
    """The handle of work that is complete."""

    step_result: StepResult
    over = True

    def draw(self) -> None:
        """Do nothing: the draws were made in ``submit``."""

    def result(self) -> StepResult:
        """Return the result of the step."""
        return self.step_result


@dataclass(slots=True)
class Waiting:
    """The handle of a batch whose draws wait for the tokens of the previous batch."""

    work: Callable[[], Handle]
    _drawn: Handle | None = None

    @property
    def over(self) -> bool:
        """True if the draws were made."""
        return getattr(self._drawn, "over", False)

    def draw(self) -> None:
        """Launch the draws."""
        if self._drawn is None:
            self._drawn = self.work()

    def result(self) -> StepResult:
        """Return the result of the step; call ``draw`` before."""
        assert self._drawn is not None, "the result was requested before the draws were made"
        return self._drawn.result()


def copy_blocks(k_cache: Tensor, v_cache: Tensor, copies: Sequence[tuple[int, int]]) -> None:
    """Copy blocks within both caches ``[layers, blocks, ...]``. ``copies``: (from, to) of each, all at once."""
    if copies:
        pairs = torch.tensor(copies).to(k_cache.device)
        for cache in (k_cache, v_cache):
            cache[:, pairs[:, 1]] = cache[:, pairs[:, 0]]


class Runner:
    """Runs batches on the CPU, each within ``submit``.

    Args:
        model: computes hidden states and logits.
        k_cache, v_cache: ``[layers, blocks, kv_heads, block_size, head_dim]``, in the layout that the model needs
            (``Decoder.new_kv_cache``).
        fill_masks: makes the masks of draws under a grammar.
    """

    ahead = 0
    """Positions between the end of a row and the token that it draws."""

    def __init__(self, model: Decoder, k_cache: Tensor, v_cache: Tensor, *, fill_masks: MaskFiller = fill_each) -> None:
        self.adapters: AdapterSlots | None = None
        """Slots for the adapters of rows; None if no row has one."""
        self.model = self._model = model
        self._k_cache, self._v_cache = k_cache, v_cache
        self._block_size = v_cache.shape[3]
        self._sampler = Sampler(fill_masks)
        self._sharing: ExpertRanks | None = None
        """Ranks that share the experts, which each step meets first."""
        if model.config.moe is not None:
            from ...parallel.experts import meeting

            self._sharing = meeting(model)
        self._drawn: dict[int, int] = {}
        """Tokens of the previous step, by seq_id: with async scheduling the next batch was planned without them."""

    @torch.inference_mode()
    def idle(self) -> None:
        """Take part in a step of ranks that share experts, without a batch."""
        if self._sharing is not None and self._sharing.meet(0):
            from ...parallel.experts import idle

            idle(self._model, self._model.norm.weight)

    def abandon(self) -> None:
        """Forget earlier steps (``Executor``)."""
        self._drawn = {}

    @torch.inference_mode()
    def submit(self, batch: ScheduledBatch) -> Handle:
        """Copy blocks, compute the rows, draw (under a grammar: when ``draw`` is called). A row whose logits are not
        finite fails alone."""
        copy_blocks(self._k_cache, self._v_cache, batch.block_copies)
        if self._model.taps is not None:
            self._model.taps.copy(batch.block_copies)
        if self.adapters is not None:
            batch = self._with_adapters(batch, self.adapters)
        tokens_T, positions_T, context, starts = self._inputs(batch)
        if self._sharing is not None:
            self._sharing.meet(len(tokens_T))
        return self._finish(batch, self._model(tokens_T, positions_T, context), starts)

    def _with_adapters(self, batch: ScheduledBatch, adapters: AdapterSlots) -> ScheduledBatch:
        """Say which adapter each token has. Returns the batch with the rows of an adapter side by side: they are
        multiplied together."""
        slots = adapters.place(batch.rows)
        if slots is None:
            adapters.adapters.rows.slots_T = None
            return batch
        order = sorted(range(len(slots)), key=slots.__getitem__)
        rows = tuple(batch.rows[index] for index in order)
        counts = torch.tensor([row.num_tokens for row in rows])
        ordered = torch.tensor([slots[index] for index in order], dtype=torch.int32)
        adapters.adapters.rows.slots_T = ordered.repeat_interleave(counts)
        return replace(batch, rows=rows)

    def _finish(self, batch: ScheduledBatch, hidden_TD: Tensor, starts: Sequence[int]) -> Handle:
        """Draw from the hidden states ``[T, D]``, or prepare the draws."""
        picks: list[Pick] = []
        last_tokens: list[int] = []
        for row, start in zip(batch.rows, starts, strict=True):
            if row.draws:
                picks.extend(Pick(draw, row.end + self.ahead, len(last_tokens)) for draw in row.draws)
                last_tokens.append(start + row.num_tokens - 1)
        logits_RV = self._model.logits(hidden_TD[torch.tensor(last_tokens)]) if picks else None
        if any(pick.draw.constraint is not None for pick in picks):
            return Waiting(partial(self._draw, batch, hidden_TD, starts, logits_RV, picks))
        return self._draw(batch, hidden_TD, starts, logits_RV, picks)

    @torch.inference_mode()
    def _draw(
        self,
        batch: ScheduledBatch,
        hidden_TD: Tensor,
        starts: Sequence[int],
        logits_RV: Tensor | None,
        picks: Sequence[Pick],
    ) -> CompletedStep:
        result = StepResult({})
        if any(row.prompt_logprobs is not None or row.pooling is not None for row in batch.rows):
            result = prompt_results(self._model, batch.rows, starts, hidden_TD)
        if logits_RV is not None:
            samples = self._sampler.sample(logits_RV, picks, self._drawn)
            result = samples.added_to(result)
        self._drawn = result.tokens
        return CompletedStep(result)

    def _inputs(self, batch: ScheduledBatch) -> tuple[Tensor, Tensor, PagedContext, list[int]]:
        """Return tokens and positions ``[T]`` of the batch, its attention context, and the index of each row's first
        token."""
        tokens: list[int] = []
        positions: list[int] = []
        starts: list[int] = []
        lengths: list[int] = []
        width = max(row.num_blocks(self._block_size) for row in batch.rows)
        tables: list[list[int]] = []
        for row in batch.rows:
            starts.append(len(tokens))
            new = row.token_ids
            if new[-1] == PLACEHOLDER:
                new[-1] = self._drawn.get(row.seq_id, 0)  # a sequence that failed has no token; its step is void
            tokens.extend(new)
            positions.extend(range(row.start, row.end))
            lengths.append(row.end)
            used = row.num_blocks(self._block_size)
            tables.append([*row.block_ids[:used], *[0] * (width - used)])
        context = PagedContext(
            self._k_cache,
            self._v_cache,
            torch.tensor(tables, dtype=torch.int32),
            torch.tensor([*starts, len(tokens)], dtype=torch.int32),
            torch.tensor(lengths, dtype=torch.int32),
            self._model.ops,
        )
        return torch.tensor(tokens), torch.tensor(positions), context, starts
