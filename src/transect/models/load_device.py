"""A source to a ``Decoder`` on a GPU, with joined weights and the fused stack.

Memory is allocated once, as it will be used; each weight is then read into its place. Files come through two pieces of
pinned memory in turn, so that reading the next piece and copying the last to the device go on together. Random weights
are drawn on the device. Quantized weights are dequantized on the host.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ..formats.ggml_blocks import QuantizedTensor
from ..ops.opset import OpSet
from .cost import Storage, weight_bytes
from .decoder import Decoder
from .fused_stack import FusedStack, Fusions, join_weights, unsuitable
from .resolve import ModelSource
from .weights_dummy import dummy_weights
from .weights_gguf import load_gguf
from .weights_hf import load_hf

PIECE = 64 * 2**20
"""Bytes of pinned memory, twice."""


def load_on_device(
    source: ModelSource,
    *,
    device: torch.device,
    dtype: torch.dtype,
    ops: OpSet,
    max_positions: int,
    seed: int = 0,
    fusions: Fusions | None = None,
) -> Decoder:
    """Build the model on a device and fill it, for inference.

    Args:
        dtype: of weights and activations.
        ops: what it computes with.
        max_positions: of the longest sequence.
        seed: of the random weights that a source without weights gets.
        fusions: what the layers do in one kernel; None: all they can.

    Raises:
        ValueError: files that are damaged or do not fit the configuration.
    """
    model = Decoder(source.config, "meta", dtype, ops=ops)
    join_weights(model, device)
    model.requires_grad_(False)
    state = model.state_dict()
    if source.kind == "shape":
        for name, drawn in dummy_weights(source.config, seed=seed, dtype=dtype, device=device):
            state[name].copy_(drawn)
    else:
        weights = (
            load_gguf(source.gguf, source.config) if source.kind == "gguf" else load_hf(source.path, source.config)
        )
        with _Staging(device) as staging, _progress(source) as advance:
            for name, weight in weights:
                dense = torch.from_numpy(weight.dequantize()) if isinstance(weight, QuantizedTensor) else weight
                staging.copy(dense.reshape(weight.shape).contiguous(), state[name])
                advance(dense.nbytes)
    if unsuitable(source.config) is None:
        model.stack = FusedStack(model, max_positions=max_positions, fusions=fusions)
    return model


class _Staging:
    """Copies host tensors to a device through pinned memory; the copies are complete when the block is left."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._turn = 0

    def __enter__(self) -> _Staging:
        if self._device.type == "cuda":
            self._pieces = [torch.empty(PIECE, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
            self._sent: list[torch.cuda.Event | None] = [None, None]
        return self

    def __exit__(self, *exception: object) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Contiguous ``source`` into ``target`` of the same shape, rounded to its dtype on the device."""
        if self._device.type != "cuda":
            target.copy_(source)
            return
        landed = target
        if source.dtype != target.dtype or not target.is_contiguous():
            landed = torch.empty(target.shape, dtype=source.dtype, device=self._device)
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
        if landed is not target:
            target.copy_(landed)


@contextmanager
def _progress(source: ModelSource) -> Iterator:
    """A bar on stderr where that is a terminal; yields what is told of each weight's bytes."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("loading"), *Progress.get_default_columns(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(source.name, total=weight_bytes(source.config, Storage()))
        yield lambda count: bar.advance(task, count)
