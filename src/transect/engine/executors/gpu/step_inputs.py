"""Everything that one step needs from the host, in one piece of memory, so that one copy takes it to the device.

A ``StepLayout`` says where each field lies, from the sizes of a step alone: T tokens, B rows (sequences), D draws and W
columns of the block table. The same layout is viewed as numpy on the host, where it is filled, and as tensors on the
device, where it is read. CUDA graphs keep the addresses, so all steps of one layout can replay one graph.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 16
"""Alignment in bytes. Triton recompiles a kernel for a pointer with another alignment."""


class StepFields(NamedTuple):
    """Inputs of one step: numpy arrays, or tensors."""

    seed: Any
    """int64 ``[D]``; the bits of the unsigned seed."""
    token: Any
    """int64 ``[T]``: tokens that the host knows."""
    adapter: Any
    """int32 ``[T]``: slot of each token's adapter, or -1; read by steps in which a row has one."""
    source: Any
    """int32 ``[T]``: source of each input token, as an int64 index from the beginning of the arena: ``token``, or a
    draw of the step before."""
    position: Any
    """int32 ``[T]``."""
    start: Any
    """int32 ``[B + 1]``: query starts."""
    length: Any
    """int32 ``[B]``: length of each sequence including this step's tokens."""
    last: Any
    """int32 ``[D]``: index of the token whose logits are drawn from."""
    draw_row: Any
    """int32 ``[D]``: index of the row whose sequence is drawn for."""
    draw_position: Any
    """int32 ``[D]``: position of the drawn token."""
    choice: Any
    """int32 ``[D]``."""
    top_k: Any
    """int32 ``[D]``."""
    state: Any
    """int32 ``[D]``: row of ``AdjustState``, or -1."""
    mask: Any
    """int32 ``[D]``: row of ``MaskTable.words``, or -1."""
    temperature: Any
    """float32 ``[D]``, like the remaining fields."""
    top_p: Any
    min_p: Any
    repetition: Any
    frequency: Any
    presence: Any
    table: Any
    """int32 ``[B, W]``: block tables."""


_TYPES = {"seed": np.int64, "token": np.int64} | dict.fromkeys(
    ("temperature", "top_p", "min_p", "repetition", "frequency", "presence"), np.float32
)
_TORCH: dict[Any, torch.dtype] = {np.int64: torch.int64, np.int32: torch.int32, np.float32: torch.float32}
_BYTES: dict[Any, int] = {np.int64: 8, np.int32: 4, np.float32: 4}


@dataclass(frozen=True, slots=True)
class StepLayout:
    """Offsets of the fields of a step with these sizes."""

    tokens: int
    rows: int
    draws: int
    width: int

    def places(self) -> tuple[tuple[int, tuple[int, ...], type], ...]:
        """Return (offset in bytes, shape, type) of each field, in the order of ``StepFields``."""
        return _places(self)[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all fields together."""
        return _places(self)[1]

    def numpy(self, memory: np.ndarray) -> StepFields:
        """Return views of uint8 memory."""
        return StepFields(
            *(
                memory[at : at + prod(shape) * _BYTES[kind]].view(kind).reshape(shape)
                for at, shape, kind in self.places()
            )
        )

    def tensors(self, memory: Tensor) -> StepFields:
        """Return views of a uint8 tensor."""
        return StepFields(
            *(
                memory[at : at + prod(shape) * _BYTES[kind]].view(_TORCH[kind]).view(shape)
                for at, shape, kind in self.places()
            )
        )


@cache
def _places(layout: StepLayout) -> tuple[tuple[tuple[int, tuple[int, ...], type], ...], int]:
    tokens, rows, draws = (layout.tokens,), (layout.rows,), (layout.draws,)
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(StepFields._fields, draws)
    shapes |= dict.fromkeys(("token", "adapter", "source", "position"), tokens)
    shapes |= {"start": (layout.rows + 1,), "length": rows}
    shapes["table"] = (layout.rows, layout.width)
    found = []
    at = 0
    for name, shape in shapes.items():
        kind = _TYPES.get(name, np.int32)
        found.append((at, shape, kind))
        size = prod(shape) * _BYTES[kind]
        at += -(-size // ALIGNMENT) * ALIGNMENT
    return tuple(found), at


@dataclass(slots=True)
class StepMemory:
    """A piece of host memory that steps are written to, one after another."""

    memory: np.ndarray
    """uint8."""
    holds: object = None
    """Group of sequences whose constants the memory has held since the last step, and which need not be written
    again."""
    step: int = 0
    """Last step that was written here."""
    _fields: dict[StepLayout, StepFields] = field(default_factory=dict)

    def fields(self, layout: StepLayout) -> StepFields:
        """Return cached views for a layout; layouts must be few."""
        found = self._fields.get(layout)
        if found is None:
            found = self._fields[layout] = layout.numpy(self.memory)
        return found
