"""A frozen base in 4 bits under adapters (Dettmers et al. 2023, arXiv:2305.14314), in groups or as NF4.

``models/weights/int4.py`` and ``models/weights/nf4.py`` have the formats, and the weights with the gradient of their
input. Norms, embeddings and the head are not quantized.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ...models.decoder import Decoder
from ...models.weights.dense import Dense
from ...models.weights.int4 import Int4
from ...models.weights.nf4 import NF4
from ...models.weights.weight import Weight
from ...ops.opset import resolve_ops
from ...spec.numbers.int4 import INT4
from ...spec.numbers.nf4 import NF4 as NF4_FORMAT
from ..config.adapters import LoRAConfig

BASES: Mapping[str, Callable[[Weight, int], Weight]] = {
    INT4.name: Int4.of,
    NF4_FORMAT.name: lambda weight, group: NF4.of(weight),
}
"""Functions that quantize a weight to a base format, in groups of this size."""


def quantize_layers(model: Decoder, config: LoRAConfig) -> None:
    """Replace every matrix of the layers by its 4-bit form, one at a time.

    Raises:
        ValueError: a matrix has no whole groups; a run asks ``costs.memory`` before, which says what fits.
    """
    for name, weight in list(model.weights()):
        if name != "head":
            model.replace(name, quantized(weight, config))


def quantized(weight: Weight, config: LoRAConfig) -> Weight:
    """Quantize a weight to the 4 bits of ``config.base_format``.

    Raises:
        ValueError: it has no whole groups.
    """
    return BASES[config.base_format](weight, config.group)


def rounded(weight: Tensor, config: LoRAConfig, dtype: torch.dtype) -> Tensor:
    """Return the values of a matrix ``[O, I]`` after rounding to the base of a run in ``dtype``."""
    return quantized(Dense.over(weight.to(dtype), None, resolve_ops()), config).dense()
