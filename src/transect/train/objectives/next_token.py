"""Predict the next token: pretraining, and fine-tuning on text or on the assistant's part of chats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from ..batches import Batch
from ..config import TrainConfig
from ..data import Loader, Position, load_stream
from ..loss import batch_loss, evaluate, token_loss
from ..model import Trainable


class NextToken:
    """See ``Objective``."""

    def __init__(self, config: TrainConfig, trainable: Trainable) -> None:
        self._trainable = trainable
        self._accumulate = config.accumulate
        self._loss = token_loss(trainable.device)
        vocab_size = trainable.source.config.vocab_size
        tools = vocab_size, trainable.tokenizer, trainable.template
        self.loader = Loader(load_stream(config.data.train, *tools), config.data, config.seed)
        self.validation: Loader | None = None
        if config.data.validation:
            self.validation = Loader(load_stream(config.data.validation, *tools), config.data, config.seed)

    @property
    def position(self) -> Position:
        return self.loader.position

    @position.setter
    def position(self, value: Position) -> None:
        self.loader.position = value

    def batches(self, step: int) -> Sequence[Batch]:
        return [next(self.loader) for _ in range(self._accumulate)]

    def loss(self, batch: Batch) -> Tensor:
        return batch_loss(self._trainable.model, batch, self._loss)

    def metrics(self) -> Mapping[str, float]:
        return {}

    def evaluate(self) -> tuple[float, int, int] | None:
        if self.validation is None:
            return None
        loss, labels = evaluate(self._trainable.model, self.validation.one_epoch(), self._loss)
        tokenizer, size = self._trainable.tokenizer, 0
        if tokenizer is not None:
            for batch in self.validation.one_epoch():
                size += sum(len(tokenizer.token_bytes(token)) for token in batch.labels_T.tolist() if token >= 0)
        return loss, labels, size

    def fingerprint(self) -> str:
        return self.loader.fingerprint()
