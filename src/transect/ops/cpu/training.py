"""The kernels of ``products.h`` and ``training.h`` as Python functions on float32 tensors.

Inputs are checked here; the C++ side trusts what it gets. What an autograd function must keep is returned to it. The
operators' files and ``train/`` put the gradients together.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from ctypes import Structure, byref, c_float, c_int, c_int64, c_uint32, c_uint64, c_void_p
from typing import Any

import torch
from torch import Tensor

from .library import Library, load


class _Product(Structure):
    _fields_ = (
        ("a", c_void_p),
        ("b", c_void_p),
        *((name, c_int64) for name in ("a_row", "a_k", "b_k", "b_n", "k")),
        ("scale", c_float),
    )


class _Attention(Structure):
    _fields_ = (
        *((name, c_int64) for name in ("tokens", "heads", "kv_heads", "size", "documents", "window")),
        *((name, c_int64) for name in ("q_stride", "k_stride", "v_stride")),
        *((name, c_void_p) for name in ("bounds", "q", "k", "v")),
        ("scale", c_float),
    )


class Kernels:
    """The training kernels on the team of threads of ``library``."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self._c, self._pool = library._c, library._pool
        p, n, f = c_void_p, c_int64, c_float
        signatures: dict[str, list[Any]] = {
            "products": [p, p, c_int, n, n, p, c_int],
            "swiglu": [p, n, p, p, p],
            "swiglu_backward": [p, n, p, p, p, p, p],
            "rms_norm": [p, n, n, p, p, f, p, p],
            "rms_norm_backward": [p, n, n, p, p, p, p, p],
            "rotate": [p, n, n, n, p, n, p, p, f, p],
            "cross_entropy": [p, n, n, p, p, f, p],
            "round_by_chance": [p, n, p, p, n, c_uint64, c_uint32, c_uint32, c_int],
            "attention_forward": [p, p, p, p],
            "attention_backward": [p, p, p, p, p, p, p, p],
        }
        for name, arguments in signatures.items():
            function = getattr(self._c, "transect_" + name)
            function.restype, function.argtypes = None, arguments

    def products(self, terms: Sequence[tuple[Tensor, Tensor, float]], out: Tensor | None = None) -> Tensor:
        """Return the sum of ``scale * a @ b`` over terms (a ``[T, k]``, b ``[k, N]``, scale) -> ``[T, N]``.

        Any strides: a transposed view costs no copy. ``out``, contiguous, is added to in place.

        Raises:
            ValueError: not float32 matrices, or shapes that do not fit.
        """
        rows, columns = terms[0][0].shape[0], terms[0][1].shape[1]
        for a, b, _ in terms:
            if a.dtype != torch.float32 or b.dtype != torch.float32:
                raise ValueError(f"the products of the C++ kernels are in float32, not {a.dtype} and {b.dtype}")
            if a.shape[0] != rows or b.shape[1] != columns or a.shape[1] != b.shape[0]:
                raise ValueError(
                    f"a product of {list(a.shape)} and {list(b.shape)} does not give [{rows}, {columns}] as the first "
                    "one does"
                )
        add = out is not None
        if out is None:
            out = torch.empty(rows, columns, dtype=torch.float32)
        if not out.is_contiguous() or out.shape != (rows, columns) or out.dtype != torch.float32:
            raise ValueError(f"out must be contiguous float32 [{rows}, {columns}]")
        if out.numel():
            structs = (_Product * len(terms))(
                *(
                    _Product(a.data_ptr(), b.data_ptr(), *a.stride(), *b.stride(), a.shape[1], scale)
                    for a, b, scale in terms
                )
            )
            self._c.transect_products(self._pool, structs, len(terms), rows, columns, out.data_ptr(), int(add))
        return out

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """Compute ``silu(gate) * up``; both contiguous and of one shape."""
        _check(gate, up)
        y = torch.empty_like(gate)
        self._c.transect_swiglu(self._pool, gate.numel(), gate.data_ptr(), up.data_ptr(), y.data_ptr())
        return y

    def swiglu_backward(self, grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        """Compute (dL/dgate, dL/dup)."""
        _check(grad, gate, up)
        dgate, dup = torch.empty_like(gate), torch.empty_like(up)
        pointers = (t.data_ptr() for t in (grad, gate, up, dgate, dup))
        self._c.transect_swiglu_backward(self._pool, gate.numel(), *pointers)
        return dgate, dup

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return (norm of x ``[..., D]``, the reciprocal of each row's root mean square ``[rows]``)."""
        _check(x)
        weight = _vector(weight, x)
        width = x.shape[-1]
        y, r = torch.empty_like(x), torch.empty(x.numel() // max(width, 1), dtype=torch.float32)
        pointers = (x.data_ptr(), weight.data_ptr(), eps, y.data_ptr(), r.data_ptr())
        self._c.transect_rms_norm(self._pool, r.numel(), width, *pointers)
        return y, r

    def rms_norm_backward(self, grad: Tensor, x: Tensor, weight: Tensor, r: Tensor) -> Tensor:
        """Compute dL/dx, with ``r`` from ``rms_norm``."""
        _check(grad, x)
        weight = _vector(weight, x)
        dx = torch.empty_like(x)
        pointers = (t.data_ptr() for t in (grad, x, weight, r, dx))
        self._c.transect_rms_norm_backward(self._pool, r.numel(), x.shape[-1], *pointers)
        return dx

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
        """Rotate x ``[T, heads, d]`` by the angles of its tokens (``sign`` -1: by the opposite angles); cos, sin ``[T,
        d/2]``."""
        tokens, heads, size = x.shape
        if x.stride(2) != 1 or (heads > 1 and x.stride(1) != size):
            x = x.contiguous()
        cos, sin = cos.contiguous(), sin.contiguous()
        y = torch.empty(x.shape, dtype=torch.float32)
        self._c.transect_rotate(
            self._pool, tokens, heads, size // 2, x.data_ptr(), x.stride(0), cos.data_ptr(), sin.data_ptr(), sign,
            y.data_ptr(),
        )  # fmt: skip
        return y

    def round_by_chance(
        self, x: Tensor, out: Tensor, first: int, seed: int, step: int, tensor: int, shift: int
    ) -> None:
        """Round ``x`` stochastically to bfloat16 ``out``; see ``ops/optim/rounding.py``. Both contiguous; ``first`` is
        a multiple of 4."""
        _check(x)
        if out.dtype != torch.bfloat16 or out.numel() != x.numel() or not out.is_contiguous() or first % 4:
            raise ValueError("round_by_chance needs a contiguous bfloat16 of the same size, from a multiple of 4 on")
        self._c.transect_round_by_chance(
            self._pool, x.numel(), x.data_ptr(), out.data_ptr(), first, seed % 2**64, step % 2**32, tensor, shift
        )

    def cross_entropy(self, logits: Tensor, labels: Tensor, scale: float) -> Tensor:
        """Return each row's loss ``[rows]``, and replace ``logits [rows, V]`` by ``scale`` times their gradient, in
        place.

        ``labels`` int64, each in 0..V-1 (not checked here).
        """
        _check(logits)
        labels = labels.contiguous()
        loss = torch.empty(logits.shape[0], dtype=torch.float32)
        pointers = (logits.data_ptr(), labels.data_ptr(), scale, loss.data_ptr())
        self._c.transect_cross_entropy(self._pool, *logits.shape, *pointers)
        return loss

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float, window: int | None
    ) -> tuple[Tensor, Tensor]:
        """Return (result ``[T, H, d]``, log of each query's softmax sum ``[H, T]``), as in ``ops/attention``.

        Raises:
            ValueError: documents that do not end where the tokens do, or a window below 1.
        """
        q, k, v = _heads_together(q), _heads_together(k), _heads_together(v)
        bounds = cu_seqlens.contiguous()
        out = torch.empty(q.shape, dtype=torch.float32)
        lse = torch.empty(q.shape[1], q.shape[0], dtype=torch.float32)
        call = _attention(q, k, v, bounds, scale, window)
        self._c.transect_attention_forward(self._pool, byref(call), out.data_ptr(), lse.data_ptr())
        return out, lse

    def attention_backward(
        self,
        grad: Tensor,
        out: Tensor,
        lse: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens: Tensor,
        scale: float,
        window: int | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute (dL/dq, dL/dk, dL/dv), with ``out`` and ``lse`` from ``attention``."""
        q, k, v, grad = _heads_together(q), _heads_together(k), _heads_together(v), grad.contiguous()
        bounds = cu_seqlens.contiguous()
        made = [torch.empty(q.shape, dtype=torch.float32) for _ in range(3)]
        call = _attention(q, k, v, bounds, scale, window)
        pointers = (t.data_ptr() for t in (grad, out, lse, *made))
        self._c.transect_attention_backward(self._pool, byref(call), *pointers)
        dq, dk, dv = made
        if q.shape[1] != k.shape[1]:
            dk, dv = (x.view(x.shape[0], k.shape[1], -1, x.shape[2]).sum(2) for x in (dk, dv))
        return dq, dk, dv


def _heads_together(x: Tensor) -> Tensor:
    """Return ``x [T, heads, d]``, copied unless the heads of a token are contiguous."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def _attention(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, scale: float, window: int | None) -> _Attention:
    tokens, heads, size = q.shape
    if (
        bounds.dtype != torch.int32
        or int(bounds[0]) != 0
        or int(bounds[-1]) != tokens
        or bool((bounds.diff() < 0).any())
    ):
        raise ValueError(f"cu_seqlens must be int32, rise from 0 and end at the number of tokens, {tokens}")
    if window is not None and window < 1:
        raise ValueError(f"a window must hold at least the token itself, not {window}")
    if k.shape != v.shape or k.shape[0] != tokens or heads % k.shape[1]:
        raise ValueError(f"q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)} do not fit each other")
    sizes = (tokens, heads, k.shape[1], size, len(bounds) - 1, window or 0, q.stride(0), k.stride(0), v.stride(0))
    return _Attention(*sizes, *(t.data_ptr() for t in (bounds, q, k, v)), scale)


def _vector(weight: Tensor, x: Tensor) -> Tensor:
    """Return a norm's weight as the C++ side reads it; the caller keeps it alive for as long as that takes."""
    if weight.dtype != torch.float32 or weight.shape != x.shape[-1:]:
        raise ValueError(f"the weight of a norm over {x.shape[-1]} elements must be as many float32")
    return weight.contiguous()


def _check(*tensors: Tensor) -> None:
    for tensor in tensors:
        if tensor.dtype != torch.float32 or not tensor.is_contiguous() or tensor.shape != tensors[0].shape:
            raise ValueError("the C++ kernels take contiguous float32 tensors of one shape")


@functools.lru_cache(maxsize=8)
def kernels(threads: int) -> Kernels:
    """Return the kernels with a team of ``threads``, loaded once for each size.

    Raises:
        Unavailable: they cannot be built here.
    """
    return Kernels(load(threads))
