"""``LayerStream``: brings each streamed layer to its slot on the device in time for its computation.

Layers come in the order in which a step computes them, and after the last the first again. As soon as a slot is free,
the next layer is on its way to it, also from one step to the next; on a GPU by a stream of its own, which waits for the
layer before in that slot to be computed, as the computing waits for the copy. The host waits for neither.

    copies      | layer 2 > slot 0 | layer 3 > slot 1 | layer 4 > slot 0 | ...
    computes      layer 1 (slot 1) | layer 2 (slot 0) | layer 3 (slot 1) | ...

A slot keeps its address, so the products that a stack has resolved stay what they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from ...costs.memory.streaming import SLOTS, StreamPlan
from ..weights.weight import Weight
from .homes import FileHomes, Homes, HostHomes
from .placed import PlacedLayer

Part = TypeVar("Part")


class LayerStream:
    """The streamed layers of ``plan``, of a model on ``meta`` that is about to get memory on ``device``.

    Args:
        layers: all layers of the model; the matrices of those that stay are left alone.

    Raises:
        ValueError: see ``FileHomes``.
    """

    def __init__(self, layers: Sequence[nn.Module], plan: StreamPlan, device: torch.device) -> None:
        self.plan = plan
        self._places = {layer: place for place, layer in enumerate(plan.layers)}
        sizes = [PlacedLayer(layers[layer]).nbytes for layer in plan.layers]
        self._placed: dict[int, PlacedLayer] = {}
        self._awaited: dict[int, set[int]] = {}
        """Ids of tensors of each layer that have not been loaded yet."""
        self._slots = [torch.empty(max(sizes), dtype=torch.uint8, device=device) for _ in range(SLOTS)]
        self._homes: Homes = HostHomes(sizes, device) if plan.folder is None else FileHomes(sizes, plan.folder, device)
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._ready = [torch.cuda.Event() if self._copies else None for _ in range(SLOTS)]
        self._free = [torch.cuda.Event() if self._copies else None for _ in range(SLOTS)]
        self._settled = False
        # Layers are counted on from step to step: number n is the layer at place n modulo their count.
        self._done = 0
        """Number of layers computed so far."""
        self._sent = 0
        """Number of layers sent to their slots so far."""
        self._last = [-1] * SLOTS
        """Number of the layer that each slot holds, or is about to hold."""

    @property
    def slot_bytes(self) -> int:
        """Bytes of the slots on the device."""
        return sum(slot.nbytes for slot in self._slots)

    def __contains__(self, tensor: Tensor) -> bool:
        return any(tensor in placed for placed in self._placed.values())

    # ---- while the model is loaded

    def place(self, layer: int, module: nn.Module) -> None:
        """Move the matrices of a streamed layer, which have memory on the device, into its slot."""
        place = self._places.get(layer)
        if place is not None:
            self._placed[place] = placed = PlacedLayer(module)
            assert placed.nbytes <= self._slots[0].nbytes
            placed.move(self._slots[place % SLOTS])
            self._awaited[place] = {
                id(tensor) for tensor in (*module.parameters(), *module.buffers()) if tensor in placed
            }

    def keep(self, name: str, model: nn.Module) -> None:
        """Store a weight of this canonical name, just loaded into a slot, if its layer streams."""
        if not name.startswith("layers."):
            return
        place = self._places.get(int(name.split(".", 2)[1]))
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        if place is None or not isinstance(module, Weight):
            return
        placed, bias = self._placed[place], module.bias
        for tensor in (*module.parameters(), *module.buffers()):
            # Only what was read just now: another layer may have been in the slot since the rest was.
            if tensor in placed and (tensor is bias) == (leaf == "bias"):
                placed.copy(tensor, self._homes.memory(place))
                self._awaited[place].discard(id(tensor))
        if place in self._awaited and not self._awaited[place]:
            del self._awaited[place]
            self._homes.written(place)

    # ---- while it runs

    def turns(self, layers: Sequence[Part]) -> Iterator[Part]:
        """Yield a stack's part for each layer in order.

        Each is yielded when its matrices are in their slot, or will be when work launched now runs.
        """
        for layer, part in enumerate(layers):
            place = self._places.get(layer)
            if place is None:
                yield part
                continue
            self._arrive(place)
            try:
                yield part
            finally:
                self._leave(place)

    def _arrive(self, place: int) -> None:
        if self._done % len(self._places) != place or not self._settled:
            self._begin(place)
        self._send_ahead()
        if self._sent == self._done:
            self._send()
        ready = self._ready[place % SLOTS]
        if ready is not None and self._copies is not None:
            torch.cuda.current_stream(self._copies.device).wait_event(ready)

    def _leave(self, place: int) -> None:
        free = self._free[place % SLOTS]
        if free is not None:
            free.record()
        self._done += 1
        self._send_ahead()

    def _begin(self, place: int) -> None:
        """Restart the stream at the first step, and after a failed one: the slots hold other layers than the next
        ones."""
        if not self._settled:
            if self._copies is not None:
                torch.cuda.synchronize(self._copies.device)  # what was loaded is on its way home
            self._homes.settle()
            self._settled = True
        if self._copies is not None:
            torch.cuda.current_stream(self._copies.device).wait_stream(self._copies)
            for free in self._free:
                assert free is not None
                free.record()
        self._done = self._sent = place
        self._last = [-1] * SLOTS

    def _send_ahead(self) -> None:
        """Copy the next layers to free slots, as long as the layers are ready."""
        while self._sent < self._done + SLOTS:
            place = self._sent % len(self._places)
            if self._last[place % SLOTS] >= self._done or not self._homes.ready(place):
                return
            self._send()

    def _send(self) -> None:
        place = self._sent % len(self._places)
        slot = place % SLOTS
        ready, free = self._ready[slot], self._free[slot]
        if self._copies is None or ready is None or free is None:
            self._homes.send(place, self._slots[slot])
        else:
            with torch.cuda.stream(self._copies):
                self._copies.wait_event(free)
                self._homes.send(place, self._slots[slot])
                ready.record()
        self._last[slot] = self._sent
        self._sent += 1


def offload(model: nn.Module, layers: Sequence[nn.Module], plan: StreamPlan, device: torch.device) -> LayerStream:
    """Allocate memory for a model that was built on ``meta``: on ``device`` for the resident weights, one layer after
    the other, so that at most a slot's worth is held beyond that."""
    stream = LayerStream(layers, plan, device)
    for child in model.children():
        if child is not getattr(model, "layers", None):
            child.to_empty(device=device)
    for number, layer in enumerate(layers):
        layer.to_empty(device=device)
        stream.place(number, layer)
    return stream
