r"""Attention compares every token with every other and does not know their order. *Rotary embedding* (RoPE) puts the
order in by turning: each head's vector is cut into d / 2 pairs, and pair i of the token at position p is turned by
the angle p * theta_i. The fast pairs turn once every few tokens, the slow ones once in ten thousand.

Why turning? The product of a query at p and a key at q then depends on p - q alone, because turning both by the
same angle changes no product. Check it with one pair and two angles.

The pairs are (x[i], x[i + d/2]), the layout of Hugging Face checkpoints:

    a' = a cos - b sin        b' = b cos + a sin

The gradient turns back: the same kernel with -sin. (A rotation's transpose is its inverse.) So one kernel with a
`sign` does both, and there is nothing to keep from the forward pass but the positions.

It is bound by bytes with room to spare: 3 FLOPs an element. cos and sin `[T, d/2]` are the same for all heads, so
load them once for a token and use them for all of its heads: with 32 heads, loading them for each is 50% more
traffic.
"""

import torch

from ....costs.work import Cost
from ...record import Case, Live, Rung, Slip, Speed, ToCompile
from ..inputs import normal

SOLUTION = '''import torch
import triton
import triton.language as tl


@triton.jit
def _rope_kernel(x_ptr, cos_ptr, sin_ptr, y_ptr, heads, half, sign, HEADS: tl.constexpr, HALF: tl.constexpr):
    """One token a program, all of its heads: x [T, heads, 2 * half], cos and sin [T, half]."""
    token = tl.program_id(0).to(tl.int64)
    plane = tl.arange(0, HALF)[None, :]
    head = tl.arange(0, HEADS)[:, None]
    inside = (head < heads) & (plane < half)
    cos = tl.load(cos_ptr + token * half + plane, mask=plane < half, other=0.0)
    sin = tl.load(sin_ptr + token * half + plane, mask=plane < half, other=0.0) * sign
    place = (token * heads + head) * 2 * half + plane
    a = tl.load(x_ptr + place, mask=inside, other=0.0)
    b = tl.load(x_ptr + place + half, mask=inside, other=0.0)
    tl.store(y_ptr + place, a * cos - b * sin, mask=inside)
    tl.store(y_ptr + place + half, b * cos + a * sin, mask=inside)


def rotate(x, cos, sin, sign):
    """x [T, heads, d] turned by the angles of cos and sin [T, d / 2]; sign -1.0 turns back."""
    y = torch.empty_like(x)
    tokens, heads, d = x.shape
    if x.numel():
        sizes = {"HEADS": triton.next_power_of_2(heads), "HALF": triton.next_power_of_2(d // 2)}
        _rope_kernel[(tokens,)](x, cos, sin, y, heads, d // 2, sign, **sizes)
    return y


def forward(x, cos, sin):
    """x [T, heads, d], cos and sin [T, d / 2], float32 and contiguous -> x turned."""
    return rotate(x, cos, sin, 1.0)


def backward(g, cos, sin):
    """dL/dx from g = dL/dy."""
    return rotate(g, cos, sin, -1.0)
'''


def _turn(x, cos, sin):
    a, b = x.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def _neighbours(x, cos, sin):
    a, b = x[..., ::2], x[..., 1::2]
    cos, sin = cos[:, None], sin[:, None]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)


def _make(rng, tokens, heads, d):
    angle = torch.from_numpy(rng.uniform(0, 6, (tokens, d // 2))).float()
    return [normal(rng, tokens, heads, d), angle.cos(), angle.sin()]


def _live(mine, shipped):
    from ...live import Launches

    def launch(grid, q, k, cos, sin, q_out, k_out, q_heads, k_heads, planes, *rest, **options):
        tensors = q, k, cos, sin, q_out, k_out
        if not all(str(x.dtype) == "torch.float32" and x.is_contiguous() for x in tensors):
            shipped[grid](*tensors, q_heads, k_heads, planes, *rest, **options)
            return
        import triton

        for x, y, heads in ((q, q_out, q_heads), (k, k_out, k_heads)):
            sizes = {"HEADS": triton.next_power_of_2(heads), "HALF": triton.next_power_of_2(planes)}
            mine._rope_kernel[(len(q),)](x, cos, sin, y, heads, planes, rest[8], **sizes)

    return Launches(launch)


RUNG = Rung(
    name="rope",
    title="RoPE: positions as rotations",
    road="kernels",
    place=10,
    kind="triton",
    minutes=45,
    after=("vector_add", "chain_rule"),
    solution=SOLUTION,
    holes=("_rope_kernel", "rotate", "forward", "backward"),
    answers={"forward": _turn, "backward": lambda g, cos, sin: _turn(g, cos, -sin)},
    cases=(
        Case("one token, one head", lambda rng: _make(rng, 1, 1, 16),
             "a' = a cos - b sin, b' = b cos + a sin, with the old a in b'."),
        Case("5 tokens, 4 heads", lambda rng: _make(rng, 5, 4, 32),
             "cos and sin belong to a token, and are the same for its heads."),
        Case("3 heads of 20", lambda rng: _make(rng, 4, 3, 20),
             "Neither heads nor planes are a power of two: mask both."),
        Case("no token", lambda rng: _make(rng, 0, 2, 16), "No token, no program: return before the launch."),
        Case("gradient", lambda rng: _make(rng, 6, 4, 32), "The gradient of a rotation is the rotation back: -sin.",
             entry="backward"),
    ),
    slips=(
        Slip(_neighbours, "The pairs are neighbours here (2i, 2i + 1); this layout pairs i with i + d/2."),
        Slip(lambda x, cos, sin: _turn(x, cos, -sin), "This turns the other way: a' = a cos - b sin."),
        Slip(_turn, "The gradient must turn back, by the opposite angle.", "backward"),
    ),
    speed=Speed(lambda rng: _make(rng, 8, 32, 32),
                "Load cos and sin once for a token, not once for each head.",
                lambda x, cos, sin: Cost(3 * x.numel(), x.nbytes + cos.nbytes + sin.nbytes, x.nbytes), ratio=1.3,
                large=lambda rng: _make(rng, 8192, 32, 128)),
    compiled=(ToCompile("_rope_kernel", {"x_ptr": "*fp32", "cos_ptr": "*fp32", "sin_ptr": "*fp32", "y_ptr": "*fp32",
                                        "heads": "i32", "half": "i32", "sign": "fp32"}, {"HEADS": 32, "HALF": 64}, (
                                            "half",)),),
    hints=("Make a tile [HEADS, HALF] of places: (token * heads + head) * 2 * half + plane.",
           "a is at the place, b is half further.",
           "Multiply sin by sign once; forward and backward are then the same kernel."),
    differences=
        "The shipped kernels do queries and keys in one launch, join the norm of query and key heads, and one of "
    "them writes the keys straight into the KV cache.",
    live=Live("ops", {"transect.ops.position.rotary:_rotary_kernel": _live}, ("rotary",)),
    shipped="ops/position/rotary.py",
)  # fmt: skip
