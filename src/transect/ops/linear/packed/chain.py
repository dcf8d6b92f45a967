r"""``chain.cuh``: the four products between the attention of a layer and that of the next, for one row, in one launch.
``eight_bit/scaled8_chain.py``, ``int4/int4_chain.py`` and ``gguf/gguf_chain.py`` say how weights are held.

    t = a O^T + r                          h = (t s / rms(t)) [G; U]^T
    u = (silu(h_G) h_U) W^T + t            y = (u s' / rms(u)) Q^T + b

where a is what attention gives, r the residual stream, s and s' the weights of the norms, O, [G; U] and W the layer's
matrices, and Q those of q, k and v of the next layer. The result is y and u.

Each product needs the one before, so four launches leave memory idle while one ends and the next begins: some 4 us of
the 8 to 30 that the bytes of a product take. Here every block asks for its share of the weights of all four in one go,
as far as its shared memory goes, and only x waits for the blocks that make it.

Shapes: a ``[1, K]``, r ``[1, D]``, norms ``[D]``, b ``[N]``, all in bfloat16; K up to 16,384 (of GGUF
blocks 32,768). Inference only.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ....hardware.device import target_of
from ...lang import cuda
from ...lang.jit import multiprocessors

MOST_INPUTS = 16384
MOST_STAGES = 12
"""Most items that each warp has asked for at a time."""
SHARED = "ppffiiip"
"""Letters of the arguments that all launchers take after their own."""
TURNS = 16
"""Rows of gate and up that alternate, in weights stored in this order."""


class ChainWeights(NamedTuple):
    """The matrices in the order of the products, in the form of a kind of weight, and the norms after the first and the
    third."""

    o: Any
    gate_up: Any
    down: Any
    qkv: Any
    norms: tuple[Tensor, Tensor]
    eps: tuple[float, float]
    bias: Tensor | None = None
    """Bias of q, k and v."""

    @property
    def matrices(self) -> tuple[Any, ...]:
        return (self.o, self.gate_up, self.down, self.qkv)


def in_turns(both: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gate's part and the other of ``[..., N]`` where groups of 16 of both alternate, ``[..., N / 2]``
    each."""
    turns = both.unflatten(-1, (-1, 2, TURNS))
    return turns[..., 0, :].flatten(-2), turns[..., 1, :].flatten(-2)


def reference(
    attended: Tensor,
    residual: Tensor,
    weights: ChainWeights,
    dense: Callable[[Any, torch.dtype], Tensor],
    halves: Callable[[Tensor], tuple[Tensor, Tensor]],
) -> tuple[Tensor, Tensor]:
    """Compute (y, u) in the dtype of the inputs, by torch in their dtype or float32, whichever is wider. ``dense``:
    returns a matrix in a dtype; ``halves``: splits a product's result into the gate's part and the other."""
    wide = torch.promote_types(attended.dtype, torch.float32)
    o, gate_up, down, qkv = (dense(m, wide) for m in weights.matrices)
    first, second = (norm.to(wide) for norm in weights.norms)
    t = attended.to(wide) @ o.T + residual.to(wide)
    gate, up = halves(F.rms_norm(t, t.shape[1:], first, weights.eps[0]) @ gate_up.T)
    u = (F.silu(gate) * up) @ down.T + t
    y = F.rms_norm(u, u.shape[1:], second, weights.eps[1]) @ qkv.T
    if weights.bias is not None:
        y = y + weights.bias.to(wide)
    return y.to(attended.dtype), u.to(attended.dtype)


def sizes_refusal(shapes: Sequence[tuple[int, int]]) -> str | None:
    """Return the reason why four matrices of these outputs and inputs are not a chain; None if they are."""
    o, gate_up, down, qkv = shapes
    if o[0] != gate_up[1] or gate_up[0] != 2 * down[1] or down[0] != o[0] or qkv[1] != o[0]:
        return "the sizes of the products do not follow each other"
    for n, k in shapes:
        if n % 16 or k % 128 or k > MOST_INPUTS:
            return f"outputs must be multiples of 16, inputs of 128 and at most {MOST_INPUTS}, not {n} x {k}"
    return None


def vectors_refusal(weights: ChainWeights) -> str | None:
    """Return the reason why norms and bias are not taken; None if they are."""
    vectors = [*weights.norms, *([] if weights.bias is None else [weights.bias])]
    if any(v.dtype != torch.bfloat16 or not v.is_contiguous() for v in vectors):
        return "norms and bias must be bfloat16 and contiguous"
    return None


