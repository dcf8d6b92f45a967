r"""The layers of a decoder for training on a GPU: one autograd node a layer, with a backward pass written by hand.

With x the residual stream, d what the layer before has still to add to it, and all products merged that share an input:

    s = x + d        n = norm(s)        q, k, v = n Wqkv^T        o = attention(rope(q), rope(k), v)
    t = s + o Wo^T   m = norm(t)        g, u = m Wgu^T            next layer: x = t, d = (silu(g) u) Wdown^T

Backward, from the gradients of t and d, with the same names for gradients and a dash for what is computed again:

    (g, u), h' from d Wdown and g, u      Wdown = d^T h'       m = (g, u) Wgu       Wgu = (g, u)^T m'
    t = t + norm'(m)                      o = t Wo             Wo = t^T o           q, k, v = attention'(o)
    n = (q, k, v) Wqkv                    Wqkv = (q, k, v)^T n'                     x = d = t + norm'(n)

What that spares against a node for each operator: additions (they are part of the norms' kernels, and of the merged
products), the norms' and SwiGLU's results, which are cheap to compute again, and the host's time for a few hundred
nodes. Kept for the backward pass, by plan:

    none: s, q, k, v, o, t, g, u          selective: not g, u (one product more)          full: s alone

The merged weights are one matrix in memory, of which the model's parameters are views: state, optimizer and checkpoints
see what they always saw.

Shapes: T tokens, D model dim, F ffn dim.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..models.context import AttentionContext, VarlenContext
from ..models.decoder import Decoder, Layer, Stack
from ..models.linear import Linear
from ..models.norm import RMSNorm
from ..ops import add_rms_norm, flash_attention, flash_attention_backward, matmul, rms_norm, rotary, swiglu
from .activations import Kept, stack_with

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Step:
    """What all layers of a forward pass share: cos and sin ``[T, d/2]``, where documents begin."""

    cos: Tensor
    sin: Tensor
    cu_seqlens: Tensor


class Product:
    """Matrices with one input as a single one, ``weight [outputs, inputs]``; their parameters become views of it."""

    def __init__(self, matrices: Sequence[Linear]) -> None:
        self.parameters = [matrix.weight for matrix in matrices]
        self.sizes = [weight.shape[0] for weight in self.parameters]
        self.weight = torch.cat([weight.detach() for weight in self.parameters])
        for weight, part in zip(self.parameters, self.weight.split(self.sizes), strict=True):
            weight.data = part
        self.trained = any(weight.requires_grad for weight in self.parameters)

    def __call__(self, x_TI: Tensor) -> Tensor:
        return matmul.matmul(x_TI, self.weight)

    def gradient(self, g_TO: Tensor) -> Tensor:
        """Of the input."""
        return matmul.matmul(g_TO, self.weight.T)

    def gradients(self, g_TO: Tensor, x_TI: Tensor) -> list[Tensor | None]:
        """Of the parameters."""
        if not self.trained:
            return [None] * len(self.parameters)
        return list(matmul.matmul(g_TO.T, x_TI.T).split(self.sizes))


class MergedLayer:
    """One layer of a model. ``keep``: which activations are kept."""

    def __init__(self, layer: Layer, keep: Kept) -> None:
        attention, mlp = layer.attention, layer.mlp
        assert mlp.gate is not None
        self.keep = keep
        self.head_dim, self.scale, self.window = attention.head_dim, attention.scale, attention.window
        self.q_dim, self.kv_dim = attention.q.out_features, attention.k.out_features
        self.ffn_dim = mlp.up.out_features
        self.qkv = Product([attention.q, attention.k, attention.v])
        self.o = Product([attention.o])
        self.gate_up = Product([mlp.gate, mlp.up])
        self.down = Product([mlp.down])
        self.first, self.second = layer.attention_norm, layer.mlp_norm
        self.parameters = [
            self.first.weight, *self.qkv.parameters, *self.o.parameters,
            self.second.weight, *self.gate_up.parameters, *self.down.parameters,
        ]  # fmt: skip

    def _heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v ``[T, heads, d]``, views of the merged projection."""
        q, k, v = qkv.split([self.q_dim, self.kv_dim, self.kv_dim], dim=1)
        return tuple(x.unflatten(-1, (-1, self.head_dim)) for x in (q, k, v))  # type: ignore[return-value]

    def _attend(self, n_TD: Tensor, step: Step) -> tuple[Tensor, Tensor, Tensor]:
        """n ``[T, D]`` -> rotated q, k and v in one matrix, the attended values ``[T, H d]``, the softmax's sums."""
        qkv = self.qkv(n_TD)
        q, k, v = self._heads(qkv)
        rotary.triton_rotary(q, k, step.cos, step.sin, out=(q, k))
        o_THd, sums = flash_attention.forward(q, k, v, step.cu_seqlens, self.scale, True, self.window)
        return qkv, o_THd.flatten(1), sums

    def forward(self, x_TD: Tensor, d_TD: Tensor | None, step: Step) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
        """What is kept, then t and d of the next layer."""
        first, second = self.first, self.second
        if d_TD is None:
            s_TD, n_TD = x_TD, rms_norm.triton_rms_norm(x_TD, first.weight, first.eps)
        else:
            n_TD, s_TD = add_rms_norm.triton_add_rms_norm(d_TD, x_TD, first.weight, first.eps)
        qkv, o, sums = self._attend(n_TD, step)
        m_TD, t_TD = add_rms_norm.triton_add_rms_norm(self.o(o), s_TD, second.weight, second.eps)
        gate_up = self.gate_up(m_TD)
        d_TD = self.down(swiglu.triton_merged(gate_up))
        if self.keep == "full":
            return (s_TD,), t_TD, d_TD
        inner = (gate_up,) if self.keep == "none" else ()
        return (s_TD, qkv, o, sums, t_TD, *inner), t_TD, d_TD

    def _again(self, kept: tuple[Tensor, ...], step: Step) -> tuple[Tensor, ...]:
        """s, q k v, o, sums, t, m, gate and up, from what was kept."""
        s, *rest = kept
        if not rest:
            qkv, o, sums = self._attend(rms_norm.triton_rms_norm(s, self.first.weight, self.first.eps), step)
            m, t = add_rms_norm.triton_add_rms_norm(self.o(o), s, self.second.weight, self.second.eps)
            return s, qkv, o, sums, t, m, self.gate_up(m)
        qkv, o, sums, t, *inner = rest
        m = rms_norm.triton_rms_norm(t, self.second.weight, self.second.eps)
        return s, qkv, o, sums, t, m, inner[0] if inner else self.gate_up(m)

    def backward(
        self, kept: tuple[Tensor, ...], step: Step, dt_TD: Tensor, dd_TD: Tensor
    ) -> tuple[Tensor, list[Tensor | None]]:
        """The gradient of x and d, which is one, and those of ``parameters``."""
        s, qkv, o, sums, t, m, gate_up = self._again(kept, step)
        h = self.down.gradient(dd_TD)
        swiglu.triton_merged_backward(h, gate_up)
        down = self.down.gradients(dd_TD, h)
        del h
        dm = self.gate_up.gradient(gate_up)
        inner = self.gate_up.gradients(gate_up, m)
        del gate_up, m
        dt_TD, second = add_rms_norm.triton_backward(dm, dt_TD, t, self.second.weight, self.second.eps)
        del dm
        do_THd = self.o.gradient(dt_TD).unflatten(-1, (-1, self.head_dim))
        out = self.o.gradients(dt_TD, o)
        q, k, v = self._heads(qkv)
        dq, dk, dv = flash_attention_backward.backward(
            do_THd, q, k, v, o.view(do_THd.shape), sums, step.cu_seqlens, self.scale, True, self.window
        )
        del do_THd
        q, k, v = self._heads(qkv)  # its place is taken by its gradient
        rotary.triton_rotary(dq, dk, step.cos, step.sin, opposite=True, out=(q, k))
        v.copy_(dv)
        del dq, dk, dv
        dn = self.qkv.gradient(qkv)
        n = rms_norm.triton_rms_norm(s, self.first.weight, self.first.eps)
        into = self.qkv.gradients(qkv, n)
        dx, first = add_rms_norm.triton_backward(dn, dt_TD, s, self.first.weight, self.first.eps)
        return dx, [first, *into, *out, second, *inner, *down]


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, layer: MergedLayer, step: Step, x: Tensor, d: Tensor | None, *_: Tensor
    ) -> tuple[Tensor, Tensor]:
        kept, t, d = layer.forward(x, d, step)
        ctx.layer, ctx.step = layer, step
        ctx.save_for_backward(*kept)
        return t, d

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dt: Tensor, dd: Tensor) -> tuple[Any, ...]:
        kept = ctx.saved_tensors
        dx, gradients = ctx.layer.backward(kept, ctx.step, dt.contiguous(), dd.contiguous())
        return None, None, dx, dx if ctx.needs_input_grad[3] else None, *gradients


