"""Collectives with gradients: the start and end of a tensor group's shared work inside a layer.

Two of them belong together, each the other's backward pass (Shoeybi et al. 2019, arXiv:1909.08053)::

    entered     the same x on every rank -> each computes with its matrices        backward: gradients are summed
    summed      each rank's part of a sum -> the sum, on every rank                backward: nothing

With sequence parallelism each rank has its own rows of the residual stream between the two, so norms and additions are
computed once (Korthikanti et al. 2022, arXiv:2205.05198)::

    gathered    the own rows -> all rows, on every rank                            backward: summed, the own rows stay
    scattered   each rank's part of a sum -> the own rows of the sum               backward: rows are gathered

Shapes: x ``[T, ...]``; rows are tokens, and their number a multiple of the ranks where they are cut.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .group import Group


def entered(x: Tensor, group: Group) -> Tensor:
    """Return x; its gradient is summed over the ranks."""
    out: Tensor = _Entered.apply(x, group)
    return out


def summed(x: Tensor, group: Group) -> Tensor:
    """Return the sum of all ranks' x; its gradient goes to each of them."""
    out: Tensor = _Summed.apply(x, group)
    return out


def gathered(x: Tensor, group: Group) -> Tensor:
    """Gather ``[T / ranks, ...]`` of each rank to ``[T, ...]``."""
    out: Tensor = _Gathered.apply(x, group)
    return out


def scattered(x: Tensor, group: Group) -> Tensor:
    """Sum ``[T, ...]`` over the ranks, and return this rank's ``[T / ranks, ...]``."""
    out: Tensor = _Scattered.apply(x, group)
    return out


def own_rows(x: Tensor, group: Group) -> Tensor:
    """Return this rank's ``[T / ranks, ...]`` of x, which is equal on all ranks."""
    each = x.shape[0] // group.size
    return x[group.rank * each : (group.rank + 1) * each]


class _Entered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> tuple[Tensor, None]:
        return ctx.group.all_reduce(g[0].clone(memory_format=torch.contiguous_format)), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return group.all_reduce(x.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> tuple[Tensor, None]:
        return g[0], None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return group.all_gather(x).flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> tuple[Tensor, None]:
        return ctx.group.reduce_scatter(g[0]), None


class _Scattered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return group.reduce_scatter(x)

    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> tuple[Tensor, None]:
        return ctx.group.all_gather(g[0]).flatten(0, 1), None
