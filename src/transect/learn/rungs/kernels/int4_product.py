r"""To make one token, every weight of the model is read once and used for one multiplication and one addition. So
decoding is bound by the bytes of the weights, and half the bits are twice the tokens. That is why quantization is
everywhere.

The simplest form: groups of G neighbours share a scale and a zero, and each weight is a 4-bit code:

    W[n, k] = scale[n, k // G] * code[n, k] + zero[n, k // G]        code in 0..15

Two codes share a byte. Here byte j of a row holds code j in its low half and code j + K/2 in its high half. (Why not
neighbours? Because then unpacking must move every other value, and this way both halves are already in order.)

The product y[n] = sum over k of W[n, k] x[k] decodes on the way. Load a tile of bytes, split it with `& 15` and
`>> 4`, scale, multiply with the two parts of x, and add. **Never write the decoded weights to memory**: that would
be 8 times the bytes that you have just saved. Decoding costs FLOPs, which decoding has plenty of.

With scale and zero in float32 for each group of 32, a weight has 4 + 64 / 32 = 6 bits. In bfloat16 it is 5, with
larger groups less. `transect serve --quantization` does it with a whole model.
"""

import torch

from ....costs.work import Cost
from ...record import Case, Rung, Slip, Speed, ToCompile
from ..inputs import normal

SOLUTION = '''import torch
import triton
import triton.language as tl


@triton.jit
def _int4_kernel(x_ptr, codes_ptr, scale_ptr, zero_ptr, y_ptr, N, K, G: tl.constexpr, ROWS: tl.constexpr):
    """ROWS outputs a program, group by group. codes uint8 [N, K / 2], scale and zero [N, K / G], x [K], y [N]."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row[:, None] < N
    k = tl.arange(0, G)[None, :]
    total = tl.zeros([ROWS], tl.float32)
    for start in range(0, K // 2, G):
        codes = tl.load(codes_ptr + row[:, None] * (K // 2) + start + k, mask=inside, other=0)
        low, high = (codes & 15).to(tl.float32), (codes >> 4).to(tl.float32)
        x_low = tl.load(x_ptr + start + k)
        x_high = tl.load(x_ptr + K // 2 + start + k)
        group = row * (K // G) + start // G
        half = K // 2 // G
        for_low = tl.load(scale_ptr + group, mask=row < N, other=0.0) * tl.sum(low * x_low, 1)
        for_high = tl.load(scale_ptr + group + half, mask=row < N, other=0.0) * tl.sum(high * x_high, 1)
        zero_low = tl.load(zero_ptr + group, mask=row < N, other=0.0) * tl.sum(x_low, 1)
        zero_high = tl.load(zero_ptr + group + half, mask=row < N, other=0.0) * tl.sum(x_high, 1)
        total += for_low + for_high + zero_low + zero_high
    tl.store(y_ptr + row, total, mask=row < N)


def product(x, codes, scale, zero):
    """x [K], codes uint8 [N, K / 2] (byte j: code j low, code j + K / 2 high), scale and zero [N, K / G] -> y [N].
    G is a power of two, and K a multiple of 2 G."""
    N, K = codes.shape[0], 2 * codes.shape[1]
    y = torch.empty(N, device=x.device, dtype=x.dtype)
    _int4_kernel[(-(-N // 16),)](x, codes, scale, zero, y, N, K, G=K // scale.shape[1], ROWS=16)
    return y
'''


def _decoded(codes, scale, zero, swapped=False):
    low, high = (codes & 15).double(), (codes >> 4).double()
    whole = torch.cat((high, low) if swapped else (low, high), 1)
    group = whole.shape[1] // scale.shape[1]
    return whole * scale.double().repeat_interleave(group, 1) + zero.double().repeat_interleave(group, 1)


def _pieces(codes, scale, zero):
    """Decode some rows at a time: a large matrix would need eight bytes for each half byte."""
    for rows in zip(*(each.split(1024) for each in (codes, scale, zero)), strict=True):
        yield _decoded(*rows)


