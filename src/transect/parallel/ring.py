"""Context parallelism: ranks share the tokens of a micro-batch, and keys and values go round (ring attention).

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

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from .group import Group

ROWS = 512
"""Queries whose scores are held at a time."""


class Pairs(NamedTuple):
    """Queries and keys, rows of the own and of another rank's tokens, that see each other. ``ahead``: how many tokens
    the first query is behind the first key; None: every query sees every key. ``window``: how far back it sees."""

    queries: slice
    keys: slice
    ahead: int | None
    window: int | None = None


def chunks_of(rank: int, ranks: int) -> tuple[int, int]:
    """The two chunks of a rank, of ``2 * ranks``."""
    return rank, 2 * ranks - 1 - rank


def own_tokens(tokens: int, rank: int, ranks: int) -> list[slice]:
    """Where a rank's tokens are; their number must be a multiple of ``2 * ranks``."""
    each = tokens // (2 * ranks)
    return [slice(chunk * each, (chunk + 1) * each) for chunk in chunks_of(rank, ranks)]


def visible(ends: Sequence[int], rank: int, other: int, ranks: int, window: int | None = None) -> list[Pairs]:
    """What the queries of ``rank`` see of the keys of ``other``.

    Args:
        ends: where documents begin, 0 first, and T last.
        window: how many tokens back a query sees, itself included; None: all.
    """
    each = ends[-1] // (2 * ranks)
    found = []
    for at, mine in enumerate(chunks_of(rank, ranks)):
        for there, theirs in enumerate(chunks_of(other, ranks)):
            if theirs > mine:
                continue
            for begin, end in pairwise(ends):
                q0, q1 = max(begin, mine * each), min(end, (mine + 1) * each)
                k0, k1 = max(begin, theirs * each), min(end, (theirs + 1) * each)
                if window is not None:
                    k0, q1 = max(k0, q0 - window + 1), min(q1, k1 - 1 + window)
                if q0 >= q1 or k0 >= k1:
                    continue
                whole = theirs < mine and (window is None or q1 - 1 - k0 < window)
                queries = slice(at * each + q0 - mine * each, at * each + q1 - mine * each)
                keys = slice(there * each + k0 - theirs * each, there * each + k1 - theirs * each)
                found.append(Pairs(queries, keys, None) if whole else Pairs(queries, keys, q0 - k0, window))
    return found


class RingContext:
    """An ``AttentionContext`` for the own tokens of packed documents, on ranks that share them.

    Args:
        cu_seqlens: of all tokens, ``[documents + 1]``.
        group: the ranks.
    """

    wanted = None

    def __init__(self, cu_seqlens: Tensor, group: Group) -> None:
        self.ends = cu_seqlens.tolist()
        self.group = group
        self._seen: dict[int | None, list[list[Pairs]]] = {}

    def pairs(self, window: int | None) -> list[list[Pairs]]:
        """What this rank computes with the keys of itself, of the rank before it, and so on."""
        if window not in self._seen:
            rank, ranks = self.group.rank, self.group.size
            others = [(rank - step) % ranks for step in range(ranks)]
            self._seen[window] = [visible(self.ends, rank, other, ranks, window) for other in others]
        return self._seen[window]

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
    ) -> Tensor:
        """See ``AttentionContext.attend``; all ranks call it together."""
        if softcap is not None or sinks is not None:
            raise ValueError("ring attention knows no caps on scores and no sinks: set parallel.context to 1")
        out: Tensor = _Ring.apply(q_THd, k_TKd, v_TKd, scale, self.pairs(window), self.group)
        return out


