r"""``SignSums``: sums over ranks of one bit a number, whose errors are compensated in later sums.

The scheme of 1-bit Adam (Tang et al. 2021, arXiv:2102.02888), with d the error that a rank still owes:

    sent     c_i = C(x_i + d_i)            d_i <- x_i + d_i - c_i         each part to the rank that adds it up
    summed   y = C(sum_i c_i + d)          d <- sum_i c_i + d - y         and to all ranks

C(x) is the signs of x times their mean magnitude, by chunks of ``CHUNK`` numbers. Signs travel as bits, eight to a
uint8, with one float32 for each chunk: 1.125 bits a number, in an all-to-all and an all-gather, where a sum in float32
sends 32 in both of its halves.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .group import Group

CHUNK = 256
"""Numbers that share a scale."""


class SignSums:
    """Sums vectors of a fixed size over the ranks of a group. All ranks call it together.

    Attributes:
        sent: bytes that this rank has sent so far.
        owed: the error of what this rank sent, ``[numbers, padded]`` float32.
        owed_sum: the error of the part that it adds up.
    """

    def __init__(self, group: Group, numbers: int, device: torch.device) -> None:
        self.group, self.numbers = group, numbers
        self.each = -(-numbers // (group.size * CHUNK)) * CHUNK
        self.owed = torch.zeros(self.each * group.size, device=device)
        self.owed_sum = torch.zeros(self.each, device=device)
        self.sent = 0

    @torch.no_grad()
    def sum(self, x: Tensor) -> Tensor:
        """Sum ``[numbers]`` float32 over the ranks approximately, with the same bits on every rank."""
        group, owed = self.group, self.owed
        owed[: self.numbers] += x
        codes, scales = encode(owed)
        owed -= decode(codes, scales)
        others = group.size - 1
        self.sent += 2 * others * (codes.nbytes + scales.nbytes) // group.size
        codes, scales = group.all_to_all(codes), group.all_to_all(scales)
        mine = self.owed_sum
        mine += decode(codes, scales).view(group.size, self.each).sum(0)
        codes, scales = encode(mine)
        mine -= decode(codes, scales)
        return decode(group.all_gather(codes).flatten(), group.all_gather(scales).flatten())[: self.numbers]


def full_sum_bytes(numbers: int, ranks: int, element: int = 4) -> int:
    """Return the bytes that a rank sends to sum ``numbers`` of ``element`` bytes by a ring."""
    return 2 * (ranks - 1) * numbers * element // ranks


def encode(x: Tensor) -> tuple[Tensor, Tensor]:
    """Encode float32 ``[n]``, n a multiple of ``CHUNK``, to signs, uint8 ``[n / 8]``, and scales, float32 ``[n /
    CHUNK]``."""
    places = 2 ** torch.arange(8, dtype=torch.uint8, device=x.device)
    codes = ((x >= 0).view(-1, 8) * places).sum(-1, dtype=torch.uint8)
    return codes, x.view(-1, CHUNK).abs().mean(-1)


def decode(codes: Tensor, scales: Tensor) -> Tensor:
    """Decode the result of ``encode`` to float32 ``[n]``."""
    places = torch.arange(8, dtype=torch.uint8, device=codes.device)
    signs = ((codes[:, None] >> places) & 1).float().mul_(2).sub_(1)
    return signs.view(-1, CHUNK).mul_(scales[:, None]).view(-1)