def refusal(model: Decoder) -> str:
    """Why the layers of a model cannot be merged, in a sentence; empty if they can."""
    for layer in model.layers:
        assert isinstance(layer, Layer)
        matrices = [*layer.attention.children(), *layer.mlp.children()]
        linear = [module for module in matrices if not isinstance(module, RMSNorm)]
        if not isinstance(layer.attention_norm, RMSNorm) or layer.mlp.gate is None or model.rope is None:
            return "the model has other layers than RMSNorm, rotary attention and SwiGLU"
        if layer.attention.q_norm is not None:
            return "its queries and keys are normalised"
        if not all(isinstance(module, Linear) for module in linear):
            return "its matrices are adapted or quantized"
        if any(module.bias is not None for module in linear):
            return "its matrices have biases"
    return ""


class MergedLayers:
    """A ``Decoder.stack`` over ``MergedLayer``, for packed documents; other contexts go through the model's own layers.

    Args:
        model: on its device; ``refusal(model)`` must be empty.
        keep: the activations that are kept.
    """

    def __init__(self, model: Decoder, keep: Kept) -> None:
        self.model = model
        self.layers = [MergedLayer(layer, keep) for layer in model.layers if isinstance(layer, Layer)]

    def __call__(self, x_TD: Tensor, positions_T: Tensor, context: AttentionContext) -> Tensor:
        if not isinstance(context, VarlenContext):
            return self.model.run_layers(x_TD, positions_T, context)
        assert self.model.rope is not None
        step = Step(*self.model.rope.cos_sin(positions_T), context.cu_seqlens)
        d_TD: Tensor | None = None
        for layer in self.layers:
            x_TD, d_TD = _Node.apply(layer, step, x_TD, d_TD, *layer.parameters)
        return x_TD if d_TD is None else x_TD + d_TD


def stack_of(model: Decoder, keep: Kept, merged: bool) -> Stack:
    """The layers of a model under a plan: merged where that is wanted and can be, on a GPU; which is logged."""
    if merged and model.norm.weight.is_cuda:
        reason = refusal(model)
        if not reason:
            return MergedLayers(model, keep)
        log.info("the layers run operator by operator: %s", reason)
    return stack_with(model, keep)
