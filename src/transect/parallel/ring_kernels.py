"""Ring attention (``ring.py``) by the attention kernels of one device.

The kernels know documents in which queries and keys are the same tokens, causal or not. That is enough:

* Of a rank's own keys, a document has a run of neighbouring rows, also one that reaches from the front chunk into the
  back one, since the rank has nothing between them. Rows in order are tokens in order, so one causal call does it.
* Queries and the keys of another rank that all see each other are a rectangle, cut into squares: a square is a document
  that is not causal. Squares whose queries and keys do not overlap are one call, a *round*.

A call gives a result and the log-sum-exp L of its scores, in powers of two; two parts make one by their L. The backward
pass gives each call the L and the result of all keys. What is left, slivers and the edges of windows, goes by torch's
operators.

Shapes: t tokens of the rank, H query heads, K key heads, d head size; L ``[H, t]`` float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from ..ops.attention.packed import backward as flash_attention_backward
from ..ops.attention.packed import flash_attention
from .group import Group
from .ring_pairs import Pairs, chunks_of, gradients_of, result_of, visible

LEAST = 64
"""Fewest rows of squares for the kernels; smaller ones use torch's operators."""
MOST_ROUNDS = 8
LN2 = math.log(2)
Square = tuple[int, int, int]
"""(first query, first key, size)."""


@dataclass(slots=True)
class RingPart:
    """Work of a rank with the keys of one rank.

    Attributes:
        ends: for the rank's own keys, the starts of runs of rows with causal attention, and the number of rows; else
            None.
        rounds: squares, one call for each list.
        rest: pairs left to torch's operators.
    """

    ends: list[int] | None = None
    rounds: list[list[Square]] = field(default_factory=list)
    rest: list[Pairs] = field(default_factory=list)


def parts(ends: Sequence[int], rank: int, ranks: int, window: int | None) -> list[RingPart]:
    """List the work of ``rank`` with its own keys, those of the previous rank, and so on; arguments as of
    ``visible``."""
    found = []
    for step in range(ranks):
        other = (rank - step) % ranks
        part = RingPart()
        if step == 0:
            part.ends = _runs(ends, rank, ranks, joined=window is None)
        for pairs in visible(ends, rank, other, ranks, window):
            if step == 0 and (pairs.ahead == 0 or window is None):
                continue  # the causal call has it
            squares, rest = ([], [pairs]) if pairs.ahead is not None else _squares(pairs)
            for square in squares:
                _place(part, square)
            part.rest += rest
        found.append(part)
    return found


def _runs(ends: Sequence[int], rank: int, ranks: int, joined: bool) -> list[int]:
    """Return this rank's rows at which another document begins, or with ``joined`` False another chunk; and their
    number."""
    each = ends[-1] // (2 * ranks)
    found: list[int] = []
    last = -1
    for at, chunk in enumerate(chunks_of(rank, ranks)):
        for number, (begin, end) in enumerate(pairwise(ends)):
            first = max(begin, chunk * each)
            if first < min(end, (chunk + 1) * each):
                if not (joined and number == last):
                    found.append(at * each + first - chunk * each)
                last = number
    return [*found, 2 * each]


def _squares(pairs: Pairs) -> tuple[list[Square], list[Pairs]]:
    """Divide a rectangle in which every query sees every key into squares and a rest too narrow for squares."""
    q, q_end = pairs.queries.start, pairs.queries.stop
    k, k_end = pairs.keys.start, pairs.keys.stop
    squares: list[Square] = []
    while (size := min(q_end - q, k_end - k)) >= LEAST:
        if k_end - k >= q_end - q:
            count = (k_end - k) // size
            squares += [(q, k + i * size, size) for i in range(count)]
            k += count * size
        else:
            count = (q_end - q) // size
            squares += [(q + i * size, k, size) for i in range(count)]
            q += count * size
    rest = [Pairs(slice(q, q_end), slice(k, k_end), None)] if size > 0 else []
    return squares, rest


def _place(part: RingPart, square: Square) -> None:
    """Put a square into the first round with room for it."""
    q, k, size = square
    for squares in part.rounds:
        if not any(_meet(q, size, a, n) or _meet(k, size, b, n) for a, b, n in squares):
            squares.append(square)
            return
    if len(part.rounds) < MOST_ROUNDS:
        part.rounds.append([square])
    else:
        part.rest.append(Pairs(slice(q, q + size), slice(k, k + size), None))


def _meet(a: int, a_size: int, b: int, b_size: int) -> bool:
    return a < b + b_size and b < a + a_size


