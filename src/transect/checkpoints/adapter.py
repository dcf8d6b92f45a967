"""Read adapters from files and apply them to a model's weights.

If a model holds its matrices as plain numbers, ``merged_weights`` adds adapters while the files are read, so a token
costs as much as without an adapter. A packed matrix would have to be rounded again after an addition, so
``put_beside`` leaves it unchanged and makes it an ``Adapted`` weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from ..models.decoder import Decoder
from ..models.staging import dense_values
from ..models.stored import Stored, StoredWeights, Values
from ..models.weights.adapted import Adapted
from ..models.weights.low_rank import LowRank
from ..spec.model import ModelConfig
from .peft_config import PeftSettings


@dataclass(frozen=True)
class StoredAdapter:
    """An adapter of a model.

    Attributes:
        settings: of PEFT.
        factors: by canonical name of a matrix, without ``.weight``. Those of ``embed`` are of its table ``[V, D]``.
        replaced: weights that take the place of the base's, by canonical name.
    """

    settings: PeftSettings
    factors: Mapping[str, LowRank]
    replaced: Mapping[str, Tensor]


def merged_weights(
    weights: StoredWeights, base: ModelConfig, adapter: StoredAdapter, config: ModelConfig, *, beside: bool = False
) -> StoredWeights:
    """Yield the weights of a base with an adapter in them.

    Args:
        weights: of the base, whose configuration is ``base``.
        config: of the model with the adapter, see ``adapted_config``.
        beside: leave the matrices of the layers as they are, for ``put_beside``.
    """
    for name, stored in weights:
        yield name, _adapted(name, stored, adapter, beside)
        if name == "embed.weight" and base.tied_embeddings and not config.tied_embeddings:
            yield "head.weight", _adapted("head.weight", stored, adapter, beside)  # while the base's files are open


def _adapted(name: str, stored: Stored, adapter: StoredAdapter, beside: bool) -> Stored:
    given = adapter.replaced.get(name)
    if given is not None:
        new: Tensor = given
        stored = Stored(tuple(new.shape), lambda rows, columns: new[rows, columns] if new.ndim == 2 else new[rows])
    low = adapter.factors.get(name.removesuffix(".weight")) if name.endswith(".weight") else None
    if low is None or (beside and name.startswith("layers.")):
        return stored
    factors, base = low, stored

    def read(rows: slice, columns: slice) -> Values:
        if factors.magnitude is not None:  # the norm of a row needs all of it
            return factors.applied(dense_values(base.read()))[rows, columns]
        part = LowRank(factors.a[:, columns], factors.b[rows], factors.scale)
        return part.applied(dense_values(base.read(rows, columns)))

    return Stored(stored.shape, read)


def put_beside(model: Decoder, adapter: StoredAdapter) -> None:
    """Put the adapter's factors beside the matrices of a model's layers, for inference."""
    for name, weight in list(model.weights()):
        low = adapter.factors.get(name)
        if low is not None and name != "head":
            model.replace(name, Adapted.over(weight, low).fix())


def is_beside(model: Decoder) -> bool:
    """Return True if a model has an adapter beside some weight."""
    return any(isinstance(weight, Adapted) for _, weight in model.weights())
