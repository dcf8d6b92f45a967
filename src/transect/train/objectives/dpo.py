r"""Direct preference optimization (Rafailov et al. 2023, arXiv:2305.18290).

For a prompt with a chosen answer c and a rejected one r, under the model p and the frozen model p0 it began as:

    loss = -log sigmoid(beta ((log p(c) - log p0(c)) - (log p(r) - log p0(r))))

p0 is needed only for its log-probabilities of the answers, so these are taken once, before the first step, and no
second model is kept. Data: rows with ``chosen`` and ``rejected``, strings or messages, after a ``prompt`` or after the
messages with which both begin. A pair's two documents lie side by side in one micro-batch; a label of the step is a
pair.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ...text.chat_template import ChatTemplate
from ...text.tokenizer import Tokenizer
from ..batches import Batch, best_fit, pack
from ..config import DataConfig, TrainConfig
from ..data import Position
from ..documents import Forms, said
from ..files import find
from ..identity import stream_identity
from ..layouts import Form, Messages, Preference
from ..logprobs import batch_logprobs, document_sums
from ..model import Trainable
from ..tokens import TokenStream
from .base import Evaluation, Objective


@dataclass(frozen=True, slots=True)
class PairBatch(Batch):
    """Documents 2 i and 2 i + 1 are the chosen and the rejected side of a pair; ``reference`` ``[documents]`` float32
    are their log-probabilities under the frozen model. ``num_labels`` counts pairs."""

    reference: Tensor

    def to(self, device: torch.device) -> PairBatch:
        moved = Batch.to(self, device)
        return PairBatch(
            moved.tokens_T, moved.labels_T, moved.positions_T, moved.cu_seqlens, self.num_labels, self.longest,
            self.reference.to(device),
        )  # fmt: skip


class DPO(Objective):
    """See ``Objective``. Making it computes the reference, so the model must still have its first weights then."""

    def __init__(self, config: TrainConfig, trainable: Trainable) -> None:
        if trainable.tokenizer is None or trainable.template is None:
            raise ValueError('objective = "dpo" needs a model with a tokenizer and a chat template')
        self._config, self._trainable = config, trainable
        self._beta = config.dpo.beta
        self.position = Position()
        self._metrics: list[Tensor] = []
        tools = trainable.tokenizer, trainable.template
        self._described: list[str] = []
        reading: dict[str, Any] = {"skip": config.data.on_bad_row == "skip", "tell": self._described.append}
        self._train = _Pairs(read_pairs(config.data.train, *tools, **reading), config.data, config.seed)
        if self._train.left_out:
            self._described.append(
                f"{self._train.left_out} of {self._train.pairs} pairs are longer than data.seq_len or data.micro_batch "
                "and are left out"
            )
        self._train.add_reference(trainable)
        self._validation: _Pairs | None = None
        if config.data.validation:
            self._validation = _Pairs(read_pairs(config.data.validation, *tools, **reading), config.data, config.seed)
            self._validation.add_reference(trainable)

    def described(self) -> Sequence[str]:
        return self._described

    def batches(self, step: int) -> Sequence[Batch]:
        self._metrics = []
        made = []
        for _ in range(self._config.accumulate):
            plan = self._train.plan(self.position.epoch)
            if self.position.index >= len(plan):
                self.position = Position(self.position.epoch + 1, 0)
                plan = self._train.plan(self.position.epoch)
            made.append(self._train.batch(plan[self.position.index]))
            self.position = Position(self.position.epoch, self.position.index + 1)
        return made

    def loss(self, batch: Batch) -> Tensor:
        assert isinstance(batch, PairBatch)
        answers = document_sums(batch_logprobs(self._trainable.model, batch), batch.cu_seqlens)
        gain = (answers - batch.reference).view(-1, 2)
        margin = gain[:, 0] - gain[:, 1]
        self._metrics.append(margin.detach())
        return -F.logsigmoid(self._beta * margin).mean()

    def metrics(self) -> Mapping[str, float]:
        margins = torch.cat(self._metrics)
        return {"margin": float(margins.mean()), "accuracy": float((margins > 0).float().mean())}

    @torch.no_grad()
    def evaluate(self) -> Evaluation | None:
        if self._validation is None:
            return None
        kept, total, pairs = self._metrics, 0.0, 0
        for documents in self._validation.plan(0):
            batch = self._validation.batch(documents).to(self._trainable.device)
            total += float(self.loss(batch)) * batch.num_labels
            pairs += batch.num_labels
        self._metrics = kept
        return Evaluation(total / pairs, pairs)

    def identity(self) -> dict[str, str]:
        return self._train.identity()


class _Pairs:
    """Documents 2 i and 2 i + 1 are pair i, packed best-fit."""

    def __init__(self, stream: TokenStream, config: DataConfig, seed: int) -> None:
        self.stream, self.config, self.seed = stream, config, seed
        self.reference = torch.zeros(stream.num_documents)
        lengths = stream.lengths().reshape(-1, 2)
        self._lengths = lengths.sum(1)
        self._usable = np.flatnonzero((lengths.max(1) <= config.seq_len) & (self._lengths <= config.micro_batch))
        self.pairs, self.left_out = len(lengths), len(lengths) - len(self._usable)
        if not len(self._usable):
            raise ValueError("every pair is longer than data.seq_len or data.micro_batch: raise them")
        self._planned: tuple[int, list[list[int]]] | None = None

    def plan(self, epoch: int) -> list[list[int]]:
        """The pairs of each micro-batch of an epoch."""
        if self._planned is None or self._planned[0] != epoch:
            generator = np.random.Generator(np.random.Philox(key=[self.seed, epoch]))
            order = generator.permutation(self._usable)
            bins = best_fit(order, self._lengths, self.config.micro_batch)
            self._planned = epoch, [bins[i] for i in generator.permutation(len(bins))]
        return self._planned[1]

    def batch(self, pairs: Sequence[int]) -> PairBatch:
        documents = [side for pair in pairs for side in (2 * pair, 2 * pair + 1)]
        packed = pack(self.stream, [(*self.stream.bounds(document), False) for document in documents])
        packed = replace(packed, num_labels=len(pairs))
        return PairBatch(
            packed.tokens_T, packed.labels_T, packed.positions_T, packed.cu_seqlens, packed.num_labels, packed.longest,
            self.reference[documents],
        )  # fmt: skip

    @torch.no_grad()
    def add_reference(self, trainable: Trainable) -> None:
        for pairs in self.plan(0):
            batch = self.batch(pairs).to(trainable.device)
            sums = document_sums(batch_logprobs(trainable.model, batch), batch.cu_seqlens)
            documents = [side for pair in pairs for side in (2 * pair, 2 * pair + 1)]
            self.reference[documents] = sums.float().cpu()

    def identity(self) -> dict[str, str]:
        sizes = f"{self.config.seq_len} {self.config.micro_batch} {self.seed} pairs"
        return {**stream_identity(self.stream), "sizes": sizes}


def read_pairs(
    paths: Sequence[str],
    tokenizer: Tokenizer,
    template: ChatTemplate,
    *,
    skip: bool = False,
    tell: Callable[[str], None] = lambda said: None,
) -> TokenStream:
    """The pairs of files as documents: chosen, rejected, chosen, rejected, ...

    Args:
        skip: leave out rows that cannot be used.
        tell: is told of each file what was found in it.

    Raises:
        ValueError: no file, or a row that is no pair; its place is named.
    """
    tokens: list[int] = []
    trained: list[bool] = []
    ends: list[int] = []
    forms = Forms(skip=skip)

    def sides(form: Form) -> list[tuple[list[int], list[bool]]]:
        if not isinstance(form, Preference):
            raise ValueError('a pair needs "chosen" and "rejected"; without them set objective = "next_token"')
        return [_side(form, answer, tokenizer, template) for answer in (form.chosen, form.rejected)]

    for file in find(list(paths)):
        if file.kind in ("text", "tokens"):
            raise ValueError(f'{file.path} holds no pairs: objective = "dpo" needs rows with chosen and rejected')
        for pair in forms.read(str(file.path), file.rows(), sides):
            for ids, answer in pair:
                tokens += ids
                trained += answer
                ends.append(len(tokens))
    for tally in forms.tallies:
        tell(str(tally))
    if not ends:
        raise ValueError(f"{', '.join(paths)} holds no pairs")
    return TokenStream(np.array(tokens, dtype=np.uint32), np.array(ends, dtype=np.uint64), np.array(trained))


def _side(
    form: Preference, answer: Messages, tokenizer: Tokenizer, template: ChatTemplate
) -> tuple[list[int], list[bool]]:
    variables: dict[str, Any] = {"tools": form.tools} if form.tools else {}
    opened = template.render([*form.prompt, *answer[:-1]], add_generation_prompt=True, **variables)
    answered = template.render([*form.prompt, *answer], add_generation_prompt=False, **variables)
    if not answered.startswith(opened):
        raise ValueError("the chat template does not render an answer as the continuation of its prompt")
    before = tokenizer.encode(opened, parse_special=True)
    ids = tokenizer.encode(answered[len(opened) :], parse_special=True)
    return before + ids, [False] * len(before) + said(ids, tokenizer)
