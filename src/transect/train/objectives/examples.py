"""Examples of two documents each for objectives over whole answers: how they are read, packed and measured.

Documents 2 i and 2 i + 1 are example i and lie side by side in one micro-batch. For ``dpo`` and ``orpo`` they are the
chosen and the rejected answer to a prompt. For ``kto`` they are an answer to its prompt, and the same prompt with an
answer to another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...text.chat_template import ChatTemplate
from ...text.tokenizer import Tokenizer
from ..config import DataConfig
from ..data.batches import Batch, best_fit, pack
from ..data.documents import Forms, last_answer, pair_documents
from ..data.files import find
from ..data.identity import stream_identity
from ..data.layouts import Form, Preference, Rated
from ..data.tokens import TokenStream
from ..model.build import Trainable
from .logprobs import batch_logprobs, document_sums

Side = tuple[list[int], list[bool]]
"""(token ids of a document, mask of the answer's tokens)."""


@dataclass(frozen=True, slots=True)
class ExampleBatch(Batch):
    """A batch of examples. ``reference`` ``[documents]`` float32: log-probabilities of the answers under the frozen
    model, 0 without one. ``good`` ``[examples]`` bool: labels of ``kto``; True otherwise. ``num_labels`` counts
    examples."""

    reference: Tensor
    good: Tensor

    def to(self, device: torch.device) -> ExampleBatch:
        moved = Batch.to(self, device)
        return ExampleBatch(
            moved.tokens_T, moved.labels_T, moved.positions_T, moved.cu_seqlens, self.num_labels, self.longest,
            self.reference.to(device), self.good.to(device),
        )  # fmt: skip


class Examples:
    """Examples of a stream, packed best-fit.

    Args:
        good: ``[examples]``; all are if None.

    Raises:
        ValueError: none is short enough for ``config``.
    """

    def __init__(self, stream: TokenStream, config: DataConfig, seed: int, good: Sequence[bool] | None = None) -> None:
        self.stream, self.config, self.seed = stream, config, seed
        self.reference = torch.zeros(stream.num_documents)
        lengths = stream.lengths().reshape(-1, 2)
        self.count = len(lengths)
        self.good = torch.tensor([True] * self.count if good is None else list(good))
        self._lengths = lengths.sum(1)
        self._usable = np.flatnonzero((lengths.max(1) <= config.seq_len) & (self._lengths <= config.micro_batch))
        if not len(self._usable):
            raise ValueError("every pair is longer than data.seq_len or data.micro_batch: raise them")
        self._planned: tuple[int, list[list[int]]] | None = None

    @property
    def left_out(self) -> int:
        """Number of examples that are too long."""
        return self.count - len(self._usable)

    def plan(self, epoch: int) -> list[list[int]]:
        """Return the examples of each micro-batch of an epoch."""
        if self._planned is None or self._planned[0] != epoch:
            generator = np.random.Generator(np.random.Philox(key=[self.seed, epoch]))
            order = generator.permutation(self._usable)
            bins = best_fit(order, self._lengths, self.config.micro_batch)
            self._planned = epoch, [bins[i] for i in generator.permutation(len(bins))]
        return self._planned[1]

    def batch(self, examples: Sequence[int]) -> ExampleBatch:
        documents = [document for example in examples for document in (2 * example, 2 * example + 1)]
        packed = pack(self.stream, [(*self.stream.bounds(document), False) for document in documents])
        packed = replace(packed, num_labels=len(examples))
        return ExampleBatch(
            packed.tokens_T, packed.labels_T, packed.positions_T, packed.cu_seqlens, packed.num_labels, packed.longest,
            self.reference[documents], self.good[list(examples)],
        )  # fmt: skip

    @torch.no_grad()
    def add_reference(self, trainable: Trainable) -> None:
        """Compute the log-probabilities of all answers under the present model, as the reference."""
        for examples in self.plan(0):
            batch = self.batch(examples).to(trainable.device)
            sums = document_sums(batch_logprobs(trainable.model, batch), batch.cu_seqlens)
            documents = [document for example in examples for document in (2 * example, 2 * example + 1)]
            self.reference[documents] = sums.float().cpu()

    def identity(self) -> dict[str, str]:
        """Compute digests; see ``data/identity.py``."""
        sizes = f"{self.config.seq_len} {self.config.micro_batch} {self.seed} pairs"
        found = stream_identity(self.stream)
        if not bool(self.good.all()):
            found["masks"] += np.packbits(self.good.numpy()).tobytes().hex()
        return {**found, "sizes": sizes}


def read_pairs(
    paths: Sequence[str],
    tokenizer: Tokenizer,
    template: ChatTemplate,
    *,
    skip: bool = False,
    columns: Mapping[str, str] | None = None,
    tell: Callable[[str], None] = lambda said: None,
) -> TokenStream:
    """Read the pairs of files as documents: chosen, rejected, chosen, rejected, ...

    Args:
        skip: leave out rows that cannot be used.
        columns: as ``data.columns``.
        tell: receives a summary of each file.

    Raises:
        ValueError: no file, or a row that is not a pair; its place is named.
    """

    def sides(form: Form) -> list[Side]:
        if not isinstance(form, Preference):
            raise ValueError('a pair needs "chosen" and "rejected"; without them set objective = "next_token"')
        return pair_documents(form, tokenizer, template)

    pairs = _read(
        paths,
        sides,
        Forms(skip=skip, columns=columns, template=template),
        tell,
        'objective = "dpo" needs rows with chosen and rejected',
    )
    return _stream([side for pair in pairs for side in pair])


def read_rated(
    paths: Sequence[str],
    tokenizer: Tokenizer,
    template: ChatTemplate,
    *,
    seed: int,
    skip: bool = False,
    columns: Mapping[str, str] | None = None,
    tell: Callable[[str], None] = lambda said: None,
) -> tuple[TokenStream, list[bool]]:
    """Read judged answers as documents, each followed by its prompt with another row's answer; also return which
    answers are good.

    A pair counts as a good and a bad answer. Arguments and errors as for ``read_pairs``; ``seed`` decides whose answer
    stands beside.
    """

    def rated(form: Form) -> list[tuple[Rated, Side]]:
        if isinstance(form, Preference):
            judged = [
                Rated(form.prompt, form.chosen, True, form.tools),
                Rated(form.prompt, form.rejected, False, form.tools),
            ]
        elif isinstance(form, Rated):
            judged = [form]
        else:
            raise ValueError('a judged answer needs "prompt", "completion" and a "label" of true or false')
        return [(one, last_answer(one.prompt, one.completion, one.tools, tokenizer, template)) for one in judged]

    rows = _read(
        paths,
        rated,
        Forms(skip=skip, columns=columns, template=template),
        tell,
        'objective = "kto" needs rows with prompt, completion and label',
    )
    found = [one for row in rows for one in row]
    if len(found) < 2:
        raise ValueError(f'{", ".join(paths)} holds one answer: objective = "kto" needs at least two')
    order = np.random.Generator(np.random.Philox(key=[seed, 2**32])).permutation(len(found))
    partner = dict(zip(order.tolist(), np.roll(order, 1).tolist(), strict=True))
    sides = []
    for index, (own, side) in enumerate(found):
        other = found[partner[index]][0]
        sides += [side, last_answer(own.prompt, other.completion, own.tools, tokenizer, template)]
    return _stream(sides), [own.good for own, _ in found]


def _read(
    paths: Sequence[str], use: Callable[[Form], Any], forms: Forms, tell: Callable[[str], None], needs: str
) -> list[Any]:
    found: list[Any] = []
    for file in find(list(paths)):
        if file.kind in ("text", "tokens"):
            raise ValueError(f"{file.path} holds no answers to compare: {needs}")
        found += forms.read(str(file.path), file.rows(), use)
    for tally in forms.tallies:
        tell(str(tally))
    if not found:
        raise ValueError(f"{', '.join(paths)} holds no rows: {needs}")
    return found


def _stream(sides: Sequence[Side]) -> TokenStream:
    tokens = [token for ids, _ in sides for token in ids]
    trained = [answer for _, answers in sides for answer in answers]
    ends = np.cumsum([len(ids) for ids, _ in sides])
    return TokenStream(np.array(tokens, dtype=np.uint32), ends.astype(np.uint64), np.array(trained))
