"""Copy values of files to a device through two pinned buffers in turn.

Reading the next piece overlaps with copying the last one to the device. On a CPU it is a plain copy.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..formats.ggml_blocks import QuantizedTensor

PIECE = 64 * 2**20
"""Bytes of each of the two pinned buffers."""


def dense_values(values: Tensor | QuantizedTensor) -> Tensor:
    """Return contiguous numbers; packed ones are dequantized to float32. May be a view of a mapped file."""
    if isinstance(values, QuantizedTensor):
        return torch.from_numpy(values.dequantize())
    return values.contiguous()


class Staging:
    """Copies tensors to a device; the copies are complete when the block is left."""

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self._turn = 0
        self._pieces: list[Tensor] = []
        self._sent: list[torch.cuda.Event | None] = [None, None]

    def __enter__(self) -> Staging:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        self._pieces.clear()

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy ``source`` into ``target`` of the same shape, rounded to its dtype on the device."""
        if self.device.type != "cuda" or source.device == target.device:
            target.copy_(source)
            return
        source = source.contiguous()
        landed = target
        if source.dtype != target.dtype or not target.is_contiguous():
            landed = torch.empty(target.shape, dtype=source.dtype, device=self.device)
        self._send(source, landed)
        if landed is not target:
            target.copy_(landed)

    def bring(self, source: Tensor) -> Tensor:
        """Return ``source`` on the device, in its own dtype."""
        if source.device.type == self.device.type:
            return source
        landed = torch.empty(source.shape, dtype=source.dtype, device=self.device)
        self.copy(source, landed)
        return landed

    def _send(self, source: Tensor, landed: Tensor) -> None:
        if not self._pieces:
            self._pieces = [torch.empty(PIECE, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        source_bytes, target_bytes = source.view(-1).view(torch.uint8), landed.view(-1).view(torch.uint8)
        for start in range(0, len(source_bytes), PIECE):
            part = source_bytes[start : start + PIECE]
            piece, sent = self._pieces[self._turn], self._sent[self._turn]
            if sent is not None:
                sent.synchronize()
            piece[: len(part)].copy_(part)
            target_bytes[start : start + len(part)].copy_(piece[: len(part)], non_blocking=True)
            sent = self._sent[self._turn] = torch.cuda.Event()
            sent.record()
            self._turn = 1 - self._turn
