r"""Routing: from the router's logits to the sorted rows of a step. It is ``gating.py`` and then ``ordering.py``; in a
step of few tokens one launch does both.

Where other ranks have some of the experts, those here are the ``held`` from ``first`` on, numbered from 0. Pairs that
go elsewhere have the weight 0 and come after all others, where no expert is.

Shapes: logits ``[T, E]``, bias ``[E]`` float32 or None; weights ``[T, k]`` float32, experts ``[T, k]`` int32 (numbers
among all E), order and places ``[T k]``, starts ``[held + 1]`` int32.
Source: that of its two parts.

Bound by the launch: some kilobytes are read and written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...costs.work import Cost
from ..lang.jit import in_triton, kernel, next_power_of_2, require, rows_of, tl
from ..numerics import sample
from ..registry import Kernel, Op, in_torch, register
from . import gating, ordering

MOST = 1024
"""Tokens times experts, both rounded up to powers of two, that one program is given. On an H200, with 128 experts, one
token takes 5.3 us so and 9.5 us in four launches; 16 tokens take 12 and 10, 64 tokens 46 and 10."""

Routed = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def reference(
    logits: Tensor, bias: Tensor | None, k: int, first: int = 0, held: int | None = None, **how: Any
) -> Routed:
    """Route logits ``[T, E]`` -> (weights, experts, order, places, starts); ``how``: the further arguments of
    gating."""
    return _in_two(gating.reference, ordering.reference, logits, bias, k, first, held, how)


def differentiable(
    logits: Tensor, bias: Tensor | None, k: int, first: int = 0, held: int | None = None, **how: Any
) -> Routed:
    """Route tokens with a gradient for the weights, for training."""
    return _in_two(gating.expert_gating, ordering.expert_order, logits, bias, k, first, held, how)


def _in_two(
    gate: Callable[..., tuple[Tensor, Tensor]],
    sort: Callable[[Tensor, int], tuple[Tensor, Tensor, Tensor]],
    logits: Tensor,
    bias: Tensor | None,
    k: int,
    first: int,
    held: int | None,
    how: Mapping[str, Any],
) -> Routed:
    weights, experts = gate(logits, bias, k, **how)
    total = logits.shape[1]
    if held is None or held == total:
        return weights, experts, *sort(experts, total)
    own = experts - first
    here = (own >= 0) & (own < held)
    order, places, starts = sort(torch.where(here, own, held + experts), held + total)
    return torch.where(here, weights, 0.0), experts, order, places, starts[: held + 1]


@kernel
def _route(  # type: ignore[no-untyped-def]
    logits, bias, weights, experts, order, places, starts, T, E, row_stride, scale, first, held,
    K: tl.constexpr, SIGMOID: tl.constexpr, RENORMALIZE: tl.constexpr, BIAS: tl.constexpr,
    CHOICES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Route all tokens of a step: k times the best of the remaining experts, then each pair's place among those of its
    expert."""
    t = tl.arange(0, ROWS)
    e = tl.arange(0, BLOCK)
    real = t < T
    inside = e < E
    l = tl.load(logits + t[:, None] * row_stride + e[None, :], real[:, None] & inside[None, :], 0.0).to(tl.float32)
    l = tl.where(inside[None, :], l, float("-inf"))
    if SIGMOID:
        s = 1.0 / (1.0 + tl.exp(-l))
    else:
        p = tl.exp(l - tl.max(l, 1)[:, None])
        s = p / tl.sum(p, 1)[:, None]
    worth = s
    if BIAS:
        worth = s + tl.load(bias + e, inside, 0.0)[None, :]
    worth = tl.where(inside[None, :], worth, float("-inf"))
    choice = tl.arange(0, CHOICES)
    w = tl.zeros([ROWS, CHOICES], tl.float32)
    chosen = tl.zeros([ROWS, CHOICES], tl.int32)
    taken = tl.zeros([ROWS, BLOCK], tl.int32)
    for j in tl.static_range(K):
        best = tl.argmax(worth, 1)
        hit = e[None, :] == best[:, None]
        now = (choice == j)[None, :]
        w = tl.where(now, tl.sum(tl.where(hit, s, 0.0), 1)[:, None], w)
        chosen = tl.where(now, best[:, None], chosen)
        taken = tl.where(hit & real[:, None], 1, taken)
        worth = tl.where(hit, float("-inf"), worth)
    if RENORMALIZE:
        total = tl.sum(w, 1)
        if SIGMOID:
            total += 1e-20
        w = w / total[:, None]
    pair = t[:, None] * K + choice[None, :]
    there = real[:, None] & (choice < K)[None, :]
    ours = (chosen >= first) & (chosen < first + held)
    tl.store(weights + pair, tl.where(ours, w * scale, 0.0), there)
    tl.store(experts + pair, chosen, there)
    count = tl.sum(taken, 0)
    here = (e >= first) & (e < first + held)
    mine = tl.where(here, count, 0)
    end = tl.cumsum(mine, 0)
    elsewhere = count - mine
    begin = tl.where(here, end - mine, tl.sum(mine, 0) + tl.cumsum(elsewhere, 0) - elsewhere)
    place_of = begin[None, :] + tl.cumsum(taken, 0) - taken
    for j in tl.static_range(K):
        own = tl.sum(tl.where((choice == j)[None, :], chosen, 0), 1)
        place = tl.sum(tl.where(e[None, :] == own[:, None], place_of, 0), 1)
        tl.store(places + t * K + j, place, real)
        tl.store(order + place, t * K + j, real)
    tl.store(starts + e - first + 1, end, here)
    tl.store(starts + e, tl.zeros([BLOCK], tl.int32), e == 0)


