"""All-to-all exchange of tokens with the ranks that have their experts, with gradients.

A rank sends each of its tokens once to every rank that has one of the token's k experts, and gets back the sum of
what the experts there compute::

    own tokens [T, D] ── sent, by rank ──► tokens of all ranks for the experts here [S, D] ── experts ──┐
    their sums [T, D] ◄── added up, in the order of the ranks ── back by rank ◄──────────────────────── [S, D]

With n ranks whose experts are equally busy a token goes to ``n (1 - (1 - 1/n) ** k)`` of them (``sent_share``). How
many tokens go where is known on the device alone, so the host waits for it once a layer: a step of training can, a
captured graph cannot. A rank that has no tokens sends none, and takes those of others.

The gradient of the one way is the other way round. Sums are in float32 and in a fixed order, so a step repeats to the
bit. Tokens travel as bytes, whatever their dtype.

Source: Lepikhin et al. 2020, arXiv:2006.16668 (the two exchanges); without a capacity, as in Gale et al. 2022,
arXiv:2211.15841.

Shapes: T tokens of this rank, S tokens that it gets, D numbers of a token, n ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .group import Group


def sent_share(ranks: int, per_token: int) -> float:
    """Return the share of all ranks that a token goes to on average, from 0 to 1."""
    return 1 - (1 - 1 / ranks) ** per_token


class Exchange:
    """The exchange of one layer's tokens of one micro-batch. Every rank of the group creates it together.

    Args:
        experts_Tk: the experts of the own tokens, whole numbers among all experts.
        held: experts of each rank: rank r has those from ``r * held`` on.
    """

    def __init__(self, experts_Tk: Tensor, held: int, group: Group) -> None:
        self.group, self.tokens = group, len(experts_Tk)
        goes_Tn = torch.zeros(self.tokens, group.size, dtype=torch.bool, device=experts_Tk.device)
        goes_Tn.scatter_(1, experts_Tk.long() // held, True)
        count_n = goes_Tn.sum(0)
        counts = torch.stack((count_n, group.all_to_all(count_n))).tolist()  # the host waits here
        self._sent, self._taken = counts
        self._rows = goes_Tn.T.nonzero()[:, 1]
        """This rank's tokens that are sent, sorted by target rank."""

    def send(self, x_TD: Tensor) -> Tensor:
        """Send rows of this rank's tokens to their experts' ranks; return the rows ``[S, D]`` for the experts here."""
        out: Tensor = _Sends.apply(x_TD, self)
        return out

    def bring_back(self, y_SD: Tensor) -> Tensor:
        """Return outputs ``[S, D]`` of the experts here to their tokens' ranks; return those of this rank's tokens
        ``[T, D]``."""
        out: Tensor = _BringsBack.apply(y_SD, self)
        return out

    def go(self, x_TD: Tensor) -> Tensor:
        """Send tokens like ``send``, without a gradient."""
        return self._move(x_TD.index_select(0, self._rows), self._sent, self._taken)

    def come(self, y_SD: Tensor) -> Tensor:
        """Return outputs like ``bring_back``, without a gradient."""
        rows = self._move(y_SD, self._taken, self._sent)
        wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
        total = torch.zeros(self.tokens, rows.shape[1], dtype=wide, device=rows.device)
        for index, part in zip(self._rows.split(self._sent), rows.split(self._sent), strict=True):
            total.index_add_(0, index, part.to(wide))  # no token is there twice
        return total.to(rows.dtype)

    def _move(self, x: Tensor, give: list[int], take: list[int]) -> Tensor:
        return self.group.all_to_all_rows(x, give, take)


class _Sends(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.go(x)

    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.come(g[0]), None


class _BringsBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.come(y)

    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.go(g[0]), None
