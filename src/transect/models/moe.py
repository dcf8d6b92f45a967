"""``MoE``: a mixture of experts as the feed-forward half of a layer.

The router scores experts in float32, the step's rows are sorted by expert, each expert multiplies its rows, and a
token's results are added up with the router's weights (``ops/moe/``). No shape depends on where tokens go, so a CUDA
graph can capture it.

Shapes: T tokens, k experts of each, R = T k rows, D model dim, F width of an expert, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from ..ops.moe.gating import sigmoid
from ..ops.opset import OpSet
from ..spec.model import ModelConfig
from ..spec.moe import MoEConfig
from .weights.dense import Dense
from .weights.projection import Half, Projection
from .weights.weight import Kinds, Weight

Watch = Callable[[Tensor, Tensor], object]


class Exchanged(Protocol):
    """Tokens in transit to the ranks that have their experts (``parallel/exchange.py``)."""

    def send(self, x_TD: Tensor) -> Tensor:
        """Send rows of this rank's tokens to their experts' ranks; return the rows for the experts here."""
        ...

    def bring_back(self, y_SD: Tensor) -> Tensor:
        """Send outputs of this rank's experts to their tokens' ranks, and return the outputs for this rank's tokens."""
        ...


class ExpertShards(Protocol):
    """Ranks that share the experts of a layer (``parallel/experts.py``)."""

    @property
    def exchanges(self) -> bool:
        """True if tokens go only to the ranks of their experts; False if all ranks gather all tokens."""
        ...

    def exchange(self, experts_Tk: Tensor) -> Exchanged:
        """Plan the exchange of this rank's tokens with these experts."""
        ...

    @property
    def first(self) -> int:
        """Index of the first expert on this rank."""
        ...

    def gather(self, x_TD: Tensor) -> Tensor:
        """Return the tokens that this rank's experts compute: its own tokens, or the tokens of all ranks."""
        ...

    def own(self, x: Tensor, tokens: int) -> Tensor:
        """Return the rows of this rank's own ``tokens``, out of rows for all tokens of ``gather``."""
        ...

    def scatter(self, y: Tensor, tokens: int) -> Tensor:
        """Sum the outputs ``y`` of gathered tokens over ranks, and return the rows of this rank's ``tokens`` tokens."""
        ...

    def sum(self, y_TD: Tensor) -> Tensor:
        """Return the sum over ranks that have the same tokens."""
        ...


SLOPE = 1.702
"""The factor inside the sigmoid of the clamped SwiGLU."""


class ExpertRouter(nn.Module):
    """``x [T, D] -> logits [T, E]`` in float32, whatever the model computes in. ``score_bias`` is not part of them."""

    bias: nn.Parameter | None
    score_bias: Tensor | None

    def __init__(
        self,
        moe: MoEConfig,
        dim: int,
        ops: OpSet,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.ops = ops
        self.weight = nn.Parameter(torch.empty(moe.experts, dim, device=device, dtype=dtype))
        bias = torch.empty(moe.experts, device=device, dtype=dtype) if moe.router_bias else None
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias))
        wide = torch.zeros(moe.experts, device=device, dtype=torch.float32) if moe.score_bias else None
        self.register_buffer("score_bias", wide)

    def forward(self, x_TD: Tensor) -> Tensor:
        logits_TE: Tensor = self.ops.expert_router(x_TD, self.weight, self.bias)
        return logits_TE


