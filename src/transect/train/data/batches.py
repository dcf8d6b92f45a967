"""Micro-batches: documents packed side by side, each seeing only itself.

A plan of an epoch is a pure function of the data, the seed and the epoch's number. So a run that resumes at (epoch,
index) sees exactly what it would have seen. There are two plans:

* ``WindowPlan``, for text: the stream is cut into windows of ``seq_len`` tokens, which are shuffled. A document that
  crosses a window's border is cut there; documents that share a window do not see each other.
* ``DocumentPlan``, for chats: documents stay whole. They are shuffled, and packed best-fit within groups, so that a
  micro-batch is nearly full whatever their lengths.

Shapes: T tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .tokens import TokenStream

IGNORE = -100
"""Label that is excluded from the loss."""
GROUP = 512
"""Number of documents packed together: enough to fill every gap, few enough that a batch stays a random mixture."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A micro-batch of packed documents.

    ``tokens_T`` int64; ``labels_T`` int64, the token that follows or ``IGNORE``; ``positions_T`` int64 within the
    document; ``cu_seqlens`` int32 ``[documents + 1]``. ``num_labels``: labels that count, on the host.
    """

    tokens_T: Tensor
    labels_T: Tensor
    positions_T: Tensor
    cu_seqlens: Tensor
    num_labels: int
    longest: int
    """Length of the longest document in tokens, on the host."""

    @property
    def num_tokens(self) -> int:
        return self.tokens_T.shape[0]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each document, for a batch on the host."""
        return [int(size) for size in self.cu_seqlens.diff()]

    def to(self, device: torch.device) -> Batch:
        """Return a copy on another device; pinned and asynchronous if that is a GPU."""
        if device.type == "cpu":
            return self
        tokens, labels, positions, bounds = (
            x.pin_memory().to(device, non_blocking=True)
            for x in (self.tokens_T, self.labels_T, self.positions_T, self.cu_seqlens)
        )
        return Batch(tokens, labels, positions, bounds, self.num_labels, self.longest)


def padded(batch: Batch, multiple: int) -> Batch:
    """Pad a batch to a multiple of ``multiple`` tokens, with a document of its own and without labels."""
    more = -batch.num_tokens % multiple
    if not more:
        return batch
    count = batch.num_tokens + more
    return Batch(
        F.pad(batch.tokens_T, (0, more)),
        F.pad(batch.labels_T, (0, more), value=IGNORE),
        torch.cat((batch.positions_T, torch.arange(more, device=batch.positions_T.device))),
        F.pad(batch.cu_seqlens, (0, 1), value=count),
        batch.num_labels,
        max(batch.longest, more),
    )


def pack(stream: TokenStream, spans: list[tuple[int, int, bool]]) -> Batch:
    """Pack one document for each span: (first token, token after the last, True if the document continues in the
    stream).

    Where a document continues after its span, its last token has a label too: the token after the span.
    """
    tokens = np.concatenate([np.asarray(stream.tokens[a:b], dtype=np.int64) for a, b, _ in spans])
    labels = np.full(len(tokens), IGNORE, dtype=np.int64)
    positions = np.empty(len(tokens), dtype=np.int64)
    bounds = np.zeros(len(spans) + 1, dtype=np.int32)
    at = 0
    for number, (first, last, goes_on) in enumerate(spans):
        size = last - first
        targets = np.asarray(stream.tokens[first + 1 : last + goes_on], dtype=np.int64)
        if stream.trained is not None:
            targets = np.where(stream.trained[first + 1 : last + goes_on], targets, IGNORE)
        labels[at : at + len(targets)] = targets
        positions[at : at + size] = np.arange(size)
        at += size
        bounds[number + 1] = at
    return Batch(
        torch.from_numpy(tokens),
        torch.from_numpy(labels),
        torch.from_numpy(positions),
        torch.from_numpy(bounds),
        int((labels != IGNORE).sum()),
        int(np.diff(bounds).max()),
    )


class EpochPlan(Protocol):
    """The micro-batches of one epoch.

    Attributes:
        often: repetitions of each source in an epoch, if weights set them.
        sources: the source of each window or document then.
    """

    often: list[float]
    sources: np.ndarray

    def __len__(self) -> int: ...

    def batch(self, index: int) -> Batch:
        """Return micro-batch ``index`` of the epoch."""
        ...


