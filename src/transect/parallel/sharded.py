"""Sharded data parallelism (ZeRO 3, FSDP): no rank holds the whole model, its gradients or the optimizer's state.

The parameters of a layer are concatenated in one flat tensor, and each rank keeps one piece of it
(Rajbhandari et al. 2020, arXiv:1910.02054; Zhao et al. 2023, arXiv:2304.11277)::

    layer k    [ attention.q.weight | attention.k.weight | ... | mlp.down.weight | pad ]
    rank 0     [ piece ................ ]
    rank 1                               [ piece .................................... ]

Before a layer runs its pieces are gathered, and those of the next layer are on their way meanwhile; after it the whole
is given back. The backward pass does the same from the last layer on, and sums the gradients of a layer, each rank's
piece to that rank, while the layer before it runs. What is outside the layers (embedding, last norm, head) is one more
unit, which stays whole from the forward pass to the end of the backward pass.

The optimizer sees pieces: for each parameter that a rank has a part of, that part as a vector.

Pieces may be in host memory or on a disk (``offload/pieces.py``), and come from there before they are gathered. That is
of use on one rank too: its piece is the whole layer, and the device holds two of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..checkpoints.load import fill
from ..models.context import AttentionContext
from ..models.decoder import Decoder
from ..models.stored import StoredWeights
from ..models.weights.weight import Weight
from .group import Group
from .offload.pieces import FilePieces, FileUpload, HostPieces, Pieces
from .part_names import part_name
from .replicas import gather_tensors
from .sharded_unit import Sink, Unit, piece_size
from .tiled import TiledUnit, tile

if TYPE_CHECKING:
    from .peer_copies import PeerCopies
    from .peer_pieces import PeerPieces


class Sharded:
    """Model with sharded parameters; it replaces the model's ``stack``.

    Args:
        group: the ranks. Each has the same model, whole; afterwards it has its pieces.
        model: a decoder; every parameter is trained.
        recompute: compute each layer a second time in the backward pass, so that only its input is kept.
        reduce_dtype: data type in which gradients are summed.
        device: that computes; the model may be in host memory until then.
        host: the pieces are in host memory. Each rank reads its own over its own link before all are gathered.
        folder: folder of a file that holds them, in place of host memory.
        copies: sums gradients by copy engines; None for torch's collectives.
        shared: makes memory of a given size from which other ranks read pieces; None if pieces are sent.
        parameters: all of the model's, by their names in the whole model, if that is not this one; None for this
            model's names.
        complete: adds up, in place, what ranks along other axes have of gradients in parts; before they are summed
            here. All of them have the same units.
        weights: weights to read, if the model has only unwritten host memory: they are read in order, and each complete
            unit is cut; None if the model has its weights.
        tiles: number of parts in which each matrix of a layer comes to the device (``tiled.py``).

    Raises:
        ValueError: a parameter is frozen, or there is not enough host memory.
    """

    zero = 3

    def __init__(
        self,
        group: Group,
        model: Decoder,
        *,
        recompute: bool = False,
        reduce_dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        host: bool = False,
        folder: str = "",
        copies: PeerCopies | None = None,
        shared: Callable[[list[int]], PeerPieces | None] | None = None,
        parameters: Mapping[str, nn.Parameter] | None = None,
        complete: Callable[[Mapping[str, Tensor]], None] | None = None,
        tiles: int = 1,
        weights: StoredWeights | None = None,
    ) -> None:
        self.parameters = dict(model.named_parameters() if parameters is None else parameters)
        frozen = [name for name, parameter in self.parameters.items() if not parameter.requires_grad]
        if frozen:
            raise ValueError(f"{frozen[0]} is frozen, and sharding is for models that are trained whole: set zero to 2")
        self.group, self.model, self.recompute = group, model, recompute
        layers = [f"layers.{number}." for number in range(len(model.layers))]
        # Matrices first, so that those that share an input are contiguous, and can be one product.
        order = sorted(self.parameters.items(), key=lambda item: item[1].ndim < 2)
        inside = [{n: p for n, p in order if n.startswith(layer)} for layer in layers]
        outside = {n: p for n, p in self.parameters.items() if not n.startswith("layers.")}
        device = model.device if device is None else device
        self.pieces: Pieces | None = None
        """Storage of the pieces if they are not on the device."""
        if host and folder:
            sizes = [piece_size(each, group) * model.norm.weight.element_size() for each in (*inside, outside)]
            self.pieces = FilePieces(folder, sizes, device)
        elif host:
            self.pieces = HostPieces(device)
        element = model.norm.weight.element_size()
        self.peers: PeerPieces | None = None
        if shared is not None and not host and tiles == 1:
            self.peers = shared([piece_size(each, group) * element for each in (*inside, outside)])
        kinds = [TiledUnit if tiles > 1 else Unit] * len(inside) + [Unit]
        todo = [*inside, outside]

        def cut(number: int) -> Unit:
            return kinds[number](group, todo[number], reduce_dtype, device, self.pieces, number, self.peers)

        made: dict[int, Unit] = {}
        if weights is not None:
            fill(model, _cutting(weights, self._places(todo), lambda number: made.__setitem__(number, cut(number))))
        units = [made[number] if number in made else cut(number) for number in range(len(todo))]
        self.layers, self.root = units[:-1], units[-1]
        if tiles > 1:
            tile(model, [unit for unit in self.layers if isinstance(unit, TiledUnit)], tiles)
        for unit in units:
            unit.copies, unit.complete = copies, complete
        if self.peers is not None:
            self.peers.stepped()  # when all pieces are there, others may read them
        model.to(device)  # what is not a parameter
        self._summing: Unit | None = None
        model.stack = self._run
        model.register_forward_pre_hook(lambda *_: self.root.gather())

    def _places(self, units: Sequence[Mapping[str, nn.Parameter]]) -> dict[str, int]:
        """Return the unit of each parameter, by its name in this model."""
        number = {id(parameter): n for n, unit in enumerate(units) for parameter in unit.values()}
        found = {name: number[id(parameter)] for name, parameter in self.model.named_parameters()}
        return {name.replace(".inner.", ".").replace(".table.", "."): n for name, n in found.items()}

    @property
    def shared_bytes(self) -> int:
        """Bytes of the device that other ranks access, in addition to torch's allocations."""
        copies = self.units[0].copies
        return (0 if self.peers is None else self.peers.nbytes) + (0 if copies is None else copies.nbytes)

    @property
    def units(self) -> list[Unit]:
        """All units, the root last."""
        return [*self.layers, self.root]

    @property
    def upload(self) -> FileUpload | None:
        """Writer of new weights to a file, for the optimizer; None if it updates ``owned`` in place."""
        if not isinstance(self.pieces, FilePieces):
            return None
        places = {}
        for unit in self.units:
            low = self.group.rank * unit.each
            for name, (begin, end) in unit.bounds.items():
                at = unit.starts[name] - low
                places[name] = unit.number, at + begin, at + end
        return FileUpload(self.pieces, places, self.root.dtype)

    @property
    def owned(self) -> dict[str, nn.Parameter]:
        """Pieces that this rank updates, by the names of their parameters, in the order of the model."""
        pieces = {name: piece for unit in self.units for name, piece in unit.pieces.items()}
        return {name: pieces[name] for name in self.parameters if name in pieces}

    @cached_property
    def _bounds(self) -> dict[str, tuple[int, int]]:
        """Bounds of this rank's part of each parameter."""
        return {name: ends for unit in self.units for name, ends in unit.bounds.items()}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each whole parameter."""
        return {name: tuple(parameter.shape) for name, parameter in self.parameters.items()}

    def _run(self, x_TD: Tensor, positions_T: Tensor, context: AttentionContext) -> Tensor:
        """Run the layers, each gathered only while it runs."""
        model = self.model
        rotation = None if model.rope is None else model.rope.cos_sin(positions_T)
        training = torch.is_grad_enabled()
        for number, (layer, unit) in enumerate(zip(model.layers, self.layers, strict=True)):
            unit.gather()
            if number + 1 < len(self.layers):
                self.layers[number + 1].prefetch()
            if not training:
                x_TD = layer(x_TD, rotation, context)
            else:
                before = self.layers[number - 1] if number else None
                x_TD = _Leaves.apply(x_TD, unit, self)  # type: ignore[no-untyped-call]
                if self.recompute:
                    x_TD = checkpoint(layer, x_TD, rotation, context, use_reentrant=False)
                else:
                    x_TD = layer(x_TD, rotation, context)
                x_TD = _Enters.apply(x_TD, unit, before)  # type: ignore[no-untyped-call]
            unit.release()
        wanted = context.wanted
        return x_TD if wanted is None else x_TD.index_select(0, wanted.tokens_R)

    # What merged layers ask (``train/model/merged_layers.py``)

    @contextmanager
    def whole(self, number: int) -> Iterator[None]:
        """Gather a layer inside the context, so that code can inspect the addresses of its matrices. All ranks
        enter."""
        self.layers[number].gather()
        for module in self.model.layers[number].modules():
            if isinstance(module, Weight):
                module.unjoin()  # they have moved
        yield
        memory = self.layers[number].memory
        moved = [n for n, p in self.layers[number].parameters.items() if p.untyped_storage().data_ptr() != memory]
        if moved:
            raise RuntimeError(f"{moved[0]} was moved out of the memory in which it is gathered")
        self.layers[number].release()

    def begin(self, number: int, backward: bool) -> None:
        """Gather a layer, and start gathering the next one of the pass."""
        self.layers[number].gather()
        following = number - 1 if backward else number + 1
        if 0 <= following < len(self.layers):
            self.layers[following].prefetch()

    def end(self, number: int, training: bool) -> None:
        """Release a layer after its forward pass. The last one stays gathered for the backward pass, which begins with
        it."""
        if number + 1 < len(self.layers) or not training:
            self.layers[number].release()

    def give(self, number: int, gradients: Mapping[nn.Parameter, Tensor | None]) -> None:
        """Start summing a layer's gradients after its backward pass."""
        self.leave(self.layers[number], gradients)

    def leave(self, unit: Unit, gradients: Mapping[nn.Parameter, Tensor | None] | None = None) -> None:
        """Start summing a layer's gradients after its backward pass, and finish the sum of the layer above."""
        unit.reduce(gradients)
        unit.release()
        if self._summing is not None:
            self._summing.settle()
        self._summing = unit

    def send_to(self, sink: Sink | None) -> None:
        """Pass each gradient of this rank's pieces to ``sink`` when it is summed, micro-batch by micro-batch."""
        for unit in self.units:
            unit.sink = sink

    # What a training loop asks, as of ``Replicas``

    @contextmanager
    def last(self) -> Any:
        """Do nothing: no sum waits for the last micro-batch, because each layer's gradients are summed in its backward
        pass."""
        yield

    def collect(self) -> None:
        """Sum the gradients outside of the layers, after the backward pass of a micro-batch."""
        self.root.reduce()

    def reduce(self) -> dict[str, Tensor]:
        """Return the gradients of the whole step, of this rank's pieces."""
        self.root.reduce()
        self.root.release()
        found = {name: gradient for unit in self.units for name, gradient in unit.gradients().items()}
        return {name: found[name] for name in self.parameters if name in found}

    def clear(self) -> None:
        """Drop all gradients."""
        self._summing = None
        for unit in self.units:
            unit.settle()
            unit.gradient = None
        for parameter in self.parameters.values():
            parameter.grad = None

    def share(self) -> None:
        """Release all units after a step, because gathered parameters are outdated, and announce the changed pieces."""
        for unit in self.units:
            unit.release()
        if self.peers is not None:
            self.peers.stepped()

    @torch.no_grad()
    def state(self) -> dict[str, Tensor]:
        """Return every whole parameter on the CPU of the first rank; nothing on others. All ranks call it."""
        found: dict[str, Tensor] = {}
        for unit in self.units:
            for name, values in unit.values():
                if self.group.rank == 0:
                    found[name] = values.to("cpu", copy=True)
        if self.peers is not None:  # a rank may end after this, and its memory with it: others have read it
            self.peers.settle()
            self.group.most(0)
        return {name: found[name] for name in self.parameters if name in found}

    def writes(self, name: str) -> bool:
        """Return True: no other rank has this rank's state of a parameter."""
        return True

    def stored_name(self, name: str) -> str:
        """Return the name of this rank's part of a state (``parameter/kind``) in a file."""
        parameter = name.rpartition("/")[0]
        return part_name(name, self._bounds[parameter][0], self.shapes[parameter])

    def whole_state(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the optimizer's state of all ranks (``name/kind``, of pieces) put together, on the CPU of the first
        rank; on others nothing. All call it."""
        parts = gather_tensors(self.group, {f"{self.group.rank:06}/{name}": t for name, t in tensors.items()})
        joined: dict[str, list[Tensor]] = {}
        for name in sorted(parts):
            joined.setdefault(name.partition("/")[2], []).append(parts[name])
        shapes = self.shapes
        return {name: torch.cat(p).view(shapes[name.rpartition("/")[0]]) for name, p in joined.items()}

    def own_state(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the part of a whole state that belongs to this rank's pieces."""
        found = {}
        for name in tensors:
            parameter = name.rpartition("/")[0]
            if parameter in self._bounds:
                begin, end = self._bounds[parameter]
                found[name] = tensors[name].reshape(-1)[begin:end].clone()
        return found


def _cutting(weights: StoredWeights, places: Mapping[str, int], cut: Callable[[int], object]) -> StoredWeights:
    """Yield weights unchanged, for ``fill``; a unit with all its weights is divided before the next one is read."""
    left = Counter(places.values())
    for name, stored in weights:
        yield name, stored
        if name in places:
            left[places[name]] -= 1
            if not left[places[name]]:
                cut(places[name])


class _Leaves(torch.autograd.Function):
    """Node before a layer. In the backward pass it runs after the layer: gradients are summed, and the layer is
    released."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, unit: Unit, sharded: Sharded) -> Tensor:
        ctx.unit, ctx.sharded = unit, sharded
        return x_TD.view_as(x_TD)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        ctx.sharded.leave(ctx.unit)
        return gradients[0], None, None


class _Enters(torch.autograd.Function):
    """Node after a layer. In the backward pass it runs first: the layer is gathered, and the gathering of the previous
    one starts."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, unit: Unit, before: Unit | None) -> Tensor:
        ctx.unit, ctx.before = unit, before
        return x_TD.view_as(x_TD)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        ctx.unit.gather()
        if ctx.before is not None:
            ctx.before.prefetch()
        return gradients[0], None, None
