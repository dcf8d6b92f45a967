"""Predict the next token: pretraining, and fine-tuning on text or on the assistant's part of chats."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from ..config import TrainConfig
from ..data.batches import IGNORE, Batch
from ..data.loader import Loader, Position, load_stream
from ..model.build import Trainable
from .balance import Balance
from .base import Evaluation, Objective, StepFailed
from .loss import batch_loss, evaluate, token_loss
from .share import WHOLE, RolloutShare, Sums

if TYPE_CHECKING:
    from ..data.streaming import StreamingLoader


class NextToken(Objective):
    """See ``Objective``."""

    def __init__(self, config: TrainConfig, trainable: Trainable) -> None:
        self._config, self._trainable = config, trainable
        self._accumulate = config.accumulate
        self._loss = token_loss(trainable.device, trainable.source.config.logit_softcap)
        self._balance = Balance(trainable.model, config.router)
        vocab_size = trainable.source.config.vocab_size
        tools = vocab_size, trainable.tokenizer, trainable.template
        ahead = trainable.device.type != "cpu"
        self._described: list[str] = []
        tell = self._described.append
        reading: dict[str, Any] = {
            "skip": config.data.on_bad_row == "skip",
            "turns": config.data.turns,
            "columns": config.data.columns,
            "tell": tell,
        }
        self.loader: Loader | StreamingLoader
        self.outside = config.data.streaming
        if config.data.streaming:
            from ..data.streaming import StreamingLoader

            self.loader = StreamingLoader(config.data, config.seed, *tools, tell=tell)
        else:
            stream = load_stream(config.data.train, *tools, **reading)
            self.loader = Loader(stream, config.data, config.seed, ahead=ahead, tell=tell)
        self.validation: Loader | None = None
        self._validation_bytes: int | None = None
        if config.data.validation:
            held_out = load_stream(config.data.validation, *tools, **reading)
            self.validation = Loader(held_out, config.data, config.seed, held_out=True, tell=tell)

    @property  # type: ignore[override]
    def position(self) -> Position:
        return self.loader.position

    @position.setter
    def position(self, value: Position) -> None:
        self.loader.position = value

    def described(self) -> Sequence[str]:
        return self._described

    def batches(self, step: int) -> Sequence[Batch]:
        self._balance.begin()
        before = copy(self.position)
        try:
            return [next(self.loader) for _ in range(self._accumulate)]
        except (ValueError, OSError) as error:  # of data that is read as the run goes
            self.position = before
            raise StepFailed(str(error)) from error

    def micro_batches(self, epoch: int) -> int:
        return self.loader.size(epoch)

    def loss(self, batch: Batch) -> Tensor:
        with self._balance.watching():
            loss = batch_loss(self._trainable.model, batch, self._loss, self._trainable.parallel)
        return loss + self._balance.loss(batch.num_labels)

    def metrics(self) -> Sums:
        return self._balance.sums()

    def evaluate(self, share: RolloutShare = WHOLE) -> Evaluation | None:
        if self.validation is None:
            return None
        own = self._trainable
        loss, labels = evaluate(own.model, self.validation.one_epoch(), self._loss, own.parallel, share)
        if self._validation_bytes is None:
            self._validation_bytes = self._count_bytes(self.validation)
        return Evaluation(loss, labels, self._validation_bytes)

    def _count_bytes(self, loader: Loader) -> int:
        """Count the bytes of text that an epoch's labels decode to, equal in every epoch; special tokens have none. 0
        without a tokenizer."""
        tokenizer = self._trainable.tokenizer
        if tokenizer is None:
            return 0
        counts = np.zeros(self._trainable.source.config.vocab_size, dtype=np.int64)
        for batch in loader.one_epoch():
            labels = batch.labels_T.numpy()
            counts += np.bincount(labels[labels != IGNORE], minlength=len(counts))
        return sum(
            int(counts[token]) * len(tokenizer.token_bytes(token))
            for token in np.flatnonzero(counts).tolist()
            if token not in tokenizer.special_ids
        )

    def identity(self) -> dict[str, str]:
        return self.loader.identity()
