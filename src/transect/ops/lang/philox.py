"""Random numbers without a state: Philox-4x32-10 as a function of (seed, choice, position, token id).

A counter-based generator (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011) maps a
128-bit counter and a 64-bit key to 128 random bits by ten rounds of multiply and xor. Nothing is carried from one call
to the next, so a draw does not depend on what else is in the batch, on how a request was preempted and resumed, or on
which device computed it. The words are used like this:

    key       low and high 32 bits of the request's seed
    counter   (token id // 4, position, choice, stream); token id % 4 picks one of the four words that come out

The same draw on every device: the random words are integers, equal to the bit wherever they are computed. They become
Gumbel noise in float64. Two devices can therefore disagree on a token only if their logits put its perturbed score
within rounding (about 1e-6 for float32 logits) of the runner-up's.

The rounds of ``philox4x32`` use only ``* >> & ^``, so that one piece of code serves numpy (uint64; quicker for the
small arrays of a CPU step) and torch (int64, whose product wraps and whose shift is arithmetic: hence the masks).
Kernels use ``word_of`` and ``noise_of``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from .jit import kernel, tl

WORD = 0xFFFFFFFF
_MULTIPLY_0, _MULTIPLY_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
ROUNDS = 10

TOKEN_STREAM = 0
"""Noise for single tokens."""
GROUP_STREAM = 1
"""Noise for groups of tokens; the id is the group's number."""
GROUP = 128
"""Tokens of a group: a draw from the whole vocabulary takes a group by its mass, then a token within it."""
SMALLEST_TEMPERATURE = 1e-30
"""Least temperature of a draw. CPU and GPU samplers share these numbers, so that they draw the same tokens."""


def philox4x32(counter: tuple[Any, Any, Any, Any], key: tuple[Any, Any]) -> tuple[Any, Any, Any, Any]:
    """Run ten rounds over arrays of 32-bit words.

    Args:
        counter: four arrays (numpy uint64 or torch int64, values below 2**32) of one broadcastable shape.
        key: two such arrays.

    Returns:
        four arrays of 32-bit words in the same type.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for round_ in range(ROUNDS):
        if round_:
            k0 = (k0 + _WEYL_0) & WORD
            k1 = (k1 + _WEYL_1) & WORD
        product_0 = c0 * _MULTIPLY_0
        product_1 = c2 * _MULTIPLY_1
        c0, c1, c2, c3 = (
            ((product_1 >> 32) & WORD) ^ c1 ^ k0,
            product_1 & WORD,
            ((product_0 >> 32) & WORD) ^ c3 ^ k1,
            product_0 & WORD,
        )
    return c0, c1, c2, c3


def random_words(
    seeds: list[int], choices: list[int], positions: list[int], ids_RK: torch.Tensor, stream: int = TOKEN_STREAM
) -> torch.Tensor:
    """Return one 32-bit word for each id of each row.

    Args:
        seeds: R seeds; any Python int, of which the low 64 bits count.
        choices, positions: R each, below 2**32.
        ids_RK: int64 [R, K], token (or group) ids, on any device.
        stream: TOKEN_STREAM or GROUP_STREAM.

    Returns:
        int64 [R, K] in [0, 2**32), on the device of ``ids_RK``.
    """
    columns = (
        [seed & WORD for seed in seeds],
        [(seed >> 32) & WORD for seed in seeds],
        [position & WORD for position in positions],
        [choice & WORD for choice in choices],
    )
    words = _words_numpy if ids_RK.device.type == "cpu" else _words_torch
    return words(columns, ids_RK, stream)


def _words_numpy(columns: tuple[list[int], ...], ids_RK: torch.Tensor, stream: int) -> torch.Tensor:
    ids = ids_RK.numpy().astype(np.uint64)
    k0, k1, c1, c2 = (np.asarray(column, dtype=np.uint64)[:, None] for column in columns)
    words = np.stack(philox4x32((ids >> np.uint64(2), c1, c2, np.uint64(stream)), (k0, k1)), axis=-1)
    lane = (ids & np.uint64(3)).astype(np.int64)[..., None]
    return torch.from_numpy(np.take_along_axis(words, lane, axis=-1)[..., 0].astype(np.int64))


def _words_torch(columns: tuple[list[int], ...], ids_RK: torch.Tensor, stream: int) -> torch.Tensor:
    device = ids_RK.device
    k0, k1, c1, c2 = (torch.tensor(column, dtype=torch.int64, device=device)[:, None] for column in columns)
    words = philox4x32((ids_RK >> 2, c1, c2, torch.full_like(c1, stream)), (k0, k1))
    stacked = torch.stack([word.expand_as(ids_RK) for word in words], dim=-1)
    return stacked.gather(-1, (ids_RK & 3).unsqueeze(-1)).squeeze(-1)


def gumbel(
    seeds: list[int], choices: list[int], positions: list[int], ids_RK: torch.Tensor, stream: int = TOKEN_STREAM
) -> torch.Tensor:
    """Return standard Gumbel noise, one value for each id of each row: ``argmax(log p + noise)`` is a draw from p.

    The word w becomes u = (w + 1/2) / 2**32, strictly inside (0, 1), and u becomes -log(-log u): between about -3.1 and
    22.9. Arguments as for ``random_words``.

    Returns:
        float64 [R, K] on the device of ``ids_RK``.
    """
    words = random_words(seeds, choices, positions, ids_RK, stream)
    uniform = (words.to(torch.float64) + 0.5) * 2.0**-32
    return -torch.log(-torch.log(uniform))


@kernel
def words_of(quarter, position, choice, low, high, STREAM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Compute, in a kernel, the four words of each ``quarter`` (id // 4); all uint32, ``low`` and ``high`` from the
    seed."""
    c0 = quarter
    c1 = c0 * 0 + position
    c2 = c0 * 0 + choice
    c3 = c0 * 0 + STREAM
    for _ in tl.static_range(10):
        high_0 = tl.umulhi(c0, 0xD2511F53)
        high_1 = tl.umulhi(c2, 0xCD9E8D57)
        c0, c2, c1, c3 = high_1 ^ c1 ^ low, high_0 ^ c3 ^ high, c2 * 0xCD9E8D57, c0 * 0xD2511F53
        low += 0x9E3779B9
        high += 0xBB67AE85
    return c0, c1, c2, c3


@kernel
def word_of(ids, position, choice, low, high, STREAM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Compute, in a kernel, the word of each id (int32, in any order)."""
    w0, w1, w2, w3 = words_of((ids >> 2).to(tl.uint32), position, choice, low, high, STREAM)
    lane = ids & 3
    return tl.where(lane == 0, w0, tl.where(lane == 1, w1, tl.where(lane == 2, w2, w3)))


@kernel
def noise_of(word):  # type: ignore[no-untyped-def]
    """Compute, in a kernel, Gumbel noise in float64 from a word, as ``gumbel`` does."""
    uniform = (word.to(tl.float64) + 0.5) * 2.3283064365386963e-10
    return -tl.log(-tl.log(uniform))