class WindowPlan:
    """Shuffled windows of a stream, ``micro_batch // seq_len`` to a micro-batch.

    The tokens after the last whole micro-batch are left out in this epoch; another shuffle leaves out others.

    Args:
        weights: shares of the tokens by the source that a window begins in; empty: each window once.
        short: the stream may have fewer tokens than a micro-batch, for ``in_order`` alone.

    Raises:
        ValueError: the stream has not enough tokens for one micro-batch.
    """

    def __init__(
        self,
        stream: TokenStream,
        seq_len: int,
        micro_batch: int,
        seed: int,
        epoch: int,
        weights: Sequence[float] = (),
        *,
        short: bool = False,
    ) -> None:
        self.stream = stream
        self.seq_len = seq_len
        self.per_batch = micro_batch // seq_len
        # Another offset in every epoch, so that borders fall elsewhere.
        generator = np.random.Generator(np.random.Philox(key=[seed, epoch]))
        self.offset = int(generator.integers(seq_len)) if epoch and len(stream.tokens) >= 2 * micro_batch else 0
        windows = (len(stream.tokens) - self.offset) // seq_len
        if windows < self.per_batch and not (short and len(stream.tokens) > 1):
            raise ValueError(
                f"the data has {len(stream.tokens)} tokens, less than one micro-batch of {self.per_batch * seq_len}: "
                "give more text, or lower data.micro_batch and data.seq_len"
            )
        self.often = repeats(weights, stream.source_tokens) if weights else []
        self.sources = np.arange(0)
        if weights:
            units = np.arange(windows)
            ends = np.cumsum(stream.source_tokens)
            self.sources = np.searchsorted(ends, self.offset + units * seq_len, side="right")
            self.order = mixed(units, self.sources, self.often, generator)
            if len(self.order) < self.per_batch:
                raise ValueError(
                    f"data.weights leaves {len(self.order)} pieces of {seq_len} tokens in an epoch, less than one "
                    "micro-batch: give more text, or lower data.micro_batch"
                )
        else:
            self.order = generator.permutation(windows)

    def __len__(self) -> int:
        return len(self.order) // self.per_batch

    def batch(self, index: int) -> Batch:
        spans: list[tuple[int, int, bool]] = []
        for window in self.order[index * self.per_batch : (index + 1) * self.per_batch]:
            spans.extend(self._spans(self.offset + int(window) * self.seq_len))
        return pack(self.stream, spans)

    def in_order(self) -> Iterator[Batch]:
        """Yield all windows from the first token to the last, unshuffled; the last window and micro-batch may be
        shorter."""
        starts = range(0, len(self.stream.tokens), self.seq_len)
        for at in range(0, len(starts), self.per_batch):
            yield pack(self.stream, [span for first in starts[at : at + self.per_batch] for span in self._spans(first)])

    def _spans(self, first: int) -> list[tuple[int, int, bool]]:
        """Return the documents, or parts of documents, in one window."""
        last = min(first + self.seq_len, len(self.stream.tokens))
        ends = self.stream.ends
        document = int(np.searchsorted(ends, first, side="right"))
        spans = []
        while first < last:
            end = int(ends[document])
            stop = min(end, last)
            spans.append((first, stop, end > stop))
            first = stop
            document += 1
        return spans


class NothingFits(ValueError):
    """Every document is too long."""


