r"""Grouped linear with experts in 4 bits or in blocks of GGUF files, such as the MXFP4 of gpt-oss.

4 bits have a scale and a zero for each group (``linear/packed/int4/int4_packing.py``);
``linear/packed/gguf/gguf_layout.py`` has the block types.

    y_r = W_e(r) x_s(r) + b_e(r)                  rows, experts and order as in ``grouped_linear.py``

An expert's codes are decoded in registers, tile by tile: no expert is rebuilt in memory. The types differ in the planes
of bits that their codes are made of, and in their scales; the rest of the kernel is one.

Shapes: x ``[R, I]`` or ``[T, I]``, arranged as ``name`` lays a matrix ``[E O, I]`` out (``int4``, or one of
``UNITS``), O a multiple of 16, starts ``[E + 1]`` int32, order ``[R]`` int32 or None, bias ``[E O]`` or None, result
``[R, O]``. A weight is rounded to x's dtype once, sums are in float32. Inference only: no gradient.
Sources: Gale et al. 2022, arXiv:2211.15841; OCP Microscaling Formats 1.0.

Bound by the bytes of the experts that are touched for few rows: in 4 bits a quarter of bfloat16's. By arithmetic at the
activations' rate from some hundred rows an expert on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...costs.work import Cost, touched
from ...spec.numbers.gguf import UNITS
from ..lang.jit import in_triton, kernel, next_power_of_2, require, tl
from ..lang.tiles import dot
from ..linear.packed.gguf import gguf_layout, gguf_matmul
from ..linear.packed.gguf.gguf_layout import ROWS
from ..linear.packed.int4 import int4_matmul
from ..linear.packed.int4.int4_packing import CHUNK, arrange_codes, group_of
from ..numerics import compute_dtype, sample
from ..registry import Case, Kernel, Op, in_torch, register
from . import grouped_linear
from .ordering import draw
from .ordering import reference as order_of
from .triton import expert_of_tile, rows_of_tile, tiling

GROUPS_OF_4 = "int4"
"""The name of 4 bits in groups; other names are those of ``UNITS``."""


def dense(arranged: Tensor, name: str, outputs: int, inputs: int, dtype: torch.dtype) -> Tensor:
    """Return the values ``[outputs, inputs]`` of all experts."""
    kind = UNITS.get(name)
    if kind is None:
        return int4_matmul.dense(arranged, outputs, dtype)[:, :inputs]
    return gguf_layout.dense(arranged, kind, outputs, inputs, dtype)


def reference(
    x: Tensor,
    arranged: Tensor,
    name: str,
    outputs: int,
    starts: Tensor,
    order: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Compute the product one expert at a time; shapes as above; ``outputs``: E O."""
    wide = compute_dtype(x.dtype)
    weight = dense(arranged, name, outputs, x.shape[1], wide)
    y = grouped_linear.reference(x.to(wide), weight, starts, order, None if bias is None else bias.to(wide))
    return y.to(x.dtype)


