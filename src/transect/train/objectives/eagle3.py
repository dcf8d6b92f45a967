"""Train an EAGLE-3 head for a model, which stays as it is (Li et al. 2025, arXiv:2503.01840).

Data are those of ``next_token``; best are answers that the model itself has drawn. ``head_loss.py`` has the loss. A
checkpoint is a head in the layout of published ones: ``--speculative-config '{"method": "eagle3", "model": RUN/last}'``
serves it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ...checkpoints.eagle import load_head, resolve_head, save_head
from ...models.eagle import EagleHead
from ...spec.eagle import HeadConfig, default_layers
from ...spec.model import ModelConfig
from ..config import TrainConfig
from ..config.objectives import ObjectiveKind
from ..data.batches import IGNORE, Batch
from ..data.loader import Loader
from ..model.build import DTYPES, Trainable, training_ops
from .base import Evaluation
from .head_loss import HeadLoss, head_loss, rows_of, targets_of
from .next_token import NextToken
from .share import WHOLE, RolloutShare, Sums


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Config:
    """An EAGLE-3 head.

    Attributes:
        vocabulary: tokens that the head can draw: the most frequent ones of the training data.
        layers: layers of the model whose inputs it reads, three ascending numbers; empty for a low, a middle and a high
            one.
        steps: steps of the head on its own outputs in the loss: drafts in a row that it learns to make.
        decay: factor of the loss of each of these steps over that of the step before.
        start: head to continue, a directory or hub id; empty for a new one.
    """

    vocabulary: int = 32000
    layers: tuple[int, ...] = ()
    steps: int = 5
    decay: float = 0.8
    start: str = ""

    def __post_init__(self) -> None:
        for name in ("vocabulary", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"eagle3.{name} must be at least 1, not {getattr(self, name)}")
        if not 0 < self.decay <= 1:
            raise ValueError(f"eagle3.decay must be more than 0 and at most 1, not {self.decay}")


@dataclass(frozen=True)
class HeadTrainable(Trainable):
    """A frozen model, and the head that is trained for it."""

    head: EagleHead = None  # type: ignore[assignment]
    form: HeadConfig = None  # type: ignore[assignment]

    def snapshot(self, weights: Mapping[str, Tensor] | None = None) -> Callable[[Path], None]:
        """Copy the head's weights to the CPU; return a function that writes them. See ``Trainable.snapshot``."""
        state = {name: tensor.detach().cpu().clone() for name, tensor in self.head.state_dict().items()}
        places = self.head.head.places_W.cpu().clone()
        return lambda directory: save_head(state, places, self.form, directory)

    @torch.no_grad()
    def take(self, directory: Path) -> bool:
        """Read the head of a checkpoint."""
        found = load_head(
            resolve_head(str(directory), self.source),
            self.source,
            self.head.embed,
            ops=self.head.ops,
            device=self.device,
            dtype=self.head.fc.dense().dtype,
        )
        self.head.load_state_dict(found.state_dict())
        self.head.head.places_W.copy_(found.head.places_W)
        return True


def head_of(config: TrainConfig, trainable: Trainable) -> HeadTrainable:
    """Freeze the model of a run, and build a head beside it.

    Raises:
        ValueError: the run has adapters or several ranks, or its head does not fit the model.
    """
    settings: Eagle3Config = config.own
    if config.task != "finetune" or config.parallel.layout.size > 1:
        raise ValueError(
            'objective = "eagle3" trains a head on one device: set task to "finetune" and leave parallel out'
        )
    if config.data.streaming:
        raise ValueError(
            'objective = "eagle3" counts the tokens of its data before the first step: leave out data.streaming'
        )
    model, source, dtype = trainable.model.requires_grad_(False), trainable.source, DTYPES[config.precision]
    where = {"ops": training_ops(trainable.device), "device": trainable.device, "dtype": dtype}
    if settings.start:
        begun = resolve_head(settings.start, source)
        form, head = begun.head, load_head(begun, source, model.embed, **where)  # type: ignore[arg-type]
    else:
        form = new_head(source.config, settings)
        head = EagleHead(form, form.layers_of(source.config), embed=model.embed, **where)  # type: ignore[arg-type]
        _draw(head, trainable, config.seed)
    head.requires_grad_(True)
    own = {each.name: getattr(trainable, each.name) for each in fields(trainable)}
    own |= {"parameters": dict(head.named_parameters())}
    return HeadTrainable(**own, head=head, form=form)


