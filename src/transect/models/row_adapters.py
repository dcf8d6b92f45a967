"""Adapters of a model that serves rows of different adapters: where their factors lie, and which rows use them.

``TensorAdapters``: slots in tensors beside the matrices (``weights/row_adapted.py``), for stacks of operators and for a
GPU. ``NativeAdapters``: packed factors for the C++ stack (``ops/cpu/low_rank.h``). An executor makes one with
``add_row_adapters``, fills slots with ``put``, and says with ``use`` before each step which slot each row has.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops.cpu.stack import StackAdapter
from .decoder import Decoder
from .native import NativeStack
from .weights.low_rank import Factors, packed_adapter
from .weights.row_adapted import RowAdapted, RowAdapters, StepRows
from .weights.weight import Weight


class AdapterRoom(NamedTuple):
    """Room for adapters: ``slots``, each of a rank up to ``rank``, beside the matrices whose names end in one of
    ``targets``."""

    slots: int
    rank: int
    targets: Collection[str]


class TensorAdapters:
    """Slots beside the matrices of a model, which become ``RowAdapted``.

    Args:
        model: filled; stacks that resolve products once must be made afterwards.
        slots: adapters at the same time.
        rank: largest rank of one.
        targets: last parts of the names of matrices that may have factors.
    """

    def __init__(self, model: Decoder, slots: int, rank: int, targets: Collection[str]) -> None:
        self.slots, self.rows = slots, StepRows()
        room = max(16, 1 << (rank - 1).bit_length())
        like = model.norm.weight
        self._device, self._dtype = like.device, like.dtype
        self._places: dict[str, RowAdapted] = {}
        for name, weight in list(model.weights()):
            if name.startswith("layers.") and name.rpartition(".")[2] in targets:
                options: dict[str, Any] = {"slots": slots, "rank": room, "device": like.device, "dtype": like.dtype}
                # A product that is summed over ranks sums the adapters' with it: they stand inside.
                inner: Weight | None = getattr(weight, "inner", None)
                made = RowAdapted.over(weight if inner is None else inner, self.rows, model.ops, **options)
                if inner is None:
                    model.replace(name, made)
                else:
                    weight.inner = made
                self._places[name] = made
        model.adapters = self

    def prepare(self, factors: Factors) -> Factors:
        """Return the same factors in the model's dtype, pinned if they are copied to a GPU."""

        count = sum(low.a.numel() + low.b.numel() for low in factors.values())
        memory = torch.empty(count, dtype=self._dtype, pin_memory=self._device.type == "cuda")
        at = 0

        def held(tensor: Tensor) -> Tensor:
            nonlocal at
            part = memory[at : at + tensor.numel()].view(tensor.shape)
            at += tensor.numel()
            return part.copy_(tensor)

        return {name: replace(low, a=held(low.a), b=held(low.b.T).T) for name, low in factors.items()}

    @torch.inference_mode()
    def put(self, slot: int, prepared: Factors) -> None:
        """Fill a slot, on the present stream."""
        for name, place in self._places.items():
            place.put(slot, prepared.get(name))


class NativeAdapters:
    """Slots of a model whose layers run as one C++ call.

    Args:
        model: with a ``NativeStack``.
        slots: adapters at the same time.
        half: factors are kept in bfloat16, as dense matrices are.
    """

    def __init__(self, model: Decoder, slots: int, *, half: bool) -> None:
        assert isinstance(model.stack, NativeStack)
        self.slots, self.rows = slots, StepRows()
        self._stack, self._half = model.stack, half
        self._layers = model.config.n_layers
        model.stack.rows = self.rows
        model.stack.adapters = [None] * slots
        model.adapters = self

    def prepare(self, factors: Factors) -> StackAdapter:
        """Pack the factors for the kernels."""
        return packed_adapter(self._stack.library, factors, self._layers, half=self._half)

    def put(self, slot: int, prepared: StackAdapter) -> None:
        """Fill a slot."""
        self._stack.adapters[slot] = prepared


def add_row_adapters(model: Decoder, room: AdapterRoom, *, half: bool = False) -> RowAdapters:
    """Give a filled model on a CPU slots for adapters; ``half`` as of ``NativeAdapters``."""
    return (
        NativeAdapters(model, room.slots, half=half)
        if isinstance(model.stack, NativeStack)
        else TensorAdapters(model, *room)
    )