@kernel
def _codes(words, unit, half, there, WIDTH: tl.constexpr, R: tl.constexpr):  # type: ignore[no-untyped-def]
    """Extract numbers of WIDTH bits of 16 R outputs by 128 inputs, ``[R 16, 128]``, from a plane of units
    (``linear/packed/gguf/gguf_layout.py``); ``unit``: the offset of the plane for 16 rows, ``[R, 1]``."""
    pair = tl.arange(0, 8)
    if WIDTH == 4:  # words [j / 2][g][c][j % 2][h], pairs s
        w = tl.load(words + unit + half * 256 + tl.arange(0, 256)[None, :], there, 0)
        w = tl.reshape(w, (R, 2, 8, 4, 2, 2, 1, 1)) >> tl.reshape(
            pair // 2 * 4 + pair % 2 * 16, (1, 1, 1, 1, 1, 1, 4, 2)
        )
        w = tl.permute(w, (0, 5, 2, 1, 4, 6, 3, 7))
    elif WIDTH == 2:  # words [g][c][j], pairs (h, s)
        w = tl.load(words + unit + half * 128 + tl.arange(0, 128)[None, :], there, 0)
        both = tl.arange(0, 16)
        shift = both // 2 * 2 + both % 2 * 16
        w = tl.reshape(w, (R, 8, 4, 4, 1, 1, 1)) >> tl.reshape(shift, (1, 1, 1, 1, 2, 4, 2))
        w = tl.permute(w, (0, 4, 1, 3, 5, 2, 6))
    elif WIDTH == 1:  # words [g][c][j / 2], pairs (j % 2, h, s)
        lin = tl.arange(0, 64)
        w = tl.load(words + unit + (lin // 2 * 4 + half * 2 + lin % 2)[None, :], there, 0)
        all_ = tl.arange(0, 32)
        shift = all_ // 2 + all_ % 2 * 16
        w = tl.reshape(w, (R, 8, 4, 2, 1, 1, 1, 1)) >> tl.reshape(shift, (1, 1, 1, 1, 2, 2, 4, 2))
        w = tl.permute(w, (0, 5, 1, 3, 4, 6, 2, 7))
    else:  # words [j][g][c][h][q] of (t, o), which are bytes t + 2 o
        w = tl.load(words + unit + half * 512 + tl.arange(0, 512)[None, :], there, 0)
        four = tl.arange(0, 4)
        shift = four // 2 * 8 + four % 2 * 16
        w = tl.reshape(w, (R, 4, 8, 4, 2, 2, 1, 1)) >> tl.reshape(shift, (1, 1, 1, 1, 1, 1, 2, 2))
        w = tl.permute(w, (0, 4, 2, 1, 5, 6, 3, 7))
    return tl.reshape(w & ((1 << WIDTH) - 1), (R * 16, 128))


@kernel
def _by_row(numbers, R: tl.constexpr, GROUPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Reorder ``[R, 64 GROUPS]`` numbers of [j][g][group of 32 columns][h] -> ``[R 16, 4 GROUPS, 1]``."""
    return tl.reshape(tl.permute(tl.reshape(numbers, (R, 4, 8, GROUPS, 2)), (0, 4, 2, 1, 3)), (R * 16, 4 * GROUPS, 1))


@kernel
def _product(  # type: ignore[no-untyped-def]
    x, words, halves, bytes_, chosen, bias, starts, order, out, N, K, E, k_choices, down, across,
    INT4: tl.constexpr, GROUP: tl.constexpr, UNIT: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    BYTES: tl.constexpr, LESS: tl.constexpr, MINIMUM: tl.constexpr, OFFSET: tl.constexpr, MX: tl.constexpr,
    CHOSEN: tl.constexpr, ORDERED: tl.constexpr, BIAS: tl.constexpr, WIDTH: tl.constexpr, BM: tl.constexpr,
    R: tl.constexpr,
):  # fmt: skip
    """Compute as ``triton._grouped_product``. A program has R groups of 16 outputs, and takes 128 inputs at a time:
    half a unit of 16 outputs by 256 inputs, UNIT words each, or with INT4 a whole one of 128; ``down`` and ``across``:
    units of all experts. LOW, HIGH: bits of the planes; GROUP: inputs that share a scale, which is a byte (BYTES) LESS
    an offset."""
    expert, row, end = expert_of_tile(starts, tl.program_id(1), E, BM, WIDTH)
    if expert < E:
        r, inside, source = rows_of_tile(order, row, end, k_choices, BM, ORDERED)
        sixteen = tl.program_id(0) * R + tl.arange(0, R)
        there = (sixteen < N // 16)[:, None]
        unit = (expert.to(tl.int64) * (N // 16) + sixteen)[:, None]
        acc = tl.zeros([BM, R * 16], tl.float32)
        for start in range(0, K, 128):
            k = start + tl.arange(0, 128)
            a = tl.load(x + source.to(tl.int64)[:, None] * K + k[None, :], inside[:, None] & (k < K)[None, :], 0.0)
            # Words of the sixteens by 128 inputs; then of each its codes; then outputs by inputs.
            if INT4:
                pair = tl.arange(0, 8)
                shift = pair // 2 * 4 + pair % 2 * 16
                base = (unit + start // 128 * down) * UNIT
                w = tl.load(words + base + tl.arange(0, 256)[None, :], there, 0)
                w = tl.reshape(w, (R, 2, 8, 4, 4, 1, 1, 1)) >> tl.reshape(shift, (1, 1, 1, 1, 1, 2, 2, 2))
                code = tl.reshape(tl.permute(w & 15, (0, 6, 2, 1, 4, 5, 3, 7)), (R * 16, 128))
                lin = tl.arange(0, 128 // GROUP * 16)
                both = tl.load(words + base + 256 + lin[None, :], there, 0)
                both = tl.permute(tl.reshape(both, (R, 128 // GROUP, 8, 2)), (0, 3, 2, 1))
                both = tl.reshape(both, (R * 16, 128 // GROUP, 1))
                scale = (both << 16).to(tl.float32, bitcast=True)
                zero = (both & -65536).to(tl.float32, bitcast=True)
                value = tl.reshape(code.to(tl.float32), (R * 16, 128 // GROUP, GROUP)) * scale + zero
            else:
                base = (unit * across + start // 256) * UNIT
                half = start // 128 % 2
                code = _codes(words, base, half, there, LOW, R)
                if HIGH:
                    code = code | (_codes(words, base + 128 * LOW, half, there, HIGH, R) << LOW)
                if MX:  # e2m1 is the upper end of a float16 whose exponent is 14 less, and here twice as much
                    number = (((code & 8) << 12) | ((code & 7) << 9)).to(tl.int16).to(tl.float16, bitcast=True)
                    value = number.to(tl.float32) * 32768.0
                elif CHOSEN:
                    value = tl.load(chosen + code)
                else:
                    value = (code - OFFSET).to(tl.float32)
                value = tl.reshape(value, (R * 16, 128 // GROUP, GROUP))
                V: tl.constexpr = 2 if MINIMUM else 1
                GROUPS: tl.constexpr = 32 // GROUP
                CODES: tl.constexpr = 512 * (LOW + HIGH)  # bytes before the scales
                lin = tl.arange(0, 64 * GROUPS)
                at = (half * (32 * GROUPS) + lin // 2) * (2 * V) + lin % 2
                if BYTES:
                    scale = tl.load(bytes_ + base * 4 + CODES + at[None, :], there, 0).to(tl.float32) - LESS
                    own = tl.arange(0, 16)
                    behind = CODES // 2 + 64 * GROUPS * V + own // 2 * (2 * V) + own % 2
                    d = tl.load(halves + base * 2 + behind[None, :], there, 0.0).to(tl.float32)
                    d = tl.reshape(tl.permute(tl.reshape(d, (R, 8, 2)), (0, 2, 1)), (R * 16, 1, 1))
                    scale = _by_row(scale, R, GROUPS) * d
                    if MINIMUM:
                        least = tl.load(bytes_ + base * 4 + CODES + 2 + at[None, :], there, 0).to(tl.float32)
                        less = tl.load(halves + base * 2 + 2 + behind[None, :], there, 0.0).to(tl.float32)
                        less = tl.reshape(tl.permute(tl.reshape(less, (R, 8, 2)), (0, 2, 1)), (R * 16, 1, 1))
                        value = value * scale - _by_row(least, R, GROUPS) * less
                    else:
                        value = value * scale
                else:
                    scale = tl.load(halves + base * 2 + CODES // 2 + at[None, :], there, 0.0).to(tl.float32)
                    value = value * _by_row(scale, R, GROUPS)
                    if MINIMUM:
                        least = tl.load(halves + base * 2 + CODES // 2 + 2 + at[None, :], there, 0.0).to(tl.float32)
                        value = value + _by_row(least, R, GROUPS)
            acc = dot(a, tl.trans(tl.reshape(value, (R * 16, 128)).to(a.dtype)), acc)
        n = tl.program_id(0) * (R * 16) + tl.arange(0, R * 16)
        if BIAS:
            acc += tl.load(bias + expert * N + n, n < N, 0.0).to(tl.float32)[None, :]
        place = out + r.to(tl.int64)[:, None] * N + n[None, :]
        tl.store(place, acc.to(out.dtype.element_ty), inside[:, None] & (n < N)[None, :])


def _constants(name: str, arranged: Tensor) -> dict[str, Any]:
    kind = UNITS.get(name)
    if kind is None:
        none = {"LOW": 4, "HIGH": 0, "BYTES": False, "LESS": 0, "MINIMUM": False, "OFFSET": 0, "MX": False}
        return {"INT4": True, "GROUP": group_of(arranged), "UNIT": arranged.shape[2], **none, "CHOSEN": False}
    return {
        "INT4": False, "GROUP": kind.group, "UNIT": kind.unit // 4, "LOW": kind.planes[0],
        "HIGH": sum(kind.planes[1:]), "BYTES": kind.byte_scales is not None, "LESS": kind.byte_scales or 0,
        "MINIMUM": kind.minimum, "OFFSET": kind.offset, "MX": kind.exponents,
        "CHOSEN": kind.listed is not None and not kind.exponents,
    }  # fmt: skip


def triton_grouped_blocks(
    x: Tensor,
    arranged: Tensor,
    name: str,
    outputs: int,
    starts: Tensor,
    order: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Compute ``reference`` in Triton; can be captured in a CUDA graph.

    Raises:
        ValueError: a type that is not taken, or experts whose outputs are not whole sixteens.
    """
    require("grouped_blocks", x)
    experts = len(starts) - 1
    n, k = outputs // experts, x.shape[1]
    if name not in (GROUPS_OF_4, *UNITS) or n % ROWS:
        raise ValueError(
            f"grouped_blocks: experts of {n} outputs in {name}; it takes whole sixteens in {GROUPS_OF_4}, "
            f"{', '.join(UNITS)}"
        )
    kind = UNITS.get(name)
    if kind is None and k % CHUNK:
        raise ValueError(f"grouped_blocks: with {name} the inputs are a multiple of {CHUNK}, not {k}")
    x, arranged = x.contiguous(), arranged.contiguous()
    rows = len(x) if order is None else len(order)
    out = x.new_empty(rows, n)
    if rows and n:
        bm, bn, _, warps = tiling(rows, experts)
        sixteens = max(1, min(bn, 64) // ROWS)
        flat = arranged.view(-1).view(torch.uint8)
        down, across = (arranged.shape[1], arranged.shape[0]) if kind is None else arranged.shape[:2]
        scales = torch.bfloat16 if kind is None else getattr(torch, kind.scale_dtype)
        _product[(-(-n // (ROWS * sixteens)), rows // bm + min(experts, rows))](
            x, flat.view(torch.int32), flat.view(scales), flat, gguf_matmul.table(name, x.device),
            x if bias is None else bias.contiguous(), starts, starts if order is None else order, out, n, k, experts,
            1 if order is None else rows // len(x), down, across, **_constants(name, arranged),
            ORDERED=order is not None, BIAS=bias is not None, WIDTH=next_power_of_2(experts), BM=bm, R=sixteens,
            num_warps=warps,
        )  # fmt: skip
    return out


def cost(
    x: Tensor,
    arranged: Tensor,
    name: str,
    outputs: int,
    starts: Tensor,
    order: Tensor | None = None,
    bias: Tensor | None = None,
) -> Cost:
    """Return the cost, as ``grouped_linear`` has it: the experts that random routing touches."""
    experts = len(starts) - 1
    rows, own = len(x) if order is None else len(order), outputs // experts
    read = x.nbytes + touched(rows, 1, experts) / experts * arranged.nbytes + starts.nbytes
    read += sum(t.nbytes for t in (order, bias) if t is not None)
    return Cost(rows * own * (2 * x.shape[1] + 1), read, rows * own * x.element_size())


def _inputs(
    name: str, tokens: int, experts: int, k: int, outputs: int, inputs: int, device: torch.device | str
) -> dict[str, Any]:
    generator = torch.Generator(device).manual_seed(tokens)
    if name.startswith(GROUPS_OF_4):
        size = int(name.removeprefix(GROUPS_OF_4) or 128)
        random: dict[str, Any] = {"device": device, "generator": generator}
        codes = torch.randint(0, 16, (experts * outputs, inputs), dtype=torch.uint8, **random)
        scale = torch.rand(experts * outputs, inputs // size, **random) / 64 + 1e-3
        arranged, name = arrange_codes(codes, scale, -8 * scale), GROUPS_OF_4
    else:
        arranged = gguf_matmul.drawn(name, experts * outputs, inputs, device, tokens)
    order, _, starts = order_of(draw(tokens, k, experts, tokens, device), experts)
    return {"arranged": arranged, "name": name, "outputs": experts * outputs, "starts": starts, "order": order}


def _examples() -> Sequence[dict[str, Any]]:
    made = []
    for name, tokens, experts, k, outputs, inputs, biased in (
        ("MXFP4", 5, 4, 2, 32, 320, True), ("Q4_K", 3, 2, 1, 16, 256, False), ("Q4_1", 4, 2, 2, 16, 288, False),
        ("Q4_0", 3, 3, 1, 16, 160, True), ("int4", 5, 4, 2, 48, 128, True), ("int432", 3, 2, 2, 16, 256, False),
        ("Q6_K", 3, 2, 2, 16, 512, False), ("Q2_K", 3, 2, 1, 16, 256, True), ("Q3_K", 3, 2, 1, 16, 256, False),
        ("Q5_0", 3, 2, 1, 16, 160, False), ("Q5_1", 2, 2, 1, 16, 320, False), ("Q5_K", 3, 2, 2, 32, 256, True),
        ("Q8_0", 3, 2, 2, 16, 416, False), ("IQ4_NL", 3, 2, 1, 16, 288, False),
    ):  # fmt: skip
        bias = sample(experts * outputs, seed=3) if biased else None
        made.append({"x": sample(tokens, inputs), **_inputs(name, tokens, experts, k, outputs, inputs, "cpu"),
                     "bias": bias})  # fmt: skip
    return made


def _cases() -> Sequence[Case]:
    def case(name: str, tokens: int) -> Case:
        def make(device: torch.device, seed: int) -> Mapping[str, Any]:
            generator = torch.Generator(device).manual_seed(seed)
            x = torch.randn(tokens, 2880, device=device, dtype=torch.bfloat16, generator=generator)
            return {"x": x, **_inputs(name, tokens, 32, 4, 2880, 2880, device), "bias": None}

        return Case(f"up of gpt-oss-20b, {name}, {tokens} tokens", make)

    four = [case("MXFP4", tokens) for tokens in (1, 16, 64, 256, 2048)]
    return [*four, *(case(name, tokens) for name in ("Q6_K", "Q8_0") for tokens in (16, 256))]


def _kernels() -> Sequence[Kernel]:
    pointers = {"x": "*bf16", "words": "*i32", "bytes_": "*u8", "chosen": "*fp32", "bias": "*bf16", "out": "*bf16"}
    indices = dict.fromkeys(("starts", "order"), "*i32")
    indices |= dict.fromkeys(("N", "K", "E", "k_choices", "down", "across"), "i32")
    common = {"ORDERED": True, "BIAS": True, "WIDTH": 32, "R": 4}

    def of(label: str, name: str, halves: str, bm: int, warps: int, words: int) -> Kernel:
        constants = _constants(name, torch.empty(1, 1, words))
        types = pointers | {"halves": halves} | indices
        return Kernel(label, _product, types, constants | common | {"BM": bm}, ("N", "K"), warps)

    return [
        of("MXFP4, few rows", "MXFP4", "*bf16", 16, 4, 0),
        of("Q4_K, many rows", "Q4_K", "*fp16", 128, 8, 0),
        of("Q6_K, few rows", "Q6_K", "*fp16", 16, 4, 0),
        of("Q5_K, many rows", "Q5_K", "*fp16", 128, 8, 0),
        of("Q8_0, few rows", "Q8_0", "*fp16", 16, 4, 0),
        of("IQ4_NL, few rows", "IQ4_NL", "*fp16", 16, 4, 0),
        of("int4, few rows", "int4", "*bf16", 16, 4, 272),
    ]


register(
    Op(
        name="grouped_blocks",
        reference=reference,
        cost=cost,
        implementations={
            "torch": in_torch(reference),
            "triton": in_triton(triton_grouped_blocks),
        },
        examples=_examples,
        peers={"torch": reference},
        directions=("forward",),
        cases=_cases,
        kernels=_kernels,
        error_ratio=4.0,
        error_note="weights are rounded to the dtype first; float32 is summed along I one product after another",
    )
)
