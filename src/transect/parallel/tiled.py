"""Memory-centric tiling: the matrices of a sharded layer come to the device in parts, and are never whole there.

Where weights are sharded or elsewhere (``sharded.py``) a device still has two whole layers while they run, and the
gradients of one. With t tiles each matrix is cut by its outputs, which are contiguous rows:

    forward    y_i = x W_i^T             for one tile after the other, the next one on its way
    backward   dx += g_i W_i             dW_i = g_i^T x leaves as soon as it is made

So a device holds two tiles and the gradient of one, whatever the size of a layer. Pieces, states and checkpoints are
those of a model that is not tiled. What is not a matrix is whole while the layer runs. Several ranks send a tile by a
broadcast from each that has some of it, and sum its gradient there: this is for memory, and slower than whole layers.

Rajbhandari et al. 2021, arXiv:2104.07857, section 5.1.3.

Shapes: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..models.decoder import Decoder
from ..models.weights.dense import Dense
from ..models.weights.weight import Weight
from ..spec.numbers.number_format import WeightFormat
from .sharded_unit import Unit


class TiledUnit(Unit):
    """A layer whose matrices are never whole. ``tiles``: number of tiles of each matrix; set before the layer runs."""

    tiles = 1

    def __init__(self, *args: Any, **how: Any) -> None:
        self._vectors: Tensor | None = None
        self._away: dict[str, Tensor] = {}
        """Data of vector parameters while the unit is released."""
        super().__init__(*args, **how)

    @property
    def _first_vector(self) -> int:
        """Offset in the whole unit of the parameters that are not matrices, which come last."""
        return min((self.starts[n] for n, p in self.parameters.items() if p.ndim < 2), default=self._end)

    @property
    def _end(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters.values())

    # Weights

    def prefetch(self) -> None:
        """Do nothing: tiles are fetched when they are needed."""

    def gather(self) -> None:
        """Gather the vector parameters."""
        if self.whole:
            return
        first, self.whole = self._first_vector, True
        self._vectors, arrived = self._begin(first, self._end)
        arrived()
        for name, parameter in self.parameters.items():
            if parameter.ndim < 2:
                at = self.starts[name] - first
                parameter.data = self._vectors[at : at + parameter.numel()].view_as(parameter)

    def release(self) -> None:
        """Release the vector parameters."""
        if not self._away:
            self._away = {name: p.data for name, p in self.parameters.items() if p.ndim < 2}
            self._whole.untyped_storage().resize_(0)
        for name, away in self._away.items():
            self.parameters[name].data = away
        self._vectors, self.whole = None, False

    def values(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every parameter, see ``Unit``."""
        for name, parameter in self.parameters.items():
            found, arrived = self._begin(self.starts[name], self.starts[name] + parameter.numel())
            arrived()
            yield name, found.view(parameter.shape)

    def rows(self, name: str) -> list[slice]:
        """Return the tiles of a matrix."""
        height = self.parameters[name].shape[0]
        each = -(-height // self.tiles)
        return [slice(at, min(at + each, height)) for at in range(0, height, each)]

    def walk(self, name: str) -> Iterator[tuple[slice, Tensor]]:
        """Yield each tile of a matrix, its rows and ``[rows, I]``; the next one is fetched meanwhile."""
        width, start, rows = self.parameters[name].shape[1], self.starts[name], self.rows(name)

        def begin(each: slice) -> tuple[Tensor, Callable[[], None]]:
            return self._begin(start + each.start * width, start + each.stop * width)

        coming = begin(rows[0])
        for number, each in enumerate(rows):
            (tile, arrived), coming = coming, begin(rows[number + 1]) if number + 1 < len(rows) else coming
            arrived()
            yield each, tile.view(-1, width)
            del tile

    def _overlaps(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yield the ranks that have some of a range of the whole, with their parts of it."""
        for rank in range(self.group.size):
            low, high = max(begin, rank * self.each), min(end, (rank + 1) * self.each)
            if low < high:
                yield rank, low, high

    @torch.no_grad()
    def _begin(self, begin: int, end: int) -> tuple[Tensor, Callable[[], None]]:
        """Start fetching a range of the whole to the device; returns it with a function that waits for it."""
        found = torch.empty(end - begin, dtype=self.dtype, device=self._whole.device)
        own = self.group.rank * self.each
        link = self._link
        if link is not None:  # until the current stream has given the memory
            link.wait_stream(torch.cuda.current_stream(link.device))
        works = []
        with torch.cuda.stream(link):  # None: on the host, at once, or on the current stream
            for rank, low, high in self._overlaps(begin, end):
                part = found[low - begin : high - begin]
                if rank == self.group.rank:
                    if self._home is None:
                        part.copy_(self.piece[low - own : high - own])
                    else:
                        self._home.send_part(self.number, low - own, high - own, part)
                if self.group.size > 1:
                    source = self.group.ranks[rank]
                    works.append(dist.broadcast(part, source, group=self.group.group, async_op=True))

        def arrived() -> None:
            for work in works:
                work.wait()
            if link is not None:
                torch.cuda.current_stream(link.device).wait_stream(link)

        return found, arrived

    # Gradients

    @torch.no_grad()
    def give(self, name: str, first: int, gradient: Tensor) -> None:
        """Sum the gradient of some numbers of a parameter, from ``first`` on, over the ranks, each rank's part of it to
        that rank."""
        begin, flat = self.starts[name] + first, gradient.reshape(-1)
        for rank, low, high in self._overlaps(begin, begin + flat.numel()):
            part = flat[low - begin : high - begin]
            if self.group.size > 1:
                part = part.to(self.reduce_dtype, copy=True)
                dist.reduce(part, self.group.ranks[rank], group=self.group.group)
            if rank != self.group.rank:
                continue
            own = rank * self.each
            if self.sink is not None:
                self.sink(name, part, low - self.starts[name] - self.bounds[name][0])
                continue
            if self.gradient is None:
                self.gradient = torch.zeros(self.each, dtype=torch.float32, device=flat.device)
            self.gradient[low - own : high - own] += part

    @torch.no_grad()
    def reduce(self, given: Mapping[nn.Parameter, Tensor | None] | None = None) -> None:
        """Sum the gradients of vector parameters; those of tiles are summed already."""
        vectors = {name: parameter for name, parameter in self.parameters.items() if parameter.ndim < 2}
        gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in vectors.items()}
        if self.complete is not None:
            self.complete(gradients)
        for name, gradient in gradients.items():
            vectors[name].grad = None
            self.give(name, 0, gradient)


class Tiled(Weight):
    """A matrix that is fetched in tiles: ``name`` of a unit, whose parameter ``inner`` has."""

    def __init__(self, inner: Dense, unit: TiledUnit, name: str) -> None:
        super().__init__(inner.out_features, inner.in_features)
        self.inner, self.unit, self.name = inner, unit, name

    def forward(self, x_TI: Tensor) -> Tensor:
        out: Tensor = _Product.apply(x_TI, self.unit, self.name)  # type: ignore[no-untyped-call]
        return out if self.inner.bias is None else out + self.inner.bias

    def dense(self) -> Tensor:
        return torch.cat([tile for _, tile in self.unit.walk(self.name)])

    def refuses_merging(self) -> str | None:
        return "its matrices come in tiles"

    @property
    def nbytes(self) -> int:
        return self.inner.nbytes

    @property
    def format(self) -> WeightFormat:
        return self.inner.format


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, unit: TiledUnit, name: str) -> Tensor:
        ctx.unit, ctx.name = unit, name
        ctx.save_for_backward(x)
        out = x.new_empty(x.shape[0], unit.parameters[name].shape[0])
        for rows, tile in unit.walk(name):
            out[:, rows] = x @ tile.T
            del tile  # or it would stay while the one after the next comes
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (x,), (g,) = ctx.saved_tensors, gradients
        unit, name = ctx.unit, ctx.name
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        dx = torch.zeros_like(x, dtype=wide)
        for rows, tile in unit.walk(name):
            dx += g[:, rows] @ tile
            unit.give(name, rows.start * tile.shape[1], g[:, rows].T @ x)
            del tile
        return dx.to(x.dtype), None, None


def tile(model: Decoder, units: list[TiledUnit], tiles: int) -> None:
    """Divide the matrices of a model's layers, whose parameters the units hold, into ``tiles`` tiles each."""
    for layer, unit in zip(model.layers, units, strict=True):
        unit.tiles = tiles
        names = {id(parameter): name for name, parameter in unit.parameters.items()}
        for module in list(layer.modules()):
            for child, weight in list(module.named_children()):
                if isinstance(weight, Dense):
                    setattr(module, child, Tiled(weight, unit, names[id(weight.weight)]))
