"""Pipeline parallelism: each rank has some layers, and micro-batches pass through the ranks by a schedule.

``Pipeline`` runs one rank's list of a schedule. Activations go to the next stage and gradients come back from it;
sends do not wait. Going on and going back have links of their own, and so has the way from the last rank to the first,
so that on a GPU, where what one link carries stays in order, no two ranks wait for each other.

Shapes: T tokens of a micro-batch (the rank's own with sequence parallelism), D model dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ..models.context import AttentionContext
from ..models.decoder import Decoder
from ..spec.layouts.schedule import Action
from .group import Group


@dataclass(frozen=True, slots=True)
class StagedBatch:
    """A micro-batch, with the data that each stage needs.

    Attributes:
        tokens_T, positions_T: int64. context: for attention.
        rows: T of the activations between stages.
        loss: hidden states ``[T, D]`` -> a scalar, asked of the last stage.
    """

    tokens_T: Tensor
    positions_T: Tensor
    context: AttentionContext
    rows: int
    loss: Callable[[Tensor], Tensor]


class Pipeline:
    """One rank of a pipeline.

    Args:
        parts: the own runs of layers; part c is stage c * ranks + rank of all.
        links: groups of the same ranks: for activations, for activations from the last rank to the first, and the same
            for gradients.
    """

    def __init__(self, parts: Sequence[Decoder], links: Sequence[Group]) -> None:
        self.parts = list(parts)
        self.group = links[0]
        self._links = {("F", False): links[0], ("F", True): links[1], ("B", False): links[2], ("B", True): links[3]}
        self._sent: list[tuple[dist.Work, Tensor]] = []

    @property
    def ends(self) -> bool:
        """True if the rank has the last layers, and so the loss."""
        return self.group.rank == self.group.size - 1

    def run(
        self, pieces: Sequence[StagedBatch], actions: Sequence[Action], after: Callable[[], object]
    ) -> list[Tensor]:
        """Run the forward and backward passes of a step.

        Args:
            actions: this rank's list of the schedule.
            after: called after each backward pass, when gradients have been added.

        Returns:
            The loss of each piece on the last rank; on others nothing.
        """
        kept: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}
        losses: dict[int, Tensor] = {}
        for action in actions:
            at = action.micro_batch, action.chunk
            if action.kind == "F":
                came, out = kept[at] = self._forward(pieces[action.micro_batch], action.chunk, train=True)
                if self._is_last(action.chunk):
                    losses[action.micro_batch] = out.detach()
                continue
            came, out = kept.pop(at)
            if self._is_last(action.chunk):
                out.backward()  # type: ignore[no-untyped-call]
            else:
                torch.autograd.backward(out, self._receive("B", out.shape, out, action.chunk))
            if came is not None:
                assert came.grad is not None
                self._send("B", came.grad, action.chunk)
            after()
        self._settle()
        return [losses[index] for index in sorted(losses)]

    @torch.no_grad()
    def measure(self, piece: StagedBatch) -> Tensor:
        """Compute the loss of a piece, on every rank."""
        loss = torch.zeros((), device=piece.tokens_T.device)
        for chunk in range(len(self.parts)):
            _, out = self._forward(piece, chunk, train=False)
            if self._is_last(chunk):
                loss = out.float()
        self._settle()
        return self.group.broadcast(loss.reshape(1), self.group.size - 1)[0]

    def _forward(self, piece: StagedBatch, chunk: int, train: bool) -> tuple[Tensor | None, Tensor]:
        """Return the input from the previous stage, and the output for the next stage, or the loss."""
        part, came = self.parts[chunk], None
        if self.group.rank == 0 and chunk == 0:
            x_TD = part.begin(piece.tokens_T, piece.positions_T)
        else:
            shape = torch.Size((piece.rows, part.config.dim))
            came = x_TD = self._receive("F", shape, part.norm.weight, chunk).requires_grad_(train)
        x_TD = part.stack(x_TD, piece.positions_T, piece.context)
        if self._is_last(chunk):
            return came, piece.loss(part.finish(x_TD))
        self._send("F", x_TD.detach(), chunk)
        return came, x_TD

    def _is_last(self, chunk: int) -> bool:
        return self.ends and chunk == len(self.parts) - 1

    def _send(self, kind: str, x: Tensor, chunk: int) -> None:
        """Send a tensor to the next stage, or back to the previous one."""
        rank, size = self.group.rank, self.group.size
        wraps = rank == (size - 1 if kind == "F" else 0)
        to = (rank + (1 if kind == "F" else -1)) % size
        x = x.contiguous()
        work = self._links[kind, wraps].send(x, to)
        assert work is not None
        self._sent = [(w, t) for w, t in self._sent if not w.is_completed()] + [(work, x)]

    def _receive(self, kind: str, shape: torch.Size, like: Tensor, chunk: int) -> Tensor:
        rank, size = self.group.rank, self.group.size
        wraps = rank == (0 if kind == "F" else size - 1)
        source = (rank - (1 if kind == "F" else -1)) % size
        x = torch.empty(shape, dtype=like.dtype, device=like.device)
        return self._links[kind, wraps].receive(x, source)

    def _settle(self) -> None:
        """Wait until all sent tensors have arrived."""
        for work, _ in self._sent:
            work.wait()
        self._sent = []
