r"""``scaled8_chain.cu``: the four products between the attention of a layer and that of the next, for one row and
weights in fp8, in one launch on Hopper.

    t = a O^T + r                          h = (t s / rms(t)) [G; U]^T
    u = (silu(h_G) h_U) W^T + t            y = (u s' / rms(u)) Q^T + b

where a is what attention gives, r the residual stream, s and s' the weights of the norms, O, [G; U] and W the layer's
matrices, and Q those of q, k and v of the next layer. The result is y and u.

Each product needs the one before, so four launches leave memory idle while one ends and the next begins: some 4 us of
the 8 to 30 that the bytes of a product take. Here every block asks for its share of the weights of all four in one go,
as far as its shared memory goes, and only x waits until the blocks have met.

Shapes: a ``[1, K]``, r ``[1, D]``, codes int8 ``[N, K]`` (the bits of fp8), scale float32 ``[N]``, norms ``[D]``, all
sizes multiples of 128, K up to 16,384; all but scales in bfloat16. Sums in float32; x is taken as float16 times a power
of two, which loses digits below 2^-39 of the largest number of its part. Inference only.

Bound by bytes: one for each weight.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...lang import cuda
from ...lang.jit import multiprocessors

STAGES = 5
"""Items of 4 KiB that each of 8 warps has asked for at a time; 2 to 5."""
MOST_INPUTS = 16384
COUNTERS = 96


class Matrix8(NamedTuple):
    """A weight in fp8: codes int8 ``[N, K]``, and a scale float32 for each row."""

    codes: Tensor
    scale: Tensor


class ChainWeights(NamedTuple):
    """The matrices in the order of the products, and the norms after the first and the third."""

    o: Matrix8
    gate_up: Matrix8
    down: Matrix8
    qkv: Matrix8
    norms: tuple[Tensor, Tensor]
    eps: tuple[float, float]
    bias: Tensor | None = None
    """What is added to q, k and v."""

    @property
    def matrices(self) -> tuple[Matrix8, ...]:
        return (self.o, self.gate_up, self.down, self.qkv)


def reference(attended: Tensor, residual: Tensor, weights: ChainWeights) -> tuple[Tensor, Tensor]:
    """(y, u) in the dtype of the inputs, by torch in their dtype or float32, whichever is wider."""
    wide = torch.promote_types(attended.dtype, torch.float32)
    o, gate_up, down, qkv = (
        m.codes.view(torch.float8_e4m3fn).to(wide) * m.scale.to(wide)[:, None] for m in weights.matrices
    )
    first, second = (norm.to(wide) for norm in weights.norms)
    t = attended.to(wide) @ o.T + residual.to(wide)
    gate, up = (F.rms_norm(t, t.shape[1:], first, weights.eps[0]) @ gate_up.T).chunk(2, 1)
    u = (F.silu(gate) * up) @ down.T + t
    y = F.rms_norm(u, u.shape[1:], second, weights.eps[1]) @ qkv.T
    if weights.bias is not None:
        y = y + weights.bias.to(wide)
    return y.to(attended.dtype), u.to(attended.dtype)


def refusal(weights: ChainWeights) -> str | None:
    """Why the kernel does not take these weights, or None."""
    o, gate_up, down, qkv = (m.codes.shape for m in weights.matrices)
    if o[0] != gate_up[1] or gate_up[0] != 2 * down[1] or down[0] != o[0] or qkv[1] != o[0]:
        return "the sizes of the products do not follow each other"
    for matrix in weights.matrices:
        n, k = matrix.codes.shape
        if n % 128 or k % 128 or k > MOST_INPUTS:
            return f"sizes must be multiples of 128, inputs at most {MOST_INPUTS}, not {n} x {k}"
        if matrix.scale.shape != (n,) or matrix.scale.dtype != torch.float32 or not matrix.scale.is_contiguous():
            return "it takes one float32 scale for each row"
        if not matrix.codes.is_contiguous() or matrix.codes.data_ptr() % 16:
            return "the codes must be contiguous, at an address that is a multiple of 16 bytes"
    vectors = [*weights.norms, *([] if weights.bias is None else [weights.bias])]
    if any(v.dtype != torch.bfloat16 or not v.is_contiguous() for v in vectors):
        return "norms and bias must be bfloat16 and contiguous"
    return None


class CudaChain:
    """``(attended, residual, weights) -> (y, u)`` by ``scaled8_chain.cu``.

    Launches share counters, so those of one instance must be on one stream. All blocks of a launch must run at once. So
    two launches must never run beside each other on a GPU, from two streams or by MPS: each may have half of the
    multiprocessors and wait for the rest, until the kernel stops with an error after some seconds.

    Raises:
        Unavailable: not a Hopper GPU, or no nvcc to build the kernel with.
        RuntimeError: made inside a CUDA graph capture.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._launch = cuda.bind_on_hopper("scaled8_chain", "transect_scaled8_chain", "ppppffiiip", device)
        self._meetings = torch.zeros(COUNTERS, dtype=torch.int32, device=device or "cuda")

    def __call__(
        self,
        attended: Tensor,
        residual: Tensor,
        weights: ChainWeights,
        *,
        dependent_launch: bool = False,
        stages: int = STAGES,
    ) -> tuple[Tensor, Tensor]:
        """y ``[1, N]`` and u ``[1, D]``.

        ``dependent_launch``: the weights may be read before the kernel before this one on the stream has ended.

        Raises:
            ValueError: see ``refusal``; or there is more than one row.
            RuntimeError: the launch failed.
        """
        (d, k), ffn = weights.o.codes.shape, weights.down.codes.shape[1]
        reason = refusal(weights)
        if attended.shape != (1, k) or residual.shape != (1, d):
            reason = reason or f"it takes one row of {k} numbers and one of {d}"
        if attended.dtype != torch.bfloat16 or residual.dtype != torch.bfloat16 or attended.data_ptr() % 16:
            reason = reason or "it computes in bfloat16, and reads 16 bytes at a time"
        if reason:
            raise ValueError(f"scaled8_chain.cu: {reason}")
        stream = [residual.new_empty(1, d) for _ in range(2)]
        scaled = [residual.new_empty(1, d) for _ in range(2)]
        squares = [residual.new_empty(1, d // 16, dtype=torch.float32) for _ in range(2)]
        gated, out = residual.new_empty(1, ffn), residual.new_empty(1, len(weights.qkv.codes))
        tensors = [attended, residual, *weights.norms, weights.bias, *stream, *scaled, gated, out, *squares]
        sizes = [size for matrix in weights.matrices for size in matrix.codes.shape]
        arrays = (
            _addresses([matrix.codes for matrix in weights.matrices]),
            _addresses([matrix.scale for matrix in weights.matrices]),
            (ctypes.c_int * len(sizes))(*sizes),
            _addresses([*tensors, self._meetings]),
        )
        code = self._launch(
            *(ctypes.addressof(array) for array in arrays), *weights.eps, stages, multiprocessors(attended.device),
            2 if dependent_launch else 0, torch.cuda.current_stream(attended.device).cuda_stream,
        )  # fmt: skip
        if code:
            raise RuntimeError(f"scaled8_chain.cu: the launch returned {code}")
        return out, stream[1]


def _addresses(tensors: Sequence[Tensor | None]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(tensors))(*(None if t is None else t.data_ptr() for t in tensors))
