r"""The layers of a decoder for training on a GPU: one autograd node a layer, with a backward pass written by hand.

x is the residual stream, d what the previous layer has still to add to it. Products that share an input are merged:

    s = x + d        n = norm(s)        q, k, v = n Wqkv^T        o = attention(rope(q), rope(k), v)
    t = s + o Wo^T   m = norm(t)        g, u = m Wgu^T            next layer: x = t, d = (silu(g) u) Wdown^T

Backward, from the gradients of t and d. Gradients have the same names; a dash marks what is computed again:

    (g, u), h' from d Wdown and g, u      Wdown = d^T h'       m = (g, u) Wgu       Wgu = (g, u)^T m'
    t = t + norm'(m)                      o = t Wo             Wo = t^T o           q, k, v = attention'(o)
    n = (q, k, v) Wqkv                    Wqkv = (q, k, v)^T n'                     x = d = t + norm'(n)

Compared with a node for each operator this saves additions (they are part of the norms' kernels and of the merged
products), the results of the norms and of SwiGLU, which are cheap to compute again, and the host's time for a few
hundred nodes. Kept for the backward pass, by plan:

    none: s, n, q, k, v, o, t, m, g, u    selective: s, q, k, v, o, t (one product more)    full: s alone

Where each head of q and k has a norm (Qwen3), q, k, v are kept as the projection made them, and norm and rotation,
which are one kernel (``ops/position/norm_rotary.py``), are computed again. A bias of q, k, v (Qwen2) is added in place;
its gradient is the sum of theirs over tokens.

The products and their gradients are ``merged_products.py``. The merged weights are one matrix in memory, and the
model's parameters are views of it: state, optimizer and checkpoints see what they always saw.

Shapes: T tokens, D model dim, F ffn dim.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ...models.context import AttentionContext, VarlenContext
from ...models.decoder import Decoder, Layer
from ...models.mlp import MLP
from ...ops.activation import swiglu
from ...ops.attention.packed import backward as flash_attention_backward
from ...ops.attention.packed import flash_attention
from ...ops.norm import add_rms_norm, rms_norm
from ...ops.position import norm_rotary, rotary
from ...parallel.ring import RingContext
from .activations import Checkpointing
from .merged_products import MergedProduct, Scratch, product

log = logging.getLogger(__name__)


class Attending(Protocol):
    """Attention of a pass and its gradient, of ``[T, heads, d]`` each; ``sums`` are those of the softmax."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> tuple[Tensor, Tensor]: ...

    def backward(
        self, g: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, sums: Tensor, scale: float, window: int | None
    ) -> tuple[Tensor, Tensor, Tensor]: ...


