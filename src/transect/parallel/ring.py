"""Context parallelism: ranks share the tokens of a micro-batch, and keys and values circulate (ring attention).

The T tokens are cut into 2n chunks, and of n ranks rank r has chunks r and 2n - 1 - r, so that each has about as many
pairs of a query and an earlier key (zig-zag)::

    rank 0    0 . . . . . . 7        rank 2    . . 2 . . 5 . .
    rank 1    . 1 . . . . 6 .        rank 3    . . . 3 4 . . .

Every rank keeps its queries. Keys and values move on by one rank n - 1 times, and the next ones are under way while
those that are there are used. Attention to some of the keys is a result and the log-sum-exp L of its scores; two such
parts make one by their L (Milakov & Gimelshein 2018, arXiv:1805.02867):

    L = log(exp(L1) + exp(L2))        o = exp(L1 - L) o1 + exp(L2 - L) o2

The backward pass goes round again: with L of all keys, and D = sum(do o), the gradients of a part need nothing of the
others; those of keys and values travel with them and are home after n moves.

Documents see only themselves. Of two chunks, one before the other, only a document that reaches from one into the other
has pairs between them, so what is to be computed is always a rectangle: neighbouring queries and neighbouring keys.

Source: Liu et al. 2023, arXiv:2310.01889; Brandon et al. 2023, arXiv:2311.09431, for the balance.

Shapes: t tokens of the rank (T / n), H query heads, K key heads, d head size.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .group import Group
from .ring_pairs import Pairs, gradients_of, result_of, visible, wide

if TYPE_CHECKING:
    from .ring_kernels import KernelRing


class RingContext:
    """An ``AttentionContext`` for this rank's tokens of packed documents, on ranks that share them.

    Args:
        cu_seqlens: of all tokens, ``[documents + 1]``.
        group: the ranks.
    """

    wanted = None

    def __init__(self, cu_seqlens: Tensor, group: Group) -> None:
        self.ends = cu_seqlens.tolist()
        self.group = group
        self._seen: dict[int | None, list[list[Pairs]]] = {}

    @cached_property
    def kernels(self) -> KernelRing:
        """Ring attention by the kernels of a GPU."""
        from .ring_kernels import KernelRing

        return KernelRing(self.ends, self.group)

    def pairs(self, window: int | None) -> list[list[Pairs]]:
        """Return this rank's work with its own keys, those of the previous rank, and so on."""
        if window not in self._seen:
            rank, ranks = self.group.rank, self.group.size
            others = [(rank - step) % ranks for step in range(ranks)]
            self._seen[window] = [visible(self.ends, rank, other, ranks, window) for other in others]
        return self._seen[window]

    def positions(self) -> Tensor:
        """Raise ValueError: positions are unknown here, and models that need them are refused before a run."""
        raise ValueError("ring attention does not support scales of queries by position: set parallel.context to 1")

    def attend(
        self,
        layer: int,
        q_THd: Tensor,
        k_TKd: Tensor,
        v_TKd: Tensor,
        scale: float,
        window: int | None,
        *,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        chunk: int | None = None,
    ) -> Tensor:
        """Compute ring attention, see ``AttentionContext.attend``; all ranks call it together."""
        if softcap is not None or sinks is not None or chunk is not None:
            raise ValueError(
                "ring attention does not support caps on scores, sinks or chunks: set parallel.context to 1"
            )
        if q_THd.is_cuda and q_THd.dtype != torch.float64:
            found: Tensor = _KernelRing.apply(q_THd, k_TKd, v_TKd, scale, window, self.kernels)
            return found
        out: Tensor = _Ring.apply(q_THd, k_TKd, v_TKd, scale, self.pairs(window), self.group)
        return out


class _KernelRing(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, ring: KernelRing
    ) -> Tensor:
        out, sums = ring.forward(q, k, v, scale, window)
        ctx.save_for_backward(q, k, v, out, sums)
        ctx.scale, ctx.window, ctx.ring = scale, window, ring
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, sums = ctx.saved_tensors
        return *ctx.ring.backward(upstream[0], q, k, v, out, sums, ctx.scale, ctx.window), None, None, None


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, todo: list[list[Pairs]], group: Group
    ) -> Tensor:
        out = torch.zeros(q.shape, dtype=wide(q), device=q.device)
        sums = torch.full(q.shape[:2], -torch.inf, dtype=wide(q), device=q.device)
        kv = torch.stack((k, v))
        for step, pairs in enumerate(todo):
            moving = group.start_shift(kv) if step + 1 < group.size else None
            for part in pairs:
                rows = part.queries
                one, its = result_of(q[rows], kv[0, part.keys], kv[1, part.keys], scale, part)
                both = torch.logaddexp(sums[rows], its)
                before, now = (_share(x, both)[..., None] for x in (sums[rows], its))
                out[rows] = before * out[rows] + now * one
                sums[rows] = both
            kv = kv if moving is None else moving.wait()
        found = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, found, sums)
        ctx.scale, ctx.todo, ctx.group = scale, todo, group
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, sums = ctx.saved_tensors
        group, (g,) = ctx.group, upstream
        delta = (g.to(sums.dtype) * out.to(sums.dtype)).sum(-1)
        dq = torch.zeros(q.shape, dtype=sums.dtype, device=q.device)
        kv = torch.stack((k, v))
        home = torch.zeros(kv.shape, dtype=sums.dtype, device=q.device)  # gradients that travel with their keys
        for step, pairs in enumerate(ctx.todo):
            moving = group.start_shift(kv) if step + 1 < group.size else None
            for part in pairs:
                rows, keys = part.queries, part.keys
                dq_part, dk, dv = gradients_of(
                    g[rows], q[rows], kv[0, keys], kv[1, keys], sums[rows], delta[rows], ctx.scale, part
                )
                dq[rows] += dq_part
                home[0, keys] += dk
                home[1, keys] += dv
            home = group.start_shift(home).wait()
            kv = kv if moving is None else moving.wait()
        return dq.to(q.dtype), home[0].to(k.dtype), home[1].to(v.dtype), None, None, None


def _share(sums: Tensor, both: Tensor) -> Tensor:
    """Return exp(L1 - L), 0 for empty parts."""
    return (sums - both).exp().nan_to_num(0.0)