class KernelRing:
    """The ring of a micro-batch, with the attention interface of merged layers.

    Args:
        ends: starts of documents, 0 first, and T last. group: the ranks.
    """

    def __init__(self, ends: Sequence[int], group: Group) -> None:
        self.ends, self.group = list(ends), group
        self._parts: dict[int | None, list[RingPart]] = {}
        self._made: dict[tuple[int, ...], Tensor] = {}

    def _todo(self, window: int | None) -> list[RingPart]:
        if window not in self._parts:
            self._parts[window] = parts(self.ends, self.group.rank, self.group.size, window)
        return self._parts[window]

    def _on_device(self, numbers: Sequence[int], like: Tensor, dtype: torch.dtype = torch.int32) -> Tensor:
        key = (dtype == torch.int32, *numbers)
        if key not in self._made:
            self._made[key] = torch.tensor(numbers, dtype=dtype).to(like.device, non_blocking=True)
        return self._made[key]

    def _rows(self, squares: list[Square], which: int, like: Tensor) -> slice | Tensor:
        """Return the rows of the queries (0) or keys (1) of a round."""
        if len(squares) == 1:
            return slice(squares[0][which], squares[0][which] + squares[0][2])
        key = (-1 - which, *(number for square in squares for number in square))
        if key not in self._made:
            index = torch.cat([torch.arange(s[which], s[which] + s[2]) for s in squares])
            self._made[key] = index.to(like.device, non_blocking=True)
        return self._made[key]

    def _bounds(self, squares: list[Square], like: Tensor) -> Tensor:
        ends = [0]
        for *_, size in squares:
            ends.append(ends[-1] + size)
        return self._on_device(ends, like)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> tuple[Tensor, Tensor]:
        """Attend from q ``[t, H, d]`` to k and v ``[t, K, d]`` of all ranks; returns the result, shaped like q, and L.
        All ranks call it."""
        todo, kv = self._todo(window), torch.stack((k, v))
        out = sums = q.new_empty(0)
        for step, part in enumerate(todo):
            moving = self.group.start_shift(kv) if step + 1 < len(todo) else None
            if part.ends is not None:
                bounds = self._on_device(part.ends, q)
                one, sums = flash_attention.forward(q, kv[0], kv[1], bounds, scale, True, window)
                out = one.float() if len(todo) > 1 or part.rest else one
            for squares in part.rounds:
                rows, keys = (self._rows(squares, which, q) for which in (0, 1))
                bounds = self._bounds(squares, q)
                one, its = flash_attention.forward(q[rows], kv[0][keys], kv[1][keys], bounds, scale, False, None)
                _merge(out, sums, rows, one, its)
            for pairs in part.rest:
                one, natural = result_of(q[pairs.queries], kv[0, pairs.keys], kv[1, pairs.keys], scale, pairs)
                _merge(out, sums, pairs.queries, one, natural.T / LN2)
            kv = kv if moving is None else moving.wait()
        return out.to(q.dtype), sums

    def backward(
        self, g: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, sums: Tensor, scale: float, window: int | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v. All ranks call it."""
        todo, kv, g = self._todo(window), torch.stack((k, v)), g.contiguous()
        home = torch.zeros(kv.shape, dtype=torch.float32, device=kv.device)  # gradients that travel with their keys
        dq = torch.zeros(0, device=q.device)
        delta = None
        for step, part in enumerate(todo):
            moving = self.group.start_shift(kv) if step + 1 < len(todo) else None
            if part.ends is not None:
                bounds = self._on_device(part.ends, q)
                found = flash_attention_backward.backward(g, q, kv[0], kv[1], o, sums, bounds, scale, True, window)
                dq, home[0], home[1] = found[0].float(), found[1], found[2]
            for squares in part.rounds:
                rows, keys = (self._rows(squares, which, q) for which in (0, 1))
                found = flash_attention_backward.backward(
                    g[rows], q[rows], kv[0][keys], kv[1][keys], o[rows], sums[:, rows].contiguous(),
                    self._bounds(squares, q), scale, False, None,
                )  # fmt: skip
                dq[rows] += found[0]
                home[0][keys] += found[1]
                home[1][keys] += found[2]
            for pairs in part.rest:
                rows, keys = pairs.queries, pairs.keys
                delta = (g.float() * o.float()).sum(-1) if delta is None else delta
                found = gradients_of(
                    g[rows], q[rows], kv[0, keys], kv[1, keys], sums.T[rows] * LN2, delta[rows], scale, pairs
                )
                dq[rows] += found[0]
                home[0, keys] += found[1]
                home[1, keys] += found[2]
            if len(todo) > 1:
                home = self.group.start_shift(home).wait()
            kv = kv if moving is None else moving.wait()
        return dq.to(q.dtype), home[0].to(k.dtype), home[1].to(v.dtype)


def _merge(out: Tensor, sums: Tensor, rows: slice | Tensor, one: Tensor, its: Tensor) -> None:
    """Merge another part into the result of some rows."""
    before = sums[:, rows]
    both = torch.logaddexp2(before, its)
    old, new = ((x - both).exp2().T[..., None] for x in (before, its))
    out[rows] = out[rows] * old + one * new
    sums[:, rows] = both
