r"""Distillation: at every trained token of the data, the distribution of a larger model is the target.

Data are those of ``next_token``. The teacher is a second model of the same class, frozen, on the same device and in the
same dtype; it must know the same tokens. Its logits are never kept: both models' hidden states meet in
``divergence.py``, which has the formulas.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ...checkpoints.load import fill, stored_weights
from ...checkpoints.resolve import ModelSource
from ...models.context import VarlenContext
from ...models.decoder import Decoder
from ...text.tokenizer import Tokenizer
from ..config import TrainConfig
from ..data.batches import Batch
from ..data.identity import base_identity
from ..model.build import DTYPES, Trainable, teacher_of, training_ops
from .base import Evaluation
from .divergence import Divergence, distillation_loss
from .logprobs import batch_hidden
from .next_token import NextToken
from .share import WHOLE, RolloutShare, Sums


class Distillation(NextToken):
    """See ``Objective``.

    Raises:
        ValueError: there is no teacher, or its tokenizer is another one.
    """

    def __init__(self, config: TrainConfig, trainable: Trainable) -> None:
        source = teacher_of(config)
        check_tokens(trainable, source)
        super().__init__(config, trainable)
        self._source = source
        self._teacher = load_teacher(source, trainable, config)
        settings = config.distill
        self._how = Divergence(settings.divergence, settings.mixture, settings.temperature, settings.weight)
        self._seen: list[tuple[Tensor, int]] = []

    def described(self) -> Sequence[str]:
        size = sum(p.numel() for p in self._teacher.parameters())
        return [*super().described(), f"the teacher is {self._config.distill.teacher}: {size / 1e6:.1f}M numbers"]

    def batches(self, step: int) -> Sequence[Batch]:
        self._seen = []
        return super().batches(step)

    def loss(self, batch: Batch) -> Tensor:
        student = self._trainable.model
        with torch.no_grad():
            context = VarlenContext(batch.cu_seqlens, self._teacher.ops)
            teacher_TE = self._teacher(batch.tokens_T, batch.positions_T, context)
            head_VE = self._teacher.head.dense()
        loss, divergence = distillation_loss(
            batch_hidden(student, batch), student.head.dense(), teacher_TE, head_VE, batch.labels_T, self._how
        )
        if torch.is_grad_enabled():
            self._seen.append((divergence, batch.num_labels))
        return loss

    def metrics(self) -> Sums:
        total = math.fsum(float(value) * count for value, count in self._seen)
        return {"divergence": (total, sum(count for _, count in self._seen))}

    @torch.no_grad()
    def evaluate(self, share: RolloutShare = WHOLE) -> Evaluation | None:
        """Compute the training loss on the validation data, and the cross entropy of the data's own tokens."""
        if self.validation is None:
            return None
        plain = super().evaluate(share)
        assert plain is not None
        total, labels = 0.0, 0
        for batch, counts in share.of(batch for batch in self.validation.one_epoch() if batch.num_labels):
            found = float(self.loss(batch.to(self._trainable.device)))
            if counts:
                total += found * batch.num_labels
                labels += batch.num_labels
        loss, labels = share.means({"loss": (total, labels)})["loss"]
        return Evaluation(loss, labels, extra={"cross_entropy": plain.loss})

    def identity(self) -> dict[str, str]:
        return {**super().identity(), "teacher": base_identity(self._source)}


def check_tokens(trainable: Trainable, teacher: ModelSource) -> None:
    """Check that the teacher's tokens are the student's. Raises ValueError."""
    theirs = Tokenizer.from_source(teacher)
    ours = trainable.tokenizer
    if ours is None or not isinstance(theirs, Tokenizer):
        raise ValueError('objective = "distill" needs a tokenizer beside both models: their tokens must be the same')
    if ours.fingerprint != theirs.fingerprint:
        raise ValueError(
            f"the teacher {teacher.path} has another tokenizer than the model, so its tokens mean something else: name "
            "a teacher of the same family in distill.teacher"
        )


def load_teacher(source: ModelSource, trainable: Trainable, config: TrainConfig) -> Decoder:
    """Load the frozen model, on the device and in the dtype of the student."""
    ops = training_ops(trainable.device)
    model = Decoder(source.config, device="meta", dtype=DTYPES[config.precision], ops=ops)
    model = model.to_empty(device=trainable.device)
    fill(model, stored_weights(source))
    return model.requires_grad_(False)
