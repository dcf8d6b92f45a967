"""A frozen base in 4 bits under adapters (Dettmers et al. 2023, arXiv:2305.14314, here with affine groups).

``models/weights/int4.py`` has the format, and the weight with the gradient of its input. Norms, embeddings and the head
are not quantized.
"""

from __future__ import annotations

from ..models.decoder import Decoder
from ..models.weights.int4 import Int4


def quantize_layers(model: Decoder, group: int) -> None:
    """Replace every matrix of the layers by its 4-bit form, one at a time.

    Raises:
        ValueError: a matrix has no whole groups.
    """
    for name, weight in list(model.weights()):
        if name != "head":
            try:
                model.replace(name, Int4.of(weight, group))
            except ValueError as error:
                raise ValueError(f"{name}: {error}: set lora.group to 32, 64 or 128") from None
