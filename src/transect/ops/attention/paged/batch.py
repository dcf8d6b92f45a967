"""The ragged batch of one engine step for paged operators: the location of each token in the KV cache.

``kv_cache_write`` and ``paged_attention`` both take a ``PagedBatch``. What they derive from it (slots, tiles) is the
same in every layer, so it is computed once, on first use, and kept with the batch.

Names: B sequences, T tokens of this step, N columns of the block table, W work items, Q queries of a work item.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class WorkGroup:
    """Work items that attend alike: up to Q consecutive queries of one sequence each, the furthest position first."""

    tokens_WQ: Tensor
    """Index into the step's tokens; an item with fewer than Q queries repeats its last one."""
    positions_WQ: Tensor
    blocks_WN: Tensor
    """Block table of the item's sequence; entries it does not own are 0."""
    used_W: Tensor
    """Number of real queries among the Q."""
    last_positions: tuple[int, ...]
    """The last position that each item sees, on the host, descending."""


class PagedBatch:
    """Rows of a ragged batch; the queries of row b are the last tokens of its sequence.

    ``block_tables_BN`` int32: block n of row b holds positions ``n * block_size ...``; entries past the row's length
    may be anything. ``query_starts_B1`` int32 ``[B + 1]``: row b's tokens are those from ``query_starts[b]`` to before
    ``query_starts[b + 1]``. ``seq_lens_B`` int32: tokens of the sequence with this step's. ``ValueError`` if these do
    not fit each other.

    In a CUDA graph the three tensors are buffers that are filled before each replay, and the batch is one that was made
    for this graph (what it works out is captured with it). Their shapes are then upper bounds: rows may be left over,
    with ``seq_lens`` 0, and so may tokens after the last query start. What the host must know is given as bounds:

    Args:
        max_seq_len: longest row, now or at any replay; None for what the block table holds.
        max_query_len: most tokens of a row in this step. 1 means that token t is row t's (decode only); None for decode
            only if there are as many tokens as rows.
        fresh: of rows with one query more keys than the last may have been written in this step, by the kernel before.
        chunk_rows: number of first rows that contain all rows of several queries; None if these may be anywhere.
    """

    def __init__(
        self,
        block_tables_BN: Tensor,
        query_starts_B1: Tensor,
        seq_lens_B: Tensor,
        block_size: int,
        *,
        max_seq_len: int | None = None,
        max_query_len: int | None = None,
        fresh: bool = False,
        chunk_rows: int | None = None,
    ) -> None:
        self.block_tables = block_tables_BN
        self.query_starts = query_starts_B1
        self.seq_lens = seq_lens_B
        self.block_size = block_size
        self.max_query_len = max_query_len
        self.fresh = fresh
        self.chunk_rows = chunk_rows
        widest = block_tables_BN.shape[-1] * block_size
        self.max_seq_len = widest if max_seq_len is None else min(max_seq_len, widest)
        self._arrivals: Tensor | None = None
        rows = seq_lens_B.shape[0]
        if block_tables_BN.ndim != 2 or block_tables_BN.shape[0] != rows or query_starts_B1.shape != (rows + 1,):
            raise ValueError(
                f"a batch of {rows} rows needs block tables [{rows}, N] and {rows + 1} query starts, not "
                f"{list(block_tables_BN.shape)} and {list(query_starts_B1.shape)}"
            )
        for name, tensor in (
            ("block tables", block_tables_BN),
            ("query starts", query_starts_B1),
            ("lengths", seq_lens_B),
        ):
            if tensor.dtype != torch.int32:
                raise ValueError(f"the batch's {name} must be int32, not {tensor.dtype}")

    def to(self, device: torch.device | str) -> PagedBatch:
        """Return the same batch on a device."""
        tables, starts, lengths = self.block_tables.to(device), self.query_starts.to(device), self.seq_lens.to(device)
        return PagedBatch(
            tables,
            starts,
            lengths,
            self.block_size,
            max_seq_len=self.max_seq_len,
            max_query_len=self.max_query_len,
            fresh=self.fresh,
            chunk_rows=self.chunk_rows,
        )

    @cached_property
    def parts(self) -> tuple[PagedBatch, PagedBatch]:
        """The rows that may have several queries, and those that may have one, as views; both are all rows where
        ``chunk_rows`` does not tell. Tokens are counted as in the whole batch."""
        first = self.chunk_rows
        if first is None:
            return self, self
        chunks, singles = (
            PagedBatch(
                self.block_tables[begin:end],
                self.query_starts[begin : None if end is None else end + 1],
                self.seq_lens[begin:end],
                self.block_size,
                max_seq_len=self.max_seq_len,
                # Token t is not row t's in either, however many there are.
                max_query_len=2 if self.max_query_len is None else max(2, self.max_query_len),
                fresh=self.fresh,
            )
            for begin, end in ((0, first), (first, None))
        )
        return chunks, singles

    @property
    def num_rows(self) -> int:
        return self.seq_lens.shape[0]

    def decodes_only(self, tokens: int) -> bool:
        """Return True if token t is known on the host to be the one token of row t."""
        return tokens == self.num_rows and self.max_query_len in (None, 1)

    def arrivals(self, count: int) -> Tensor:
        """Return at least ``count`` int32 zeros. Programs of a kernel that wait for each other count here, and the last
        one resets the counter to 0, so every layer finds zeros."""
        if self._arrivals is None or len(self._arrivals) < count:
            self._arrivals = torch.zeros(count, dtype=torch.int32, device=self.seq_lens.device)
        return self._arrivals

    @cached_property
    def _queries_B(self) -> Tensor:
        """Tokens of each row in this step, int64."""
        return self.query_starts.diff().long()

    @cached_property
    def rows_T(self) -> Tensor:
        """The row of each token, int64."""
        rows = torch.arange(self.num_rows, device=self.seq_lens.device)
        return rows.repeat_interleave(self._queries_B)

    @cached_property
    def positions_T(self) -> Tensor:
        """The position of each token in its sequence, int64."""
        before_B = self.seq_lens.long() - self.query_starts[1:]  # position minus token index, the same along a row
        return before_B[self.rows_T] + torch.arange(self.rows_T.shape[0], device=before_B.device)

    @cached_property
    def slots_T(self) -> tuple[Tensor, Tensor]:
        """Block and offset in it of each token, int64."""
        positions = self.positions_T
        blocks = self.block_tables[self.rows_T, positions // self.block_size].long()
        return blocks, positions % self.block_size

    def lengths(self) -> list[tuple[int, int]]:
        """Return (tokens of this step, total tokens) of each row, on the host."""
        return list(zip(self._queries_B.tolist(), self.seq_lens.tolist(), strict=True))

    @cached_property
    def split_work(self) -> tuple[WorkGroup, ...]:
        """Rows with one query (decode) as items of 1; the others (prefill chunks) as items of up to 32."""
        single_B = self._queries_B == 1
        groups = ((single_B.nonzero()[:, 0], 1), ((~single_B).nonzero()[:, 0], 32))
        return tuple(self._group(rows, size) for rows, size in groups if rows.numel())

    @cached_property
    def uniform_work(self) -> tuple[WorkGroup, ...]:
        """Every row as items of up to 16 queries: one shape of computation, whatever the batch holds."""
        return (self._group(torch.arange(self.num_rows, device=self.seq_lens.device), 16),)

    def _group(self, rows_R: Tensor, size: int) -> WorkGroup:
        items_R = (self._queries_B[rows_R] + size - 1) // size
        row_W = rows_R.repeat_interleave(items_R)
        within_W = torch.arange(row_W.shape[0], device=row_W.device)
        within_W = within_W - (items_R.cumsum(0) - items_R).repeat_interleave(items_R)
        end_W = self.query_starts[row_W + 1].long()
        first_W = self.query_starts[row_W].long() + within_W * size
        used_W = (end_W - first_W).clamp(max=size)
        position_W = self.seq_lens[row_W].long() - end_W + first_W
        last_W, order = (position_W + used_W - 1).sort(descending=True, stable=True)
        step_WQ = torch.arange(size, device=row_W.device).minimum(used_W[order, None] - 1)
        columns_N = torch.arange(self.block_tables.shape[1], device=row_W.device)
        owned_WN = columns_N * self.block_size < self.seq_lens[row_W[order], None]
        return WorkGroup(
            tokens_WQ=first_W[order, None] + step_WQ,
            positions_WQ=position_W[order, None] + step_WQ,
            blocks_WN=self.block_tables[row_W[order]].where(owned_WN, 0).long(),
            used_W=used_W[order],
            last_positions=tuple(last_W.tolist()),
        )