def new_head(model: ModelConfig, settings: Eagle3Config) -> HeadConfig:
    """Describe a head of the width of ``model``."""
    layer = ModelConfig(
        architecture="llama",
        vocab_size=model.vocab_size,
        dim=model.dim,
        n_layers=1,
        n_heads=model.n_heads,
        n_kv_heads=model.n_kv_heads,
        head_dim=model.head_dim,
        ffn_dim=model.ffn_dim,
        max_position=model.max_position,
        norm_eps=model.norm_eps,
        tied_embeddings=False,
        rope=model.rope,
        bos_token_id=model.bos_token_id,
        eos_token_ids=model.eos_token_ids,
    )
    layers = settings.layers or default_layers(model.n_layers)
    form = HeadConfig(layer, min(settings.vocabulary, model.vocab_size), model.dim, layers)
    form.layers_of(model)
    return form


@torch.no_grad()
def _draw(head: EagleHead, trainable: Trainable, seed: int) -> None:
    """Draw the weights of a new head. (A head that began as the model's last layers would be sure of the token that it
    is given, and worse than one that begins at random.)"""
    generator = torch.Generator(trainable.device).manual_seed(seed)
    for name, parameter in head.named_parameters():
        if "norm" in name:
            parameter.fill_(1.0)
        else:
            parameter.normal_(std=0.02, generator=generator)


class Eagle3(NextToken):
    """See ``Objective``."""

    def __init__(self, config: TrainConfig, trainable: HeadTrainable) -> None:
        super().__init__(config, trainable)
        assert isinstance(self.loader, Loader)
        self._settings: Eagle3Config = config.own
        self._head, self._model = trainable.head, trainable.model
        self._seen: list[HeadLoss] = []
        counts = _count_tokens(self.loader, trainable.source.config.vocab_size)
        places = self._head.head.places_W
        if not self._settings.start:
            places.copy_(_most_frequent(counts, len(places)))
            # The model's own rows, of a size at which logits are small.
            rows = self._model.head.dense()[places].float()
            rows *= 0.5 / (rows.std() * math.sqrt(rows.shape[1]))
            trainable.parameters["head.lm_head.weight"].data.copy_(rows)
        self._covered = float(counts[places.cpu().numpy()].sum() / max(1, counts.sum()))

    def described(self) -> Sequence[str]:
        numbers = sum(parameter.numel() for parameter in self._head.parameters())
        layers = ", ".join(map(str, self._head.features.layers))
        return [
            *super().described(),
            f"the head has {numbers / 1e6:.1f}M numbers, reads the inputs of layers {layers}, and draws from "
            f"{len(self._head.head.places_W)} tokens, which are {self._covered:.1%} of the data",
        ]

    def batches(self, step: int) -> Sequence[Batch]:
        self._seen = []
        return super().batches(step)

    def loss(self, batch: Batch) -> Tensor:
        found = self._loss_of(batch)
        if torch.is_grad_enabled():
            self._seen.append(found)
        return found.loss

    def _loss_of(self, batch: Batch) -> HeadLoss:
        rows = rows_of(batch, self._settings.steps)  # first: the device has nothing to do yet that it would wait for
        targets = targets_of(self._model, self._head, batch)
        return head_loss(self._head, targets, batch, rows, self._settings.decay)

    def metrics(self) -> Sums:
        return _agreement(self._seen)

    @torch.no_grad()
    def evaluate(self, share: RolloutShare = WHOLE) -> Evaluation | None:
        """Compute the training loss on the validation data, and the agreement with the model at each step."""
        if self.validation is None:
            return None
        total, labels, seen = 0.0, 0, []
        for batch, counts in share.of(batch for batch in self.validation.one_epoch() if batch.num_labels):
            found = self._loss_of(batch.to(self._trainable.device))
            if counts:
                seen.append(found)
                total += float(found.loss) * batch.num_labels
                labels += batch.num_labels
        means = share.means({"loss": (total, labels), **_agreement(seen)})
        loss, labels = means.pop("loss")
        return Evaluation(loss, labels, extra={name: mean for name, (mean, _) in means.items()})


def _agreement(seen: Sequence[HeadLoss]) -> Sums:
    """Return the share of drafts that are the model's likeliest token, by their place from 1 on, as sums and counts."""
    places = max((len(found.rows) for found in seen), default=0)
    return {
        f"agree_{place + 1}": (
            math.fsum(float(found.right[place]) for found in seen if place < len(found.rows)),
            sum(found.rows[place] for found in seen if place < len(found.rows)),
        )
        for place in range(places)
    }


def _count_tokens(loader: Loader, vocab_size: int) -> np.ndarray:
    """Count the labels of an epoch, int64 ``[V]``."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for batch in loader.one_epoch():
        labels = batch.labels_T.numpy()
        counts += np.bincount(labels[labels != IGNORE], minlength=vocab_size)
    return counts


def _most_frequent(counts: np.ndarray, most: int) -> Tensor:
    """Return the most frequent tokens, ascending, int64; of equals the lower ids."""
    return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:most]).astype(np.int64))


OBJECTIVE = ObjectiveKind(make=Eagle3, settings=Eagle3Config, rates=(5e-4, 5e-4), part=head_of)
