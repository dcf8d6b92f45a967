"""Share parts of ``dpo``, ``orpo`` and ``kto``: examples of two documents, their epochs, the reference and validation.

The frozen reference model is needed only for its log-probabilities of the answers, so these are computed once, before
the first step, and no second model is kept. Logits exist a few rows at a time (``logprobs.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..config import TrainConfig
from ..data.batches import IGNORE, Batch
from ..data.identity import base_identity
from ..data.loader import Position
from ..data.tokens import check_ids
from ..model.build import Trainable
from .base import Evaluation, Objective
from .examples import ExampleBatch, Examples, read_pairs
from .logprobs import batch_logprobs, document_sums
from .share import WHOLE, RolloutShare, Sums


class Preferences(Objective):
    """See ``Objective``. Making it computes the reference, so the model must still have its first weights then."""

    NAME = "dpo"
    REFERENCE = True
    """True if the loss compares with the frozen model."""

    def __init__(self, config: TrainConfig, trainable: Trainable) -> None:
        if trainable.tokenizer is None or trainable.template is None:
            raise ValueError(f'objective = "{self.NAME}" needs a model with a tokenizer and a chat template')
        self._config, self._trainable = config, trainable
        self.position = Position()
        self._described: list[str] = []
        self._seen: list[dict[str, Tensor]] = []
        self._train = self._load(config.data.train)
        self._validation = self._load(config.data.validation) if config.data.validation else None

    def read(self, paths: Sequence[str]) -> Examples:
        """Read the examples of files. Raises ValueError if they cannot be read."""
        trainable, config = self._trainable, self._config
        assert trainable.tokenizer is not None and trainable.template is not None
        stream = read_pairs(
            paths, trainable.tokenizer, trainable.template, skip=config.data.on_bad_row == "skip",
            columns=config.data.columns, tell=self._described.append,
        )  # fmt: skip
        return Examples(stream, config.data, config.seed)

    def examples_loss(self, batch: ExampleBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the mean loss over the examples, and further numbers for the log, ``[examples]`` or some of them."""
        raise NotImplementedError

    def gains(self, batch: ExampleBatch) -> Tensor:
        """Return the gain in log-probability of each answer over the reference, ``[examples, 2]`` nats."""
        answers = document_sums(batch_logprobs(self._trainable.model, batch), batch.cu_seqlens)
        return (answers - batch.reference).view(-1, 2)

    @staticmethod
    def answer_tokens(batch: ExampleBatch) -> Tensor:
        """Return the number of tokens of each document's answer, ``[examples, 2]`` float32."""
        return document_sums((batch.labels_T != IGNORE).float(), batch.cu_seqlens).view(-1, 2)

    def described(self) -> Sequence[str]:
        return self._described

    def batches(self, step: int) -> Sequence[Batch]:
        self._seen = []
        made = []
        for _ in range(self._config.accumulate):
            plan = self._train.plan(self.position.epoch)
            if self.position.index >= len(plan):
                self.position = Position(self.position.epoch + 1, 0)
                plan = self._train.plan(self.position.epoch)
            made.append(self._train.batch(plan[self.position.index]))
            self.position = Position(self.position.epoch, self.position.index + 1)
        return made

    def micro_batches(self, epoch: int) -> int:
        return len(self._train.plan(epoch))

    def loss(self, batch: Batch) -> Tensor:
        assert isinstance(batch, ExampleBatch)
        loss, numbers = self.examples_loss(batch)
        if torch.is_grad_enabled():
            self._seen.append({name: value.detach() for name, value in numbers.items()})
        return loss

    def metrics(self) -> Sums:
        return _sums(self._seen)

    @torch.no_grad()
    def evaluate(self, share: RolloutShare = WHOLE) -> Evaluation | None:
        if self._validation is None:
            return None
        total, examples, seen = 0.0, 0, []
        for chosen, counts in share.of(self._validation.plan(0)):
            batch = self._validation.batch(chosen).to(self._trainable.device)
            found, numbers = self.examples_loss(batch)
            if counts:
                total += float(found) * batch.num_labels
                examples += batch.num_labels
                seen.append(numbers)
        extra = {name: mean for name, (mean, count) in share.means(_sums(seen)).items() if count}
        loss, examples = share.means({"loss": (total, examples)})["loss"]
        return Evaluation(loss, examples, extra=extra)

    def identity(self) -> dict[str, str]:
        found = self._train.identity()
        if self.REFERENCE:
            found["base"] = base_identity(self._trainable.source)
        return found

    def _load(self, paths: Sequence[str]) -> Examples:
        examples = self.read(paths)
        names = ", ".join(paths)
        check_ids(int(examples.stream.tokens.max()), self._trainable.source.config.vocab_size, names)
        if examples.left_out and self._config.data.too_long == "stop":
            raise ValueError(
                f"{examples.left_out} of {examples.count} pairs of {names} are longer than data.seq_len or "
                'data.micro_batch: raise them, or set data.too_long to "drop"'
            )
        if examples.left_out:
            self._described.append(
                f"{examples.left_out} of {examples.count} pairs of {names} are longer than data.seq_len or "
                "data.micro_batch and are left out"
            )
        if self.REFERENCE:
            examples.add_reference(self._trainable)
        return examples


def _sums(seen: Sequence[Mapping[str, Tensor]]) -> Sums:
    """Sum all recorded values of each number, with their count."""
    names = {name: None for numbers in seen for name in numbers}
    joined = {name: torch.cat([each[name] for each in seen if name in each]).double() for name in names}
    return {name: (float(values.sum()), len(values)) for name, values in joined.items()}
