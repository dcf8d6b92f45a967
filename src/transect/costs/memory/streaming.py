"""Layers that stream from the host or a disk: their choice, and the bytes moved and resident.

Layers are moved whole. Streamed layers are spread evenly among resident ones, so that the host link works while the
others compute. Each has one of two slots on the device, in turn: one is computed with while the
other is filled. Embedding, head and norms always stay.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...spec.model import ModelConfig
from ...spec.weights import linear_shapes, weight_shapes
from ..storage import Storage
from ..units import GIB

SLOTS = 2


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """Layers that stream.

    Attributes:
        layers: their numbers, in order.
        each: bytes of the matrices of each of them.
        total: number of layers of the model.
        folder: of the file that holds them; None if they are in host memory.
    """

    layers: tuple[int, ...]
    each: tuple[int, ...]
    total: int
    folder: str | None = None

    @property
    def bytes(self) -> int:
        """Bytes that a step copies over the host link, equal to the bytes that the layers take outside the device."""
        return sum(self.each)

    @property
    def slots(self) -> int:
        """Bytes of the slots on the device."""
        return SLOTS * max(self.each)

    @property
    def saved(self) -> int:
        """Bytes that streaming frees on the device."""
        return self.bytes - self.slots

    def seconds(self, bytes_per_second: float) -> float:
        """Return the least time of a step over a link, or from a disk, of this speed."""
        return self.bytes / bytes_per_second

    def __str__(self) -> str:
        place = "host memory" if self.folder is None else f"a file in {self.folder}"
        return f"{len(self.layers)} of {self.total} layers stream from {place}, {self.bytes / GIB:.1f} GiB a step"


def plan_stream(sizes: Sequence[float], gib: float, folder: str | None = None) -> StreamPlan:
    """Return the fewest layers that must stream so that the device has ``gib`` GiB more room; all if that is not
    enough.

    Args:
        sizes: bytes of the matrices of each layer (``layer_bytes``).

    Raises:
        ValueError: the model has no more layers than are on the device at any time.
    """
    total = len(sizes)
    if total <= SLOTS:
        raise ValueError(
            f"cpu_offload_gb streams layers through {SLOTS} slots on the device, and this model (or this rank's part "
            f"of it) has {total}: leave it out"
        )
    for count in range(SLOTS + 1, total + 1):
        plan = _spread(sizes, count, folder)
        if plan.saved >= gib * GIB:
            break
    # The last and the first layer then have different slots, and the link need not wait between two steps.
    more = -count % SLOTS
    return _spread(sizes, count + more, folder) if more and count + more <= total else plan


def _spread(sizes: Sequence[float], count: int, folder: str | None) -> StreamPlan:
    layers = tuple(place * len(sizes) // count for place in range(count))
    return StreamPlan(layers, tuple(math.ceil(sizes[layer]) for layer in layers), len(sizes), folder)


def layer_bytes(
    config: ModelConfig, storage: Storage, shapes: Mapping[str, tuple[int, ...]] | None = None
) -> list[float]:
    """Return the bytes of the matrices of each layer and their biases, of those parts that ``shapes`` names
    (``parallel.shards.Shard.shapes``)."""
    found: dict[str, float] = {}
    matrices = {name for layer in range(config.n_layers) for name in linear_shapes(config, layer)}
    for name, shape in (weight_shapes(config) if shapes is None else shapes).items():
        if not name.startswith("layers."):
            continue
        _, layer, inner = name.split(".", 2)
        matrix = inner.rpartition(".")[0]
        found.setdefault(layer, 0.0)
        if matrix in matrices:
            bits = storage.of(matrix) if len(shape) == 2 else storage.norm
            found[layer] += math.prod(shape) * bits / 8
    return list(found.values())
