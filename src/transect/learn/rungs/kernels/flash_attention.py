r"""The scores of attention are a matrix that is never needed: only the result counts. FlashAttention never writes
them. A program takes a tile of queries and walks over the keys in tiles. For each it makes a tile of scores, uses
it and forgets it. What makes that possible is the line that you know from the rung `softmax`:

    m' = max(m, row maximum of s)
    p  = exp(s - m')
    l  <- l exp(m - m') + row sum of p
    o  <- o exp(m - m') + p V

and at the end the result is o / l. The old output is mended by the same factor as the old sum, because it was built
with the old maximum.

*Causal*: a tile of queries that begins at row r and has T rows needs keys below r + T only. Stop there: half of the
work is gone. In the tiles on the diagonal, mask the keys that are later than the query.

Count: q, k, v and o once each, and k and v again for each tile of queries. For 8,192 tokens that is thousands of
times less traffic than with scores in memory, and the operator becomes bound by arithmetic. The FLOPs are the same.

In the backward pass the scores are made once more, from q, k and l + m of each row: recompute or keep, for the
third time on this ladder.
"""

from ...record import Rung, Speed, ToCompile
from .attention import CASES, SLIPS, attention_cost, exact, make

SOLUTION = '''import math

import torch
import triton
import triton.language as tl


@triton.jit
def _flash_kernel(q_ptr, k_ptr, v_ptr, o_ptr, T, H, K, scale, D: tl.constexpr, TILE: tl.constexpr):
    """Program (i, h): queries i * TILE to (i + 1) * TILE - 1 of head h. q and o [T, H, D], k and v [T, K, D]."""
    h = tl.program_id(1)
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    d = tl.arange(0, D)
    place = (row[:, None] * H + h) * D + d[None, :]
    q = tl.load(q_ptr + place, mask=row[:, None] < T, other=0.0) * scale
    m = tl.full([TILE], -float("inf"), tl.float32)
    l = tl.zeros([TILE], tl.float32)
    o = tl.zeros([TILE, D], tl.float32)
    group = h // (H // K)
    for start in range(0, tl.minimum((tl.program_id(0) + 1) * TILE, T), TILE):
        key = start + tl.arange(0, TILE)
        source = (key[:, None] * K + group) * D + d[None, :]
        k = tl.load(k_ptr + source, mask=key[:, None] < T, other=0.0)
        v = tl.load(v_ptr + source, mask=key[:, None] < T, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        s = tl.where((key[None, :] <= row[:, None]) & (key[None, :] < T), s, -float("inf"))
        higher = tl.maximum(m, tl.max(s, 1))
        p = tl.exp(s - higher[:, None])
        mend = tl.exp(m - higher)
        l = l * mend + tl.sum(p, 1)
        o = tl.dot(p, v, o * mend[:, None], input_precision="ieee")
        m = higher
    tl.store(o_ptr + place, o / l[:, None], mask=row[:, None] < T)


def attention(q, k, v):
    """q [T, H, d], k and v [T, K, d], float32 and contiguous, d a power of two from 16 on -> [T, H, d], causal."""
    T, H, d = q.shape
    o = torch.empty_like(q)
    _flash_kernel[(-(-T // 16), H)](q, k, v, o, T, H, k.shape[1], 1 / math.sqrt(d), D=d, TILE=16)
    return o
'''

RUNG = Rung(
    name="flash_attention",
    title="FlashAttention forward: scores that are never written",
    road="kernels",
    place=12,
    kind="triton",
    minutes=120,
    after=("attention",),
    solution=SOLUTION,
    holes=("_flash_kernel", "attention"),
    answers={"attention": exact},
    cases=CASES,
    slips=SLIPS,
    speed=Speed(lambda rng: make(rng, 64, 2, 1, 16),
                "The kernel reads keys that no query of its tile may see, or writes scores to memory: stop at "
                "the diagonal, and "
                "keep scores in registers.", attention_cost, ratio=1.3,
                large=lambda rng: make(rng, 2048, 8, 2, 64)),
    compiled=(
        ToCompile("_flash_kernel", {"q_ptr": "*fp32", "k_ptr": "*fp32", "v_ptr": "*fp32", "o_ptr": "*fp32", "T": "i32",
                                   "H": "i32", "K": "i32", "scale": "fp32"}, {"D": 64, "TILE": 32}),
    ),
    hints=("Begin with one tile of keys, no loop: s = tl.dot(q, tl.trans(k)), softmax, tl.dot(p, v).",
           "Then loop over tiles of keys with m, l and o; mend l and o with exp(m - higher).",
           "End the loop at min((i + 1) * TILE, T), and mask key <= row."),
    differences=
        "The shipped kernel has tiles of 128 by 128, works in base 2 (exp2), leaves masks out of full tiles, and on "
    "Hopper overlaps the products of one tile with the softmax of the other.",
    shipped="ops/attention/packed/flash_attention.py",
)  # fmt: skip