def triton_route(
    logits: Tensor,
    bias: Tensor | None,
    k: int,
    first: int = 0,
    held: int | None = None,
    score: str = "softmax",
    renormalize: bool = True,
    scale: float = 1.0,
    groups: int = 1,
    groups_kept: int = 1,
) -> Routed:
    """Compute ``reference`` in Triton; can be captured in a CUDA graph. Many tokens are processed by the kernels of its
    two parts."""
    tokens, total = logits.shape
    rows, block = next_power_of_2(max(1, tokens)), next_power_of_2(total)
    if groups > 1 or not tokens or rows * block > MOST:
        how = {"score": score, "renormalize": renormalize, "scale": scale}
        how |= {"groups": groups, "groups_kept": groups_kept}
        return _in_two(gating.triton_gating, ordering.triton_order, logits, bias, k, first, held, how)
    require("expert_routing", logits)
    logits = rows_of(logits)
    own = total if held is None else held
    weights = torch.empty(tokens, k, dtype=torch.float32, device=logits.device)
    experts = torch.empty(tokens, k, dtype=torch.int32, device=logits.device)
    order, places = (torch.empty(tokens * k, dtype=torch.int32, device=logits.device) for _ in range(2))
    starts = torch.empty(own + 1, dtype=torch.int32, device=logits.device)
    _route[(1,)](
        logits, logits if bias is None else bias.contiguous(), weights, experts, order, places, starts,
        tokens, total, logits.stride(0), scale, first, own,
        K=k, SIGMOID=score == "sigmoid", RENORMALIZE=renormalize, BIAS=bias is not None,
        CHOICES=next_power_of_2(k), ROWS=rows, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return weights, experts, order, places, starts


def cost(logits: Tensor, bias: Tensor | None, k: int, first: int = 0, held: int | None = None, **how: Any) -> Cost:
    """Count 5 FLOPs a logit for the scores, one for each choice."""
    tokens, total = logits.shape
    read = logits.nbytes + (0 if bias is None else bias.nbytes)
    return Cost((5 + k) * logits.numel(), read, 16 * tokens * k + 4 * ((held or total) + 1))


def _examples() -> Sequence[dict[str, Any]]:
    def example(tokens: int, experts: int, k: int, **options: Any) -> dict[str, Any]:
        how = {"score": "softmax", "renormalize": True, "scale": 1.0, "groups": 1, "groups_kept": 1}
        return {"logits": 2 * sample(tokens, experts), "bias": None, "k": k, "first": 0, "held": None, **how, **options}

    return [
        example(7, 8, 2),
        example(1, 60, 4, renormalize=False, first=20, held=20),
        example(3, 24, 3, score="sigmoid", scale=2.5, bias=0.3 * sample(24, seed=1), first=12, held=12),
        example(4, 16, 4, score="sigmoid", groups=4, groups_kept=2, bias=0.3 * sample(16, seed=1), held=8),
        example(0, 8, 2),
    ]


def _kernels() -> Sequence[Kernel]:
    types = {"logits": "*fp32", "bias": "*fp32", "weights": "*fp32"}
    types |= dict.fromkeys(("experts", "order", "places", "starts"), "*i32")
    types |= dict.fromkeys(("T", "E", "row_stride"), "i32") | {"scale": "fp32", "first": "i32", "held": "i32"}
    one = {"K": 8, "SIGMOID": False, "RENORMALIZE": True, "BIAS": False, "CHOICES": 8, "ROWS": 1, "BLOCK": 128}
    most = {"K": 8, "SIGMOID": True, "RENORMALIZE": True, "BIAS": True, "CHOICES": 8, "ROWS": 8, "BLOCK": 128}
    sizes = ("E", "row_stride")
    return [Kernel("one token", _route, types, one, sizes), Kernel("8 tokens", _route, types, most, sizes)]


register(
    Op(
        name="expert_routing",
        reference=reference,
        cost=cost,
        implementations={
            "torch": in_torch(reference, batch_invariant=True),
            "triton": in_triton(triton_route, batch_invariant=True, autograd=differentiable),
        },
        examples=_examples,
        peers={"torch": reference},
        keeps_dtype=("logits", "bias"),
        cases=partial(gating.cases, 1, 16, 64, 8192),
        kernels=_kernels,
    )
)
