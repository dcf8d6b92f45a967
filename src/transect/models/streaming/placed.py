"""The matrices of a layer in one piece of memory, whatever kinds of ``Weight`` they are.

A weight's tensors, and those of weights that are joined, become views of that piece; where in it each lies is the same
for every copy of the piece. So a layer moves as one run of bytes, and the products that a stack has resolved, over the
addresses of a slot, compute with whatever layer lies in the slot.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..weights.projection import Projection
from ..weights.weight import Weight

ALIGNMENT = 256
"""Alignment of a tensor's storage in the piece, in bytes, equal to that of a GPU's allocator."""
PAGE = 4096
"""Unit of the piece's size in bytes, as required by reads past the page cache."""


class _Place(NamedTuple):
    """A tensor in the piece: its storage begins at ``start``, ``nbytes`` long."""

    start: int
    nbytes: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """Offset from the beginning of its storage, in numbers."""

    def of(self, memory: Tensor) -> Tensor:
        """Return the tensor, as a view of a piece of memory."""
        storage = memory[self.start : self.start + self.nbytes].view(self.dtype)
        return storage.as_strided(self.size, self.stride, storage.storage_offset() + self.offset)


class PlacedLayer:
    """Locations of all weight tensors of ``layer`` in one piece of memory of ``nbytes`` bytes."""

    def __init__(self, layer: nn.Module) -> None:
        self._places: dict[int, tuple[Tensor, _Place]] = {}
        starts: dict[int, int] = {}
        end = 0
        for tensor in _tensors(layer):
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key not in starts:
                starts[key] = end
                end += -(-size // ALIGNMENT) * ALIGNMENT
            place = _Place(
                starts[key], size, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
            )
            self._places[id(tensor)] = tensor, place
        self.nbytes = -(-end // PAGE) * PAGE

    def __contains__(self, tensor: Tensor) -> bool:
        return id(tensor) in self._places

    def move(self, memory: Tensor) -> None:
        """Make every tensor a view of ``memory`` (uint8), with the values found there."""
        for tensor, place in self._places.values():
            tensor.data = place.of(memory)

    def copy(self, tensor: Tensor, memory: Tensor) -> None:
        """Copy one tensor's values to its location in another piece of memory."""
        place = self._places[id(tensor)][1]
        place.of(memory).copy_(tensor.detach(), non_blocking=True)


def _tensors(layer: nn.Module) -> list[Tensor]:
    """Return the tensors of all weights, and of their joined storages, each once. Norms and routers are not
    included."""
    found: dict[int, Tensor] = {}
    for module in layer.modules():
        weights = module.joined if isinstance(module, Projection) else (module,)
        for weight in weights:
            if isinstance(weight, Weight):
                found |= {id(tensor): tensor for tensor in (*weight.parameters(), *weight.buffers())}
    return list(found.values())