class Chain(ABC):
    """``(attended, residual, weights) -> (y, u)`` by a source that has ``chain.cuh``, for one kind of weight.

    Launches leave results in memory that they share, so those of one instance must be on one stream. All blocks of a
    launch must run at once. So two launches must never run beside each other on a GPU, from two streams or by MPS: each
    may have half of the multiprocessors and wait for the rest, until the kernel stops with an error after some seconds.

    Raises:
        Unavailable: no NVIDIA GPU since Ampere (no Hopper GPU, if not ``portable``), or no nvcc to build the kernel.
        RuntimeError: made inside a CUDA graph capture.
    """

    source: str
    """Name of the source without ``.cu``."""
    signature: str
    """Letters of the launcher's own arguments, which come first, as ``bind`` takes them."""
    stages: int
    """Items that each warp has asked for at a time on Hopper; on other GPUs as many as fit."""
    refusal: Callable[[ChainWeights], str | None]
    """Returns the reason why the kernel does not take some weights; None if it does."""
    portable = True
    """The source runs since Ampere, not only on Hopper."""

    def __init__(self, device: torch.device | None = None) -> None:
        bind = cuda.bind_since_ampere if self.portable else cuda.bind_on_hopper
        self._launch = bind(self.source, f"transect_{self.source}", f"{self.signature}{SHARED}", device)
        self._target = target_of(device)
        self._held: dict[tuple[torch.device, int, int], Tensor] = {}

    def hold(self, device: torch.device, d: int, ffn: int) -> Tensor:
        """Return the memory through which blocks give each other results, for a model's dim and that of its
        feed-forward.

        Raises:
            RuntimeError: it is not there yet, and a CUDA graph is being captured.
        """
        key = (device, d, ffn)
        if key not in self._held:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(f"{self.source}.cu: run the operator once before capturing it in a CUDA graph")
            results = 2 * ((2 * d + ffn) // 2 + 2 * (d // 16))
            held = torch.zeros(results + multiprocessors(device), dtype=torch.int32, device=device)
            held[:results] = -1
            self._held[key] = held
        return self._held[key]

    @abstractmethod
    def describe(self, weights: ChainWeights, stages: int) -> tuple[list[Any], Sequence[tuple[int, int]], int]:
        """Return the launcher's own arguments (numbers and arrays of ctypes), each matrix's outputs and inputs, and the
        number of stages that fit."""

    def __call__(
        self, attended: Tensor, residual: Tensor, weights: ChainWeights, *,
        dependent_launch: bool = False, stages: int | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Compute y ``[1, N]`` and u ``[1, D]``.

        ``dependent_launch``: the weights may be read before the kernel before this one on the stream has ended.

        Raises:
            ValueError: the kernel does not take these weights, there is more than one row, or another dtype.
            RuntimeError: the launch failed.
        """
        if refused := self.refusal(weights):
            raise ValueError(f"{self.source}.cu: {refused}")
        wanted = stages or (self.stages if self._target.hopper else MOST_STAGES)
        own, shapes, stages = self.describe(weights, wanted)
        (d, k), ffn = shapes[0], shapes[2][1]
        reason = None
        if attended.shape != (1, k) or residual.shape != (1, d):
            reason = f"it takes one row of {k} numbers and one of {d}"
        if attended.dtype != torch.bfloat16 or residual.dtype != torch.bfloat16 or attended.data_ptr() % 16:
            reason = reason or "it computes in bfloat16, and reads 16 bytes at a time"
        if reason:
            raise ValueError(f"{self.source}.cu: {reason}")
        device = attended.device
        blocks, words = multiprocessors(device), self.hold(device, d, ffn)
        lengths = [d // 2, d // 2, ffn // 2, d // 16, d // 16]
        *results, _, launches = words.split([*lengths, sum(lengths), blocks])
        total, stream = residual.new_empty(1, d), residual.new_empty(1, d)
        out = residual.new_empty(1, shapes[3][0])
        sizes = (ctypes.c_int * 8)(*(size for shape in shapes for size in shape))
        vectors = [attended, residual, *weights.norms, weights.bias]
        pointers = addresses([*vectors, total, stream, out, *results, launches])
        code = self._launch(
            *(ctypes.addressof(each) if isinstance(each, ctypes.Array) else each for each in (*own, sizes, pointers)),
            *weights.eps, stages, blocks,
            2 if dependent_launch and self._target.dependent_launch else 0,
            torch.cuda.current_stream(device).cuda_stream,
        )  # fmt: skip
        if code:
            raise RuntimeError(f"{self.source}.cu: the launch returned {code}")
        return out, stream


def addresses(tensors: Sequence[Tensor | None]) -> ctypes.Array[ctypes.c_void_p]:
    """Return an array of where they begin, for a launcher."""
    return (ctypes.c_void_p * len(tensors))(*(None if t is None else t.data_ptr() for t in tensors))