class SharedRouter(nn.Module):
    """Gate of the shared experts: ``x [T, D] -> [T, 1]``."""

    def __init__(
        self, dim: int, ops: OpSet, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.ops = ops
        self.weight = nn.Parameter(torch.empty(1, dim, device=device, dtype=dtype))

    def forward(self, x_TD: Tensor) -> Tensor:
        out_T1: Tensor = self.ops.linear(x_TD, self.weight)
        return sigmoid(out_T1)


class MoE(Half):
    """Mixture of experts, ``[T, D] -> [T, D]``.

    The matrices of all experts are concatenated along rows in one ``Weight`` each: ``experts_gate``, ``experts_up``
    ``[E F, D]`` and ``experts_down`` ``[E D, F]``.

    ``watch``, if set, is called with the router's logits ``[T, E]`` and the experts ``[T, k]`` of each call, for losses
    that balance experts (``train/objectives/balance.py``).

    ``spread`` is set if other ranks have the rest of the experts (``MoEConfig.ranks``), or of each of them.
    """

    def __init__(
        self,
        config: ModelConfig,
        moe: MoEConfig,
        ops: OpSet,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        kinds: Kinds | None = None,
    ) -> None:
        super().__init__()
        self.moe, self.ops = moe, ops
        self.watch: Watch | None = None
        self.spread: ExpertShards | None = None
        route = partial(ops.expert_routing, k=moe.per_token, held=moe.held, score=moe.score)
        more = {"renormalize": moe.renormalize, "groups": moe.groups, "groups_kept": moe.groups_kept}
        self._route = partial(route, scale=moe.scale, **more)

        def matrix(name: str, inputs: int, outputs: int, bias: bool) -> Weight:
            kind = Dense if kinds is None else kinds(f"mlp.{name}")
            return kind(outputs, inputs, bias, ops=ops, device=device, dtype=dtype)

        n, dim, width = moe.held, config.dim, moe.expert_dim
        self.router = ExpertRouter(moe, dim, ops, device=device, dtype=dtype)
        self.experts_gate = matrix("experts_gate", dim, n * width, moe.bias)
        self.experts_up = matrix("experts_up", dim, n * width, moe.bias)
        self.experts_down = matrix("experts_down", width, n * dim, moe.bias)
        self.shared_gate_up: Projection | None = None
        self.shared_router: SharedRouter | None = None
        if moe.shared_dim:
            self.shared_gate = matrix("shared_gate", dim, moe.shared_dim, False)
            self.shared_up = matrix("shared_up", dim, moe.shared_dim, False)
            self.shared_gate_up = Projection(shared_gate=self.shared_gate, shared_up=self.shared_up)
            self.shared_down = matrix("shared_down", moe.shared_dim, dim, False)
        if moe.shared_gate:
            self.shared_router = SharedRouter(dim, ops, device=device, dtype=dtype)

    def forward(self, x_TD: Tensor) -> Tensor:
        spread = self.spread
        tokens = len(x_TD)
        if spread is None:
            out_TD = self._routed(x_TD, tokens)
        elif spread.exchanges:
            out_TD = self._exchanged(x_TD, spread)
        else:
            out_TD = spread.scatter(self._routed(spread.gather(x_TD), tokens), tokens)
        if not len(x_TD):  # this rank has taken part in a step of others
            return out_TD
        if self.shared_gate_up is not None:
            out_TD = out_TD + self._shared(x_TD, self.shared_gate_up)
        return out_TD if spread is None else spread.sum(out_TD)

    def _exchanged(self, x_TD: Tensor, spread: ExpertShards) -> Tensor:
        """Compute the output for this rank's own tokens, each of which is sent to the ranks that have its experts.
        Scores are sent along, so that all ranks choose alike."""
        logits_TE = self.router(x_TD)
        _, experts_Tk, *_ = self._route(logits_TE.detach(), self.router.score_bias)
        if self.watch is not None:
            self.watch(logits_TE, experts_Tk)
        exchange = spread.exchange(experts_Tk)
        sent = self._route(exchange.send(logits_TE), self.router.score_bias, first=spread.first)
        return exchange.bring_back(self._computed(exchange.send(x_TD), sent))

    def _routed(self, x_TD: Tensor, tokens: int) -> Tensor:
        """Compute the output of this rank's experts; the first ``tokens`` rows are this rank's own tokens."""
        logits_TE = self.router(x_TD)
        first = 0 if self.spread is None else self.spread.first
        routed = self._route(logits_TE, self.router.score_bias, first=first)
        if self.watch is not None:
            spread = self.spread
            own = (logits_TE, routed[1])
            self.watch(*(own if spread is None else (spread.own(each, tokens) for each in own)))
        return self._computed(x_TD, routed)

    def _computed(self, x_TD: Tensor, routed: tuple[Tensor, ...]) -> Tensor:
        """Compute the output of this rank's experts for tokens routed by ``_route``."""
        weights_Tk, _, order_R, places_R, starts_E1 = routed
        sorted_by: Tensor | None = order_R
        if self.moe.weighs_inputs:
            # A pass that launches none of our kernels (gpu/warm_kernels.py) finds anything in their results.
            pairs = order_R.long().clamp(0, max(0, weights_Tk.numel() - 1))
            x_TD = (x_TD[pairs // self.moe.per_token] * weights_Tk.flatten()[pairs, None]).to(x_TD.dtype)
            weights_Tk, sorted_by = (weights_Tk != 0).to(weights_Tk.dtype), None  # rows of no expert are undefined
        y_RD = self.experts_down.grouped(self._inner(x_TD, starts_E1, sorted_by), starts_E1)
        out_TD: Tensor = self.ops.expert_combine(y_RD, places_R, weights_Tk)
        return out_TD

    def _inner(self, x_TD: Tensor, starts_E1: Tensor, order_R: Tensor | None) -> Tensor:
        """Compute the hidden values of the experts, ``[R, F]``."""
        gated = self.experts_gate.grouped_gate_up(self.experts_up) if self.moe.clamp is None else None
        if gated is not None:
            return gated(x_TD, starts_E1, order_R)
        gate_RF = self.experts_gate.grouped(x_TD, starts_E1, order_R)
        return self._activated(gate_RF, self.experts_up.grouped(x_TD, starts_E1, order_R))

    def _activated(self, gate_RF: Tensor, up_RF: Tensor) -> Tensor:
        clamp = self.moe.clamp
        if clamp is None:
            out: Tensor = self.ops.swiglu(gate_RF, up_RF)
            return out
        gate_RF, up_RF = gate_RF.clamp(max=clamp), up_RF.clamp(-clamp, clamp)
        return (up_RF + 1) * gate_RF * torch.sigmoid(SLOPE * gate_RF)

    def _shared(self, x_TD: Tensor, gate_up: Projection) -> Tensor:
        out_TD = self.shared_down(self.ops.swiglu(*gate_up.apart(x_TD)))
        return out_TD if self.shared_router is None else self.shared_router(x_TD) * out_TD

    def projections(self) -> dict[str, Weight]:
        """Return the weights, under the names of ``shapes.EXPERT_PROJECTIONS`` (experts' gate and up apart)."""
        found: dict[str, Weight] = {
            "experts_gate": self.experts_gate,
            "experts_up": self.experts_up,
            "experts_down": self.experts_down,
        }
        if self.shared_gate_up is not None:
            found |= {"shared_gate_up": self.shared_gate_up, "shared_down": self.shared_down}
        return found