def _product(x, codes, scale, zero):
    return torch.cat([piece @ x for piece in _pieces(codes, scale, zero)])


def _norms(x, codes, scale, zero):
    return x.norm() * sum(float(piece.norm()) ** 2 for piece in _pieces(codes, scale, zero)) ** 0.5


def _neighbours(x, codes, scale, zero):
    whole = torch.stack(((codes & 15).double(), (codes >> 4).double()), 2).flatten(1)
    group = whole.shape[1] // scale.shape[1]
    return (whole * scale.repeat_interleave(group, 1) + zero.repeat_interleave(group, 1)) @ x


def _make(rng, n, k, group):
    codes = torch.from_numpy(rng.integers(0, 256, (n, k // 2), dtype="uint8"))
    return [normal(rng, k), codes, normal(rng, n, k // group).abs() * 0.1, normal(rng, n, k // group)]


RUNG = Rung(
    name="int4_product",
    title="A product with 4-bit weights, decoded on the way",
    road="kernels",
    place=13,
    kind="triton",
    minutes=75,
    after=("matmul_tiled",),
    solution=SOLUTION,
    holes=("_int4_kernel", "product"),
    answers={"product": _product},
    # A single output can be near zero: the error is relative to the norms.
    scales={"product": _norms},
    tolerance=2e-6,
    cases=(
        Case("16 by 64, groups of 32", lambda rng: _make(rng, 16, 64, 32),
             "Byte j holds code j in its low half and code j + K/2 in its high half; each group has its scale "
             "and zero."),
        Case("16 by 256", lambda rng: _make(rng, 16, 256, 32),
             "Step through the bytes, and through x in two places at once."),
        Case("37 rows", lambda rng: _make(rng, 37, 128, 32), "37 rows are no multiple of the tile: mask rows."),
        Case("groups of 64", lambda rng: _make(rng, 20, 256, 64), "The group's size is K / scale.shape[1]."),
        Case("one row", lambda rng: _make(rng, 1, 64, 32), "A single output needs the mask too."),
    ),
    slips=(
        Slip(lambda x, codes, scale, zero: _decoded(codes, scale, zero, True) @ x,
             "Low and high halves are exchanged."),
        Slip(_neighbours, "The two codes of a byte are K/2 apart, not neighbours."),
        Slip(lambda x, codes, scale, zero: _decoded(codes, scale, 0 * zero) @ x,
             "The zero is missing: W = scale * code + zero."),
    ),
    speed=Speed(lambda rng: _make(rng, 64, 512, 64),
                "More memory is touched than half a byte a weight: decode in registers, and load each scale once "
                "for a group.",
                lambda x, codes, scale, zero: Cost(4 * codes.numel(),
                                                   codes.nbytes + scale.nbytes + zero.nbytes + x.nbytes,
                                                   4 * codes.shape[0]), ratio=1.2,
                large=lambda rng: _make(rng, 32768, 8192, 64)),
    compiled=(
        ToCompile("_int4_kernel", {"x_ptr": "*fp32", "codes_ptr": "*u8", "scale_ptr": "*fp32", "zero_ptr": "*fp32",
                                  "y_ptr": "*fp32", "N": "i32", "K": "i32"}, {"G": 64, "ROWS": 16}, ("N", "K")),
    ),
    hints=("low = codes & 15, high = codes >> 4, both to float32.",
           "sum of (scale * code + zero) * x over a group = scale * sum(code * x) + zero * sum(x).",
           "The group of the low half is start // G, that of the high half is K // 2 // G further."),
    differences=
        "The shipped product for few rows reads an order of codes in which the tensor cores want them, so unpacking "
    "is one shift and one fused multiply-add for several codes at a time.",
    shipped="ops/linear/packed/int4/int4_rows.py",
)  # fmt: skip
