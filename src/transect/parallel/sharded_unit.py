"""A unit of a sharded model: parameters that are gathered and released together (``sharded.py`` has the picture)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from .group import Group
from .offload.pieces import Pieces

if TYPE_CHECKING:
    from .peer_copies import PeerCopies
    from .peer_pieces import PeerPieces


class Sink(Protocol):
    """Receiver of gradients, which may be dropped afterwards."""

    def __call__(self, name: str, gradient: Tensor, first: int = 0) -> None:
        """Take ``gradient``, which covers the numbers from ``first`` on of this rank's part of the parameter
        ``name``."""
        ...


ALIGN = 64
"""Numbers in a group; pieces are whole groups, so that kernels may read 16 bytes at a time."""


class Unit:
    """Parameters that are gathered and released together.

    Attributes:
        parameters: by name; while the unit is not whole they have their shapes and no memory.
        pieces: the own part of each parameter that this rank has a part of, ``[numbers]``, views of one tensor.
        bounds: bounds of that part within the parameter.
    """

    def __init__(
        self,
        group: Group,
        parameters: Mapping[str, nn.Parameter],
        reduce_dtype: torch.dtype,
        device: torch.device,
        pieces: Pieces | None = None,
        number: int = 0,
        peers: PeerPieces | None = None,
    ) -> None:
        self.peers, self._at = peers, 0
        """Memory from which others read the piece, and the piece's offset in it; None if the piece is sent."""
        self.group, self.reduce_dtype, self.number = group, reduce_dtype, number
        self.parameters = dict(parameters)
        first = next(iter(self.parameters.values()))
        self.dtype = first.dtype
        self.each = piece_size(self.parameters, group)
        self._whole = torch.zeros(self.each * group.size, dtype=first.dtype, device=device)
        self.starts: dict[str, int] = {}
        at = 0
        for name, parameter in self.parameters.items():
            if parameter.dtype != first.dtype:
                raise ValueError(f"{name} is {parameter.dtype} and others of its layer {first.dtype}: use one dtype")
            self._whole[at : at + parameter.numel()] = parameter.detach().reshape(-1)
            parameter.data = self._whole[at : at + parameter.numel()].view_as(parameter)
            self.starts[name] = at
            at += parameter.numel()
        low = group.rank * self.each
        self.piece = self._whole[low : low + self.each].clone()
        self.copies: PeerCopies | None = None
        """Copy engines that sum gradients; None for torch's collectives."""
        self.complete: Callable[[Mapping[str, Tensor]], None] | None = None
        """Sums partial gradients over ranks along other axes; None if gradients are complete."""
        self._home = pieces
        """Home of the piece, if it is not on the device."""
        self._link: torch.cuda.Stream | None = None
        """Stream of copies from the home."""
        if peers is not None:
            self.piece, self._at = peers.keep(self.piece)
        if pieces is not None:
            self.piece = pieces.keep(number, self.piece)
            self._link = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copy: Tensor | None = None
        self.gradient: Tensor | None = None
        """Sum of all ranks' gradients of this rank's piece, ``[each]``."""
        self.sink: Sink | None = None
        """Receiver of gradients, in place of ``gradient``."""
        self.pieces: dict[str, nn.Parameter] = {}
        self.bounds: dict[str, tuple[int, int]] = {}
        for name, parameter in self.parameters.items():
            start = self.starts[name]
            begin, end = max(start, low), min(start + parameter.numel(), low + self.each)
            if begin < end:
                self.pieces[name] = nn.Parameter(self.piece[begin - low : end - low])
                self.bounds[name] = begin - start, end - start
        self._begun = False
        """True if gathering has started."""
        self._coming: Any = None
        self._going: tuple[Any, Tensor, Tensor] | None = None
        """Sum of gradients in progress: the work, this rank's piece of the result, the input."""
        self.whole = True
        self.release()

    def prefetch(self) -> None:
        """Start gathering, unless it has started."""
        if self.whole or self._begun:
            return
        self._begun = True
        self._whole.untyped_storage().resize_(self._whole.numel() * self._whole.element_size())
        if self.peers is not None:
            self._coming = self.peers.start_gather(self._whole, self._at)
            return
        if self._home is None:
            self._coming = self.group.start_gather(self._whole, self.piece)
            return
        if self._link is not None:  # until the current stream has given the memory of the whole
            self._link.wait_stream(torch.cuda.current_stream(self._link.device))
        with torch.cuda.stream(self._link):  # None: on the host, at once
            if self.group.size == 1:
                self._home.send(self.number, self._whole)
                return
            self._copy = self._whole.new_empty(self.each)
            self._home.send(self.number, self._copy)
            self._coming = self.group.start_gather(self._whole, self._copy)

    def gather(self) -> None:
        """Gather the whole unit."""
        self.prefetch()
        self._arrive()
        self.whole = True

    @property
    def memory(self) -> int:
        """Address of the whole unit while it is gathered."""
        return self._whole.untyped_storage().data_ptr()

    def release(self) -> None:
        """Free the memory of the whole unit."""
        self._arrive()
        self._whole.untyped_storage().resize_(0)
        self.whole = False

    def values(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every parameter, whole until the next one is requested. All ranks iterate together."""
        self.gather()
        yield from ((name, parameter.detach()) for name, parameter in self.parameters.items())
        self.release()

    def _arrive(self) -> None:
        if self._coming is not None:
            self._coming.wait()
        elif self._begun and self._link is not None:
            torch.cuda.current_stream(self._link.device).wait_stream(self._link)
        self._coming = self._copy = None
        self._begun = False

    @torch.no_grad()
    def reduce(self, given: Mapping[nn.Parameter, Tensor | None] | None = None) -> None:
        """Start summing the gradients of the parameters over the ranks, and drop them; ``settle`` ends it. The
        gradients are ``given``, or those of the parameters."""
        self.settle()
        gradients = [parameter.grad if given is None else given[parameter] for parameter in self.parameters.values()]
        if self.complete is not None:
            self.complete({n: g for n, g in zip(self.parameters, gradients, strict=True) if g is not None})
        if self.group.size == 1 and self.sink is not None:
            for (name, parameter), gradient in zip(self.parameters.items(), gradients, strict=True):
                self.sink(name, (torch.zeros_like(parameter) if gradient is None else gradient).reshape(-1))
                parameter.grad = None
            return
        if all(gradient is None for gradient in gradients):
            flat = torch.zeros(self._whole.numel(), dtype=self.reduce_dtype, device=self._whole.device)
        else:
            flat = torch.empty(self._whole.numel(), dtype=self.reduce_dtype, device=self._whole.device)
            at = 0
            for parameter, gradient in zip(self.parameters.values(), gradients, strict=True):
                part = flat[at : at + parameter.numel()]
                part.zero_() if gradient is None else part.copy_(gradient.reshape(-1))
                at += parameter.numel()
                parameter.grad = None
            flat[at:] = 0
        own = flat.new_empty(self.each)
        start = self.group.start_scatter if self.copies is None else self.copies.start_scatter
        self._going = start(own, flat), own, flat

    @torch.no_grad()
    def settle(self) -> None:
        """Wait for the sum in progress, and add this rank's piece to ``gradient``."""
        if self._going is None:
            return
        work, own, _ = self._going
        self._going = None
        if work is not None:
            work.wait()
        wide = own if own.dtype == torch.float32 else own.float()
        if self.sink is None:
            self.gradient = wide if self.gradient is None else self.gradient.add_(wide)
            return
        for name, part in self._by_name(wide):
            self.sink(name, part)

    def _by_name(self, own: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the parts of a vector as long as this rank's piece, each by the name of its parameter."""
        low = self.group.rank * self.each
        for name, (begin, end) in self.bounds.items():
            at = self.starts[name] + begin - low
            yield name, own[at : at + end - begin]

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradient of each piece, ``[numbers]`` float32; none if there is a ``sink``."""
        self.settle()
        return {} if self.gradient is None else dict(self._by_name(self.gradient))


def piece_size(parameters: Mapping[str, nn.Parameter], group: Group) -> int:
    """Return the numbers of each rank's piece of a unit."""
    size = sum(parameter.numel() for parameter in parameters.values())
    return -(-size // (group.size * ALIGN)) * ALIGN
