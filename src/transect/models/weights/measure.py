"""The ``Storage`` of an existing model, measured on its weights; ``storage.py`` predicts it for other models."""

from __future__ import annotations

from collections import defaultdict

from ...costs.storage import Storage
from ..decoder import Decoder


def storage_of_model(model: Decoder, *, activation: float = 16, kv: float = 16) -> Storage:
    """Measure the bits of a number, matrix by matrix over all layers. ``activation``, ``kv``: bits of other numbers."""
    sizes: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for name, weight in model.weights():
        if name != "head":
            count = sizes[name.split(".", 2)[2]]
            count[0] += weight.nbytes
            count[1] += weight.out_features * weight.in_features
    bits = {name: 8 * size / numbers for name, (size, numbers) in sizes.items()}
    whole = [sum(column) for column in zip(*sizes.values(), strict=True)]
    linear = 8 * whole[0] / whole[1]
    return Storage(
        linear=linear,
        embed=model.embed.bits,
        head=model.head.format.bits,
        norm=8 * model.norm.weight.element_size(),
        activation=activation,
        kv=kv,
        head_copied=model.config.tied_embeddings and not model.head_tied,
        matrices=tuple((name, each) for name, each in bits.items() if each != linear),
    )