class DocumentPlan:
    """Shuffled whole documents, packed best-fit.

    Args:
        weights: shares of the tokens by source, of documents that are not left out; empty: each once.
        too_long: documents of more than ``seq_len`` tokens are left out (``drop``; ``left_out`` counts them), keep
            their first tokens (``cut``; ``shortened`` counts them) or are an error (``stop``). One that has nothing to
            train on in its first tokens is left out.

    Raises:
        NothingFits: no document is short enough.
        ValueError: one is too long and ``too_long`` says to stop.
    """

    def __init__(
        self,
        stream: TokenStream,
        seq_len: int,
        micro_batch: int,
        seed: int,
        epoch: int,
        weights: Sequence[float] = (),
        too_long: str = "drop",
    ) -> None:
        self.stream, self.seq_len = stream, seq_len
        lengths = stream.lengths()
        over = lengths > seq_len
        if too_long == "stop" and over.any():
            raise ValueError(
                f"{int(over.sum())} documents are longer than data.seq_len = {seq_len} tokens (the longest has "
                f'{lengths.max()}): raise it, or set data.too_long to "drop" or "cut"'
            )
        if too_long == "cut":
            over = over & ~self._trains_early(np.flatnonzero(over))
            lengths = np.minimum(lengths, seq_len)
        usable = np.flatnonzero(~over & (lengths > 1))
        self.left_out = len(lengths) - len(usable)
        self.shortened = int((stream.lengths()[usable] > seq_len).sum())
        if not len(usable):
            early = " and has nothing to train on in its first" if too_long == "cut" else ""
            raise NothingFits(
                f"every document is longer than data.seq_len = {seq_len} tokens{early} (the shortest has "
                f"{stream.lengths().min()}): raise it"
            )
        generator = np.random.Generator(np.random.Philox(key=[seed, epoch]))
        self.often: list[float] = []
        self.sources = np.arange(0)
        if weights:
            self.sources = np.searchsorted(np.array(stream.sources), usable, side="right")
            self.often = repeats(weights, np.bincount(self.sources, lengths[usable], len(weights)).astype(int).tolist())
            order = mixed(usable, self.sources, self.often, generator)
        else:
            order = generator.permutation(usable)
        self.bins: list[list[int]] = []
        for at in range(0, len(order), GROUP):
            self.bins.extend(best_fit(order[at : at + GROUP], lengths, micro_batch))
        self.bins = [self.bins[i] for i in generator.permutation(len(self.bins))]

    def told(self, of: str = "") -> Iterator[str]:
        """Yield a line about documents that are left out, and one about shortened ones. ``of``: their kind, in
        words."""
        for count, what in ((self.left_out, "left out"), (self.shortened, "cut to that length")):
            if count:
                yield (
                    f"{count} of {self.stream.num_documents} documents{of} are longer than data.seq_len = "
                    f"{self.seq_len} tokens and are {what}"
                )

    def __len__(self) -> int:
        return len(self.bins)

    def batch(self, index: int) -> Batch:
        bounds = [self.stream.bounds(document) for document in self.bins[index]]
        return pack(self.stream, [(first, min(last, first + self.seq_len), False) for first, last in bounds])

    def _trains_early(self, documents: np.ndarray) -> np.ndarray:
        """Return, for all documents, True if it is one of these and has a trained token among its first ``seq_len``."""
        found = np.zeros(self.stream.num_documents, dtype=bool)
        assert self.stream.trained is not None
        for document in documents.tolist():
            first, _ = self.stream.bounds(document)
            found[document] = bool(self.stream.trained[first + 1 : first + self.seq_len].any())
        return found


def best_fit(documents: np.ndarray, lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Pack documents best-fit: longest first, each into the fullest bin with room."""
    bins: list[list[int]] = []
    room: list[int] = []
    for document in sorted(documents.tolist(), key=lambda d: (-lengths[d], d)):
        size = int(lengths[document])
        best = min((b for b in range(len(bins)) if room[b] >= size), key=lambda b: room[b], default=None)
        if best is None:
            bins.append([])
            room.append(capacity)
            best = len(bins) - 1
        bins[best].append(document)
        room[best] -= size
    return bins


def repeats(weights: Sequence[float], tokens: Sequence[int]) -> list[float]:
    """Return the repetitions of each source in an epoch that has as many tokens as all sources together.

    Args:
        weights: shares of the tokens of an epoch; they need not add up to 1.
        tokens: of each source.
    """
    whole = sum(weights)
    return [weight / whole * sum(tokens) / max(count, 1) for weight, count in zip(weights, tokens, strict=True)]


def mixed(units: np.ndarray, source: np.ndarray, often: Sequence[float], generator: np.random.Generator) -> np.ndarray:
    """Order the units of an epoch randomly: those of source s ``often[s]`` times, a different part of them in every
    epoch if that is not a whole number.

    Args:
        units: windows or documents, int64. source: the source of each.
    """
    chosen = []
    for number, times in enumerate(often):
        own = units[source == number]
        chosen += [own] * int(times)
        chosen.append(generator.permutation(own)[: round((times - int(times)) * len(own))])
    order: np.ndarray = generator.permutation(np.concatenate(chosen))
    return order