@dataclass(frozen=True, slots=True)
class PackedDocuments:
    """Attention within each document. cu_seqlens ``[documents + 1]``: first tokens of the documents."""

    cu_seqlens: Tensor

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> tuple[Tensor, Tensor]:
        return flash_attention.forward(q, k, v, self.cu_seqlens, scale, True, window)

    def backward(
        self, g: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, sums: Tensor, scale: float, window: int | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        return flash_attention_backward.backward(g, q, k, v, o, sums, self.cu_seqlens, scale, True, window)


@dataclass(slots=True)
class MergedStep:
    """Inputs shared by all layers of a pass: cos and sin ``[T, d/2]``, and the form of attention.

    ``passed``: matrix that holds the gradient for the next lower layer, with spare columns.
    """

    cos: Tensor
    sin: Tensor
    attention: Attending
    passed: Tensor | None = None

    def room(self, below: MergedProduct, like: Tensor) -> Tensor:
        """Return memory ``[T, D]`` for the gradient of the layer ``below``."""
        self.passed = below.room(like.shape[0], like.shape[1])
        return self.passed[:, : like.shape[1]]

    def with_room(self, g_TD: Tensor, needs: MergedProduct) -> Tensor:
        """Return g with the spare columns that ``needs`` requires: in place if it has them, else copied."""
        if not needs.spare:
            return g_TD.contiguous()
        passed, self.passed = self.passed, None
        if passed is not None and passed.data_ptr() == g_TD.data_ptr() and passed.stride() == g_TD.stride():
            return passed
        g = needs.room(*g_TD.shape)
        g[:, : g_TD.shape[1]].copy_(g_TD)
        return g


@dataclass(slots=True)
class KeptTensors:
    """Tensors that a layer keeps for its backward pass; None for those to be recomputed.

    Names are as above; ``sums`` are the softmax's, ``low`` the kept tensors of the adapters of each product.
    """

    s: Tensor
    n: Tensor | None = None
    qkv: Tensor | None = None
    o: Tensor | None = None
    sums: Tensor | None = None
    t: Tensor | None = None
    m: Tensor | None = None
    gate_up: Tensor | None = None
    low: tuple[Tensor | None, ...] = (None, None, None, None)

    def tensors(self) -> tuple[Tensor | None, ...]:
        return (self.s, self.n, self.qkv, self.o, self.sums, self.t, self.m, self.gate_up, *self.low)

    @classmethod
    def of(cls, tensors: Sequence[Any]) -> KeptTensors:
        made = cls(*tensors[:8])
        made.low = tuple(tensors[8:])
        return made


class Units(Protocol):
    """Layers whose weights are gathered only while they run (``parallel/sharded.py``)."""

    def begin(self, number: int, backward: bool) -> None:
        """Gather layer ``number``, which is about to run, and start gathering the next one."""
        ...

    def end(self, number: int, training: bool) -> None:
        """Release layer ``number`` after its forward pass; ``training``: a backward pass follows."""
        ...

    def whole(self, number: int) -> AbstractContextManager[None]:
        """Gather layer ``number`` inside the context."""
        ...

    def give(self, number: int, gradients: Mapping[nn.Parameter, Tensor | None]) -> None:
        """Take the gradients of layer ``number``, whose backward pass is done."""
        ...


class MergedLayer:
    """One layer of a model.

    ``plan``: the activations to keep; ``units``: gathers the weights of the layer with index ``number``; None if they
    are always whole.
    """

    def __init__(
        self, layer: Layer, plan: Checkpointing, scratch: Scratch, number: int = 0, units: Units | None = None
    ) -> None:
        self.number, self.units = number, units
        attention, mlp = layer.attention, layer.mlp
        assert isinstance(mlp, MLP)
        self.plan = plan
        self.head_dim, self.scale, self.window = attention.head_dim, attention.scale, attention.window
        self.qkv = product(attention.qkv, scratch)
        self.o = product(attention.o, scratch)
        self.gate_up = product(mlp.gate_up, scratch)
        self.down = product(mlp.down, scratch)
        self.first, self.second = layer.attention_norm, layer.mlp_norm
        self.products = (self.qkv, self.o, self.gate_up, self.down)
        self.seams = attention.o.seams()
        self.head_norms: tuple[Any, Any] | None = None
        if attention.q_norm is not None and attention.k_norm is not None:
            self.head_norms = attention.q_norm, attention.k_norm
        self.biases = [matrix.bias for matrix in attention.qkv.matrices if matrix.bias is not None]
        self.parameters = [
            self.first.weight,
            self.second.weight,
            *(each.weight for each in self.head_norms or ()),
            *self.biases,
            *(p for made in self.products for p in made.parameters),
        ]

    def _heads(self, qkv: Tensor) -> list[Tensor]:
        """Split the merged projection into q, k and v ``[T, heads, d]``, as views."""
        parts = qkv[:, : self.qkv.outputs].split(self.qkv.sizes, dim=1)
        return [part.unflatten(-1, (-1, self.head_dim)) for part in parts]

    def _attend(self, n: Tensor, step: MergedStep) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Compute from n: q, k and v in one matrix (rotated, unless they have norms), the attended values ``[T, H d]``,
        the softmax's sums, ``low``."""
        qkv, low = self.qkv.forward(n)
        if self.biases:
            qkv[:, : self.qkv.outputs] += torch.cat([bias.detach() for bias in self.biases])
        if self.head_norms is None:
            q, k, _ = self._heads(qkv)
            rotary.triton_rotary(q, k, step.cos, step.sin, out=(q, k))
        q, k, v = self._turned(qkv, step)
        o_THd, sums = step.attention.forward(q, k, v, self.scale, self.window)
        return qkv, o_THd.flatten(1), sums, low

    def _turned(self, qkv: Tensor, step: MergedStep) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v as used by attention, from the kept tensors."""
        q, k, v = self._heads(qkv)
        if self.head_norms is None:
            return q, k, v
        first, second = self.head_norms
        turned = norm_rotary.triton_norm_rotary(q, k, first.weight, second.weight, first.eps, step.cos, step.sin)
        return *turned, v

    def _turn_back(self, dq: Tensor, dk: Tensor, qkv: Tensor, step: MergedStep) -> list[Tensor | None]:
        """Replace the gradients of q and k in place by those before norm and rotation; returns those of the norms'
        weights."""
        q, k, _ = self._heads(qkv)
        if self.head_norms is None:
            rotary.triton_rotary(dq, dk, step.cos, step.sin, opposite=True, out=(q, k))
            return []
        first, second = self.head_norms
        *_, of_q, of_k = norm_rotary.triton_backward(
            dq, dk, q, k, first.weight, second.weight, first.eps, step.cos, step.sin, out=(q, k)
        )
        return [of_q if first.weight.requires_grad else None, of_k if second.weight.requires_grad else None]

    def _normed(
        self, norm: Any, into: MergedProduct, x_TD: Tensor, d_TD: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Compute the norm of x + d, with spare columns for the following product, and x + d."""
        n = into.room(x_TD.shape[0], into.inputs)
        place = n[:, : into.inputs]
        if d_TD is None:
            rms_norm.triton_rms_norm(x_TD, norm.weight, norm.eps, out=place)
            return n, x_TD
        out = place, torch.empty_like(x_TD, memory_format=torch.contiguous_format)
        add_rms_norm.triton_add_rms_norm(d_TD, x_TD, norm.weight, norm.eps, out=out)
        return n, out[1]

    def _project(self, o_TO: Tensor) -> tuple[Tensor, Tensor | None]:
        """Multiply the attended values by their projection."""
        if self.o.spare:
            x = self.o.room(o_TO.shape[0], self.o.inputs)
            x[:, : self.o.inputs].copy_(o_TO)
            o_TO = x
        d, low = self.o.forward(o_TO)
        return self._leave(d[:, : self.o.outputs]), low

    def _enter(self, n: Tensor) -> Tensor:
        return n if self.seams is None else self.seams.enter(n)

    def _leave(self, d: Tensor) -> Tensor:
        return d if self.seams is None else self.seams.leave(d)

    def _leave_back(self, g: Tensor) -> Tensor:
        return g if self.seams is None else self.seams.leave_back(g)

    def _enter_back(self, g: Tensor) -> Tensor:
        return g if self.seams is None else self.seams.enter_back(g)

    def forward(self, x_TD: Tensor, d_TD: Tensor | None, step: MergedStep) -> tuple[KeptTensors, Tensor, Tensor]:
        """Return the kept tensors, then t and d of the next layer."""
        n, s = self._normed(self.first, self.qkv, x_TD, d_TD)
        n = self._enter(n)
        qkv, o, sums, low_qkv = self._attend(n, step)
        d, low_o = self._project(o)
        m, t = self._normed(self.second, self.gate_up, s, d)
        del d
        m = self._enter(m)
        gate_up, low_gate_up = self.gate_up.forward(m)
        h = self.down.room(m.shape[0], self.down.inputs)
        swiglu.triton_merged(gate_up[:, : self.gate_up.outputs], out=h[:, : self.down.inputs])
        out, low_down = self.down.forward(h)
        if self.plan == "full":
            kept = KeptTensors(s, low=(None, None, None, low_down))
        elif self.plan == "selective":
            kept = KeptTensors(s, None, qkv, o, sums, t, low=(low_qkv, low_o, None, low_down))
        else:
            kept = KeptTensors(s, n, qkv, o, sums, t, m, gate_up, (low_qkv, low_o, low_gate_up, low_down))
        return kept, t, self._leave(out[:, : self.down.outputs])

    def _complete(self, kept: KeptTensors, step: MergedStep) -> None:
        """Recompute the tensors that were not kept."""
        low = list(kept.low)
        if kept.n is None:
            kept.n = self._enter(self._normed(self.first, self.qkv, kept.s)[0])
        if kept.qkv is None:
            kept.qkv, kept.o, kept.sums, low[0] = self._attend(kept.n, step)
            d, low[1] = self._project(kept.o)
            m, kept.t = self._normed(self.second, self.gate_up, kept.s, d)
            kept.m = self._enter(m)
        assert kept.t is not None
        if kept.m is None:
            kept.m = self._enter(self._normed(self.second, self.gate_up, kept.t)[0])
        if kept.gate_up is None:
            kept.gate_up, low[2] = self.gate_up.forward(kept.m)
        kept.low = tuple(low)

    def backward(
        self, kept: KeptTensors, step: MergedStep, dt_TD: Tensor, dd_TD: Tensor, need_x: bool
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """Return the gradient of x and d, which is the same, and those of ``parameters``."""
        self._complete(kept, step)
        s, n, qkv, o, sums, t, m, gate_up = kept.s, *kept.tensors()[1:8]
        assert n is not None and qkv is not None and o is not None and sums is not None
        assert t is not None and m is not None and gate_up is not None
        kept.m = kept.gate_up = None
        g = self._leave_back(step.with_room(dd_TD, self.down))
        self.down.prepare(g)
        h = self.down.gradient(g)
        swiglu.triton_merged_backward(h, gate_up[:, : self.gate_up.outputs])
        down = self.down.gradients(g, h, kept.low[3])
        del g, h
        self.gate_up.prepare(gate_up)
        dm = self._enter_back(self.gate_up.gradient(gate_up))
        inner = self.gate_up.gradients(gate_up, m[:, : self.gate_up.inputs], kept.low[2])
        del gate_up, m
        g = self.o.room(t.shape[0], self.o.outputs)
        dt_TD, second = self._through(self.second, dm, dt_TD, t, g[:, : self.o.outputs])
        del dm
        g = self._leave_back(g)
        self.o.prepare(g)
        do_THd = self.o.gradient(g).unflatten(-1, (-1, self.head_dim))
        out = self.o.gradients(g, o, kept.low[1])
        q, k, v = self._turned(qkv, step)
        dq, dk, dv = step.attention.backward(do_THd, q, k, v, o.view(do_THd.shape), sums, self.scale, self.window)
        del do_THd, o, q, k
        v.copy_(dv)  # over q, k and v: their gradient
        heads = self._turn_back(dq, dk, qkv, step)
        del dq, dk, dv, v
        if self.biases:
            sums = qkv[:, : self.qkv.outputs].sum(0).split(self.qkv.sizes)
            heads += [each if bias.requires_grad else None for each, bias in zip(sums, self.biases, strict=True)]
        self.qkv.prepare(qkv)
        into = self.qkv.gradients(qkv, n[:, : self.qkv.inputs], kept.low[0])
        if not need_x:
            return None, [None, second, *heads, *into, *out, *inner, *down]
        dn = self._enter_back(self.qkv.gradient(qkv))
        dx, first = self._through(self.first, dn, dt_TD, s, step.room(self.down, s))
        return dx, [first, second, *heads, *into, *out, *inner, *down]

    def _through(
        self, norm: Any, dn_TD: Tensor, dt_TD: Tensor, t_TD: Tensor, place: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the gradient of a norm's input, with that of the residual stream added, into ``place``; also return
        its weight's."""
        dt_TD, weight = add_rms_norm.triton_backward(dn_TD, dt_TD, t_TD, norm.weight, norm.eps, out=place)
        return dt_TD, weight if norm.weight.requires_grad else None


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, layer: MergedLayer, step: MergedStep, x: Tensor, d: Tensor | None, *_: Tensor
    ) -> tuple[Tensor, Tensor]:
        units = layer.units
        if units is not None:
            units.begin(layer.number, False)
        kept, t, out = layer.forward(x, d, step)
        if units is not None:
            units.end(layer.number, ctx.needs_input_grad[2])
        ctx.layer, ctx.step = layer, step
        ctx.save_for_backward(*kept.tensors())
        return t, out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dt: Tensor, dd: Tensor) -> tuple[Any, ...]:
        kept = KeptTensors.of(ctx.saved_tensors)
        need_x, need_d = ctx.needs_input_grad[2:4]
        layer, units = ctx.layer, ctx.layer.units
        if units is not None:
            units.begin(layer.number, True)
        dx, gradients = layer.backward(kept, ctx.step, dt, dd, need_x)
        if units is not None:
            units.give(layer.number, dict(zip(layer.parameters, gradients, strict=True)))
            gradients = []
        return None, None, dx, dx if need_d else None, *gradients


def attending(context: AttentionContext) -> Attending | None:
    """Return the form of attention in a context; None if merged layers do not support it."""
    if isinstance(context, RingContext):
        return context.kernels
    return PackedDocuments(context.cu_seqlens) if isinstance(context, VarlenContext) else None


class MergedLayers:
    """A ``Decoder.stack`` over ``MergedLayer``, for packed documents; other contexts go through the model's own layers.

    Args:
        model: on its device; ``refusal(model.config)`` must be None.
        plan: the activations to keep.
        whole: number of last layers that keep everything whatever the plan.
        units: gathers weights of layers, and takes their gradients; None if weights are always whole.
    """

    def __init__(self, model: Decoder, plan: Checkpointing, whole: int = 0, units: Units | None = None) -> None:
        self.model, self.units = model, units
        self._otherwise = model.stack if units is not None else model.run_layers
        scratch = Scratch()
        layers = [layer for layer in model.layers if isinstance(layer, Layer)]
        plans: list[Checkpointing] = [*[plan] * (len(layers) - whole), *["none"] * whole]  # type: ignore[list-item]
        self.layers: list[MergedLayer] = []
        for number, (layer, own) in enumerate(zip(layers, plans, strict=True)):
            with nullcontext() if units is None else units.whole(number):
                self.layers.append(MergedLayer(layer, own, scratch, number, units))

    def __call__(self, x_TD: Tensor, positions_T: Tensor, context: AttentionContext) -> Tensor:
        attention = attending(context)
        if attention is None:
            return self._otherwise(x_TD, positions_T, context)
        assert self.model.rope is not None
        step = MergedStep(*self.model.rope.cos_sin(positions_T), attention)
        d_TD: Tensor | None = None
        for layer in self.layers:
            for made in layer.products:
                made.refresh()
            parameters = layer.parameters if self.units is None else ()
            x_TD, d_TD = _Node.apply(layer, step, x_TD, d_TD, *parameters)
        return x_TD if d_TD is None else x_TD + d_TD
