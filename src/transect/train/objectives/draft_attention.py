r"""Attention of a head that drafts, over packed documents and the head's own steps, by fused kernels.

At step S of ``head_loss.py`` query i sees the keys j <= i of its document, with scores s_j, and its own keys of steps 1
to S, with scores r_1 to r_S. A fused kernel gives the result o and L = log sum_j exp(s_j) of the first part. The whole
softmax is then

    M = log(exp(L) + sum_n exp(r_n))        out = exp(L - M) o + sum_n exp(r_n - M) v_n

The fused gradient reads nothing of the forward pass but out and L, for p_j = exp(s_j - L) and D = g . out. With the
whole softmax's out and M in their places it yields the gradients of the first part as they are. The rest is

    p_n = exp(r_n - M)      dr_n = p_n (g . v_n - D)      dv_n = p_n g
    dq += scale dr_n k_n    dk_n = scale dr_n q

Shapes: T tokens, H query heads, K key heads, G = H / K, d head size, S steps.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...ops.attention.packed.tiling import LOG2E
from ...ops.opset import OpSet


class FusedAttention(NamedTuple):
    """A fused attention and its gradient."""

    forward: Callable[..., tuple[Tensor, Tensor]]
    """(q, k, v, cu_seqlens, scale) -> (out, L ``[H, T]``)."""
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    """(g, q, k, v, out, L, cu_seqlens, scale) -> (dq, dk, dv)."""
    unit: float
    """Factor of L over the natural logarithm."""


def by_triton() -> FusedAttention:
    """Return the kernels of GPUs."""
    from ...ops.attention.packed import backward, flash_attention

    return FusedAttention(flash_attention.forward, backward.backward, LOG2E)


def by_cpu() -> FusedAttention:
    """Return the C++ kernels, for float32."""
    from ...ops.cpu.training import kernels

    native = kernels(torch.get_num_threads())
    return FusedAttention(
        lambda q, k, v, bounds, scale: native.attention(q, k, v, bounds, scale, None),
        lambda g, q, k, v, out, lse, *how: native.attention_backward(g, out, lse, q, k, v, how[0], how[1], None),
        1.0,
    )


KERNELS: dict[str, Callable[[], FusedAttention]] = {"triton": by_triton, "cpu": by_cpu}
"""Fused kernels by the implementation of ``attention`` that a model runs."""


class DraftContext:
    """Attention of a head over the documents of a micro-batch, step after step; see ``AttentionContext``.

    Args:
        cu_seqlens: begin of each document, and the end, int32.
        ops: operators of the head.
    """

    wanted = None

    def __init__(self, cu_seqlens: Tensor, ops: OpSet) -> None:
        self._cu_seqlens = cu_seqlens
        self._implementation = dict(ops.chosen).get("attention", "")
        self._steps: list[tuple[Tensor, Tensor]] = []
        """Keys and values ``[T, K, d]`` of each step so far."""

    def positions(self) -> Tensor:
        """Raise an error: heads have no use for it."""
        raise NotImplementedError("the layers of heads do not scale queries by position")

    def attend(
        self, layer: int, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor, scale: float, window: int | None, **how: Any
    ) -> Tensor:
        """Attend to the first step's keys up to the same row, and to the later steps' keys of this row."""
        self._steps.append((k_TKd, v_TKd))
        make = KERNELS.get(self._implementation)
        if make is None or (self._implementation == "cpu" and q_THd.dtype != torch.float32):
            return by_document(q_THd, self._steps, self._cu_seqlens, scale)
        (keys, values), own = self._steps[0], self._steps[1:]
        own_keys, own_values = ([step[at] for step in own] for at in (0, 1))
        out: Tensor = _Fused.apply(make(), self._cu_seqlens, scale, q_THd, keys, values, *own_keys, *own_values)
        return out


def by_document(q_THd: Tensor, steps: list[tuple[Tensor, Tensor]], cu_seqlens: Tensor, scale: float) -> Tensor:
    """Compute the same in torch, document by document, holding all scores of a document."""
    times, attended = q_THd.shape[1] // steps[0][0].shape[1], []
    for begin, end in pairwise(cu_seqlens.tolist()):
        q = q_THd[begin:end]
        (keys, values), *own = [[x[begin:end].repeat_interleave(times, 1) for x in step] for step in steps]
        later = torch.ones(len(q), len(q), dtype=torch.bool, device=q.device).triu(1)
        scores = [torch.einsum("nhd,mhd->hnm", q, keys).masked_fill(later, -torch.inf)]
        scores += [(q * k).sum(-1).T[..., None] for k, _ in own]
        weights = (torch.cat(scores, -1) * scale).softmax(-1, dtype=torch.float32).to(q.dtype)
        out = torch.einsum("hnm,mhd->nhd", weights[..., : len(q)], values)
        for at, (_, v) in enumerate(own, len(q)):
            out = out + weights[..., at].T[..., None] * v
        attended.append(out)
    return torch.cat(attended)


class _Fused(torch.autograd.Function):
    """Arguments: kernels, cu_seqlens, scale, q, the first step's k and v, then the other steps' keys and values."""

    @staticmethod
    def forward(ctx: Any, kernels: FusedAttention, cu_seqlens: Tensor, scale: float, *inputs: Tensor) -> Tensor:
        q_THd, k_TKd, v_TKd, *own = inputs
        out_THd, own_L = kernels.forward(q_THd, k_TKd, v_TKd, cu_seqlens, scale)
        if own:
            q_TKGd = _grouped(q_THd, k_TKd)
            keys_STK1d, values_STK1d = _stacked(own)
            r_STKG = scale * (q_TKGd * keys_STK1d).sum(-1, dtype=torch.float32)
            r_STH = r_STKG.flatten(2)
            l_TH = (own_L / kernels.unit).T.contiguous()
            m_TH = torch.logaddexp(l_TH, r_STH.logsumexp(0))
            p_STKG1 = (r_STH - m_TH).exp().view_as(r_STKG)[..., None]
            first_TH1 = (l_TH - m_TH).exp()[..., None]
            rest_TKGd = (p_STKG1 * values_STK1d).sum(0)
            out_THd = (first_TH1 * out_THd + rest_TKGd.flatten(1, 2)).to(q_THd.dtype).contiguous()
            own_L = (m_TH.T * kernels.unit).contiguous()
        ctx.kernels, ctx.scale = kernels, scale
        ctx.save_for_backward(cu_seqlens, out_THd, own_L, *inputs)
        return out_THd

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_THd: Tensor) -> tuple[Any, ...]:
        cu_seqlens, out_THd, m_HT, q_THd, k_TKd, v_TKd, *own = ctx.saved_tensors
        kernels, scale, g_THd = ctx.kernels, ctx.scale, g_THd.contiguous()
        dq, dk, dv = kernels.backward(g_THd, q_THd, k_TKd, v_TKd, out_THd, m_HT, cu_seqlens, scale)
        if not own:
            return None, None, None, dq, dk, dv
        q_TKGd, g_TKGd, out_TKGd = (_grouped(x, k_TKd) for x in (q_THd, g_THd, out_THd))
        keys_STK1d, values_STK1d = _stacked(own)
        r_STKG = scale * (q_TKGd * keys_STK1d).sum(-1, dtype=torch.float32)
        p_STKG = (r_STKG - (m_HT.T / kernels.unit).view(r_STKG.shape[1:])).exp()
        dots_TKG = (g_TKGd * out_TKGd).sum(-1, dtype=torch.float32)
        dr_STKG1 = (scale * p_STKG * ((g_TKGd * values_STK1d).sum(-1, dtype=torch.float32) - dots_TKG))[..., None]
        dq = (dq + (dr_STKG1 * keys_STK1d).sum(0).flatten(1, 2)).to(q_THd.dtype)
        keys, values = (dr_STKG1 * q_TKGd).sum(3), (p_STKG[..., None] * g_TKGd).sum(3)
        return None, None, None, dq, dk, dv, *keys.to(k_TKd.dtype).unbind(), *values.to(v_TKd.dtype).unbind()


def _grouped(x_THd: Tensor, k_TKd: Tensor) -> Tensor:
    """Return ``x`` as ``[T, K, G, d]``."""
    return x_THd.unflatten(1, (k_TKd.shape[1], -1))


def _stacked(own: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the keys and the values of steps, ``[S, T, K, 1, d]`` each."""
    count = len(own) // 2
    return torch.stack(own[:count]).unsqueeze(3), torch.stack(own[count:]).unsqueeze(3)
