"""``StackExperts``: a layer's mixture of experts as ``experts.h`` takes it."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import Structure, c_float, c_int32, c_void_p
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from .library import PackedWeight

NUMBERS = ("count", "used", "sigmoid", "renormalize", "groups", "groups_kept")
MATRICES = ("router", "gate", "up", "down", "shared_router", "shared_gate", "shared_up", "shared_down")


class ExpertsStruct(Structure):
    """``Experts`` of ``experts.h``."""

    _fields_ = (
        *((name, c_int32) for name in NUMBERS),
        ("scale", c_float),
        ("clamp", c_float),
        ("score_bias", c_void_p),
        *((name, c_void_p) for name in MATRICES),
    )


@dataclass(frozen=True, slots=True)
class StackExperts:
    """The experts of one decoder layer; ``spec/moe.py`` says what the numbers mean.

    ``gate``, ``up`` ``[count * width, dim]`` and ``down`` ``[count * dim, width]`` are the matrices of all experts,
    concatenated along rows; widths and dim are multiples of ``GROUP_ROWS``.
    """

    count: int
    used: int
    sigmoid: bool
    renormalize: bool
    groups: int
    groups_kept: int
    scale: float
    clamp: float
    """Clamp of the activation; 0 for SwiGLU."""
    score_bias: Tensor | None
    """float32 ``[count]``, or None."""
    router: PackedWeight
    gate: PackedWeight
    up: PackedWeight
    down: PackedWeight
    shared_router: PackedWeight | None = None
    shared_gate: PackedWeight | None = None
    shared_up: PackedWeight | None = None
    shared_down: PackedWeight | None = None

    def c_struct(
        self, address: Callable[[PackedWeight | None], int | None], floats: Callable[[Tensor | None], int | None]
    ) -> ExpertsStruct:
        """Build the struct from functions that give the addresses of a matrix and of a vector."""
        numbers = {name: int(getattr(self, name)) for name in NUMBERS}
        matrices = {name: address(getattr(self, name)) for name in MATRICES}
        scales = {"scale": self.scale, "clamp": self.clamp, "score_bias": floats(self.score_bias)}
        return ExpertsStruct(**numbers, **matrices, **scales)
