"""Visible pairs of queries and keys if ranks share tokens (``ring.py``), and attention between them by torch's
operators.

Shapes: R queries, S keys, H query heads, K key heads, d head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ..costs.memory.sizes import RING_ROWS


class Pairs(NamedTuple):
    """Rows of this rank's queries and of another rank's keys that attend to each other.

    ``ahead``: tokens by which the first query follows the first key; None if every query sees every key. ``window``:
    tokens that a query sees back.
    """

    queries: slice
    keys: slice
    ahead: int | None
    window: int | None = None


def chunks_of(rank: int, ranks: int) -> tuple[int, int]:
    """Return the two chunks of a rank, of ``2 * ranks``."""
    return rank, 2 * ranks - 1 - rank


def own_tokens(tokens: int, rank: int, ranks: int) -> list[slice]:
    """Return the slices of a rank's tokens; their number must be a multiple of ``2 * ranks``."""
    each = tokens // (2 * ranks)
    return [slice(chunk * each, (chunk + 1) * each) for chunk in chunks_of(rank, ranks)]


def visible(ends: Sequence[int], rank: int, other: int, ranks: int, window: int | None = None) -> list[Pairs]:
    """List the keys of ``other`` that the queries of ``rank`` see.

    Args:
        ends: starts of documents, 0 first, and T last.
        window: tokens that a query sees back, including itself; None for all.
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


def wide(x: Tensor) -> torch.dtype:
    """Return the dtype to compute in."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _scores(q_RHd: Tensor, k_SKd: Tensor, scale: float, part: Pairs, first: int) -> Tensor:
    """Compute scores ``[K, H / K, R, S]`` of queries from row ``first`` of a rectangle on; minus infinity for invisible
    keys."""
    q = q_RHd.unflatten(1, (k_SKd.shape[1], -1)).to(wide(q_RHd))
    scores = torch.einsum("rkgd,skd->kgrs", q, k_SKd.to(q.dtype)) * scale
    if part.ahead is not None:
        row = torch.arange(first + part.ahead, first + part.ahead + q.shape[0], device=q.device)
        distance = row[:, None] - torch.arange(k_SKd.shape[0], device=q.device)
        hidden = distance < 0
        if part.window is not None:
            hidden |= distance >= part.window
        scores.masked_fill_(hidden, -torch.inf)
    return scores


def result_of(q: Tensor, k: Tensor, v: Tensor, scale: float, pairs: Pairs) -> tuple[Tensor, Tensor]:
    """Attend from queries ``[R, H, d]`` to keys and values ``[S, K, d]``; returns results and the log-sum-exp of scores
    ``[R, H]``."""
    outs, sums = [], []
    for first in range(0, q.shape[0], RING_ROWS):
        part = q[first : first + RING_ROWS]
        scores = _scores(part, k, scale, pairs, first)
        its = scores.logsumexp(-1)
        weights = (scores - its[..., None]).exp_().nan_to_num_(0.0)
        outs.append(torch.einsum("kgrs,skd->rkgd", weights, v.to(scores.dtype)).flatten(1, 2))
        sums.append(its.flatten(0, 1).mT)
    return torch.cat(outs), torch.cat(sums)


def gradients_of(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, sums: Tensor, delta: Tensor, scale: float, pairs: Pairs
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the part of the gradients of q, k and v from a rectangle; ``sums`` and ``delta`` ``[R, H]`` are L and D at
    the top of this file."""
    heads = k.shape[1]
    dk, dv = (torch.zeros(k.shape, dtype=sums.dtype, device=k.device) for _ in range(2))
    dqs = []
    for first in range(0, q.shape[0], RING_ROWS):
        rows = slice(first, first + RING_ROWS)
        scores = _scores(q[rows], k, scale, pairs, first)
        by_head = [x[rows].mT.unflatten(0, (heads, -1))[..., None] for x in (sums, delta)]
        p = (scores - by_head[0]).exp_()
        upstream = g[rows].unflatten(1, (heads, -1)).to(p.dtype)
        dv += torch.einsum("kgrs,rkgd->skd", p, upstream)
        ds = torch.einsum("rkgd,skd->kgrs", upstream, v.to(p.dtype)).sub_(by_head[1]).mul_(p).mul_(scale)
        dqs.append(torch.einsum("kgrs,skd->rkgd", ds, k.to(p.dtype)).flatten(1, 2))
        dk += torch.einsum("kgrs,rkgd->skd", ds, q[rows].unflatten(1, (heads, -1)).to(p.dtype))
    return torch.cat(dqs), dk, dv