class _Moving:
    """A tensor on its way to the next rank, and one from the rank before."""

    def __init__(self, x: Tensor, group: Group) -> None:
        self.sent, self.came = x, torch.empty_like(x)
        ahead, behind = (group.rank + 1) % group.size, (group.rank - 1) % group.size
        self._work = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, x, group=group.group, group_peer=ahead),
                dist.P2POp(dist.irecv, self.came, group=group.group, group_peer=behind),
            ]
        )

    def wait(self) -> Tensor:
        for work in self._work:
            work.wait()
        return self.came


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, todo: list[list[Pairs]], group: Group
    ) -> Tensor:
        out = torch.zeros(q.shape, dtype=_wide(q), device=q.device)
        sums = torch.full(q.shape[:2], -torch.inf, dtype=_wide(q), device=q.device)
        kv = torch.stack((k, v))
        for step, pairs in enumerate(todo):
            moving = _Moving(kv, group) if step + 1 < group.size else None
            for part in pairs:
                rows = part.queries
                one, its = _attend(q[rows], kv[0, part.keys], kv[1, part.keys], scale, part)
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
            moving = _Moving(kv, group) if step + 1 < group.size else None
            for part in pairs:
                rows, keys = part.queries, part.keys
                dq_part, dk, dv = _gradients(
                    g[rows], q[rows], kv[0, keys], kv[1, keys], sums[rows], delta[rows], ctx.scale, part
                )
                dq[rows] += dq_part
                home[0, keys] += dk
                home[1, keys] += dv
            home = _Moving(home, group).wait()
            kv = kv if moving is None else moving.wait()
        return dq.to(q.dtype), home[0].to(k.dtype), home[1].to(v.dtype), None, None, None


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _share(sums: Tensor, both: Tensor) -> Tensor:
    """exp(L1 - L), 0 where there is nothing yet."""
    return (sums - both).exp().nan_to_num(0.0)


def _scores(q_RHd: Tensor, k_SKd: Tensor, scale: float, part: Pairs, first: int) -> Tensor:
    """Scores ``[K, H / K, R, S]`` of queries from row ``first`` of a rectangle on; minus infinity where a key is not
    seen."""
    q = q_RHd.unflatten(1, (k_SKd.shape[1], -1)).to(_wide(q_RHd))
    scores = torch.einsum("rkgd,skd->kgrs", q, k_SKd.to(q.dtype)) * scale
    if part.ahead is not None:
        row = torch.arange(first + part.ahead, first + part.ahead + q.shape[0], device=q.device)
        distance = row[:, None] - torch.arange(k_SKd.shape[0], device=q.device)
        hidden = distance < 0
        if part.window is not None:
            hidden |= distance >= part.window
        scores.masked_fill_(hidden, -torch.inf)
    return scores


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, pairs: Pairs) -> tuple[Tensor, Tensor]:
    """Queries ``[R, H, d]`` to keys and values ``[S, K, d]`` -> results and the log-sum-exp of scores ``[R, H]``."""
    outs, sums = [], []
    for first in range(0, q.shape[0], ROWS):
        part = q[first : first + ROWS]
        scores = _scores(part, k, scale, pairs, first)
        its = scores.logsumexp(-1)
        weights = (scores - its[..., None]).exp_().nan_to_num_(0.0)
        outs.append(torch.einsum("kgrs,skd->rkgd", weights, v.to(scores.dtype)).flatten(1, 2))
        sums.append(its.flatten(0, 1).mT)
    return torch.cat(outs), torch.cat(sums)


def _gradients(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, sums: Tensor, delta: Tensor, scale: float, pairs: Pairs
) -> tuple[Tensor, Tensor, Tensor]:
    """The part of the gradients of q, k and v that comes of a rectangle; ``sums`` and ``delta`` ``[R, H]`` are L and D
    of the head of this file."""
    heads = k.shape[1]
    dk, dv = (torch.zeros(k.shape, dtype=sums.dtype, device=k.device) for _ in range(2))
    dqs = []
    for first in range(0, q.shape[0], ROWS):
        rows = slice(first, first + ROWS)
        scores = _scores(q[rows], k, scale, pairs, first)
        by_head = [x[rows].mT.unflatten(0, (heads, -1))[..., None] for x in (sums, delta)]
        p = (scores - by_head[0]).exp_()
        upstream = g[rows].unflatten(1, (heads, -1)).to(p.dtype)
        dv += torch.einsum("kgrs,rkgd->skd", p, upstream)
        ds = torch.einsum("rkgd,skd->kgrs", upstream, v.to(p.dtype)).sub_(by_head[1]).mul_(p).mul_(scale)
        dqs.append(torch.einsum("kgrs,skd->rkgd", ds, k.to(p.dtype)).flatten(1, 2))
        dk += torch.einsum("kgrs,rkgd->skd", ds, q[rows].unflatten(1, (heads, -1)).to(p.dtype))
    return torch.cat(dqs), dk, dv
