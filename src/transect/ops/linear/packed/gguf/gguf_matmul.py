r"""Product with a weight in a block type of GGUF files, in the file's own bits.

    y_to = sum_i x_ti W_oi + b_o        W_oi = scale (code - offset)  or  scale code + minimum, by groups of 16 or 32 i

``gguf_layout.py`` says how the bits lie. On Hopper the weight is read in its own bits and decoded in registers: for up
to ``gguf_rows.MOST_ROWS`` rows of bfloat16 by ``gguf_rows.cu``, for up to ``block_tiles.MOST_ROWS`` by
``gguf_tiles.cu``. More rows, and other GPUs, rebuild the matrix in the activations' dtype for the time of the product
(``dequantize``), and multiply by that. ``gguf_row.cu`` takes one row, ``gguf_chain.cu`` four products
of one row in one launch.

Shapes: x ``[T, I]``, arranged uint8 (``arranged_shape``), name a key of ``UNITS``, outputs O, bias ``[O]`` or None,
result ``[T, O]`` in x's dtype. Inference only: no gradient.
Source of the types: ggml (``formats/ggml_blocks.py``); MXFP4: OCP Microscaling Formats 1.0.

Bound by bytes for few tokens: 0.33 to 1.06 bytes a weight, against 2 in bfloat16.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .....costs.work import Cost
from .....formats.ggml_blocks import BLOCK_TYPES
from .....hardware.device import target_of
from .....spec.numbers.gguf import UNITS, BlockUnits
from .... import shapes
from ....lang.jit import TRITON_TARGETS, in_triton, kernel, require, rows_of, runs_triton, tl
from ....numerics import compute_dtype, sample
from ....registry import Case, Implementation, Kernel, Op, Unavailable, in_torch, register
from ... import gate_up
from .. import block_tiles
from . import gguf_chain, gguf_row, gguf_rows, gguf_tiles
from .gguf_layout import COLUMNS, ROWS, arrange, dense

log = logging.getLogger(__name__)
PORTABLE_ROWS = 24
"""The most rows for ``gguf_rows.cu`` where there is no kernel for more; it reads the blocks again for every eight."""


def reference(x: Tensor, arranged: Tensor, name: str, outputs: int, bias: Tensor | None = None) -> Tensor:
    """Compute the product; shapes as above."""
    wide = compute_dtype(x.dtype)
    y = x.to(wide) @ dense(arranged, UNITS[name], outputs, x.shape[1], wide).T
    return (y if bias is None else y + bias.to(wide)).to(x.dtype)


@kernel
def _bits(words, j, lane, h, q, s, odd, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Extract the numbers of WIDTH bits at some places of a plane of a unit, see ``gguf_layout.py``."""
    if WIDTH == 4:
        word = (j // 2 * 32 + lane) * 4 + j % 2 * 2 + h
        at = 4 * s + 16 * odd
    elif WIDTH == 2:
        word = (j // 4 * 32 + lane) * 4 + j % 4
        at = 2 * (4 * h + s) + 16 * odd
    elif WIDTH == 1:
        word = lane * 4 + j // 2
        at = 8 * (j % 2) + 4 * h + s + 16 * odd
    else:
        word = (j * 32 + lane) * 4 + h * 2 + q
        at = 8 * (s % 2 + 2 * odd)
    return (tl.load(words + word) >> at) & ((1 << WIDTH) - 1)


@kernel
def _dequantize(  # type: ignore[no-untyped-def]
    words, bytes_, halves, chosen, out, O, I, across,
    UNIT: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, GROUP: tl.constexpr, BYTES: tl.constexpr,
    BIAS: tl.constexpr, MINIMUM: tl.constexpr, OFFSET: tl.constexpr, CHOSEN: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """Dequantize one unit, of the same bytes as words, bytes and halves: 16 rows by 256 columns of ``out [O, I]``.
    ``APART``: groups of 16 rows that alternate become its upper and its lower half."""
    unit = tl.program_id(0).to(tl.int64)
    r = tl.arange(0, 16)[:, None]
    k = tl.arange(0, 256)[None, :]
    h = r // 8
    g = r % 8
    j = k // 32
    q = k % 32 // 16
    s = k % 32 // 8
    odd = k % 2
    lane = 4 * g + k % 8 // 2
    code = _bits(words + unit * (UNIT // 4), j, lane, h, q, s, odd, LOW)
    if HIGH:
        upper = _bits(words + unit * (UNIT // 4) + 128 * LOW, j, lane, h, q, s, odd, HIGH)
        code = code | (upper << LOW)
    if CHOSEN:
        value = tl.load(chosen + code)
    else:
        value = (code - OFFSET).to(tl.float32)
    V: tl.constexpr = 2 if MINIMUM else 1
    SCALES: tl.constexpr = 512 * (LOW + HIGH)
    at = ((j * 8 + g) * (32 // GROUP) + k % 32 // GROUP) * (2 * V) + h
    if BYTES:
        scale = (tl.load(bytes_ + unit * UNIT + SCALES + at).to(tl.int32) - BIAS).to(tl.float32)
        BEHIND: tl.constexpr = (SCALES + 256 // GROUP * 16 * V) // 2
        d = tl.load(halves + unit * (UNIT // 2) + BEHIND + g * (2 * V) + h).to(tl.float32)
        value = value * (scale * d)
        if MINIMUM:
            least = tl.load(bytes_ + unit * UNIT + SCALES + at + 2).to(tl.float32)
            value -= least * tl.load(halves + unit * (UNIT // 2) + BEHIND + g * (2 * V) + 2 + h).to(tl.float32)
    else:
        value = value * tl.load(halves + unit * (UNIT // 2) + SCALES // 2 + at).to(tl.float32)
        if MINIMUM:
            value += tl.load(halves + unit * (UNIT // 2) + SCALES // 2 + at + 2).to(tl.float32)
    sixteen = unit // across
    row = (sixteen // 2 * 16 + sixteen % 2 * (O // 2) if APART else sixteen * 16) + r
    column = unit % across * 256 + k
    tl.store(out + row * I + column, value.to(out.dtype.element_ty), (row < O) & (column < I))


@cache
def table(name: str, device: torch.device) -> Tensor:
    """Return the values of a type's codes, float32 ``[16]``; for types without such a list one 0, which is not read."""
    chosen = UNITS[name].listed if name in UNITS else None
    return torch.tensor(chosen or (0,), dtype=torch.float32, device=device)


def _constants(kind: BlockUnits) -> dict[str, Any]:
    return {
        "UNIT": kind.unit, "LOW": kind.planes[0], "HIGH": sum(kind.planes[1:]), "GROUP": kind.group,
        "BYTES": kind.byte_scales is not None, "BIAS": kind.byte_scales or 0, "MINIMUM": kind.minimum,
        "OFFSET": kind.offset, "CHOSEN": kind.listed is not None,
    }  # fmt: skip


def dequantize(
    arranged: Tensor, name: str, outputs: int, inputs: int, dtype: torch.dtype, *, apart: bool = False
) -> Tensor:
    """Return the values ``[O, I]``, by Triton; rounded once. ``apart``: gate and up, whose groups of 16 rows alternate,
    become the upper and the lower half."""
    require("gguf_dequantize", torch.empty(0, dtype=dtype, device=arranged.device))
    kind, arranged = UNITS[name], arranged.contiguous()
    out = torch.empty(outputs, inputs, dtype=dtype, device=arranged.device)
    down, across, _ = arranged.shape
    if out.numel():
        flat = arranged.view(-1)
        _dequantize[(down * across,)](
            flat.view(torch.int32), flat, flat.view(getattr(torch, kind.scale_dtype)), table(name, arranged.device),
            out, outputs, inputs, across, **_constants(kind), APART=apart, num_warps=4,
        )  # fmt: skip
    return out


def rebuilt(x: Tensor, arranged: Tensor, name: str, outputs: int, bias: Tensor | None = None) -> Tensor:
    """Compute ``reference`` on a matrix that is dequantized for this call only."""
    return F.linear(x, dequantize(arranged, name, outputs, x.shape[1], x.dtype), bias)


class Products:
    """``reference`` on a device, whichever way is quicker for the number of rows; resolved once.

    ``dependent``: launches begin while the kernel before still ends. ``chained``: ``gguf_row.cu`` and
    ``gguf_chain.cu`` take one row.
    """

    def __init__(self, device: torch.device | str, *, dependent: bool = False, chained: bool = False) -> None:
        device = torch.device(device)
        self.dependent = dependent
        self._rows: gguf_rows.GGUFRows | None = None
        self.row: gguf_row.GGUFRow | None = None
        self.chain: gguf_chain.GGUFChain | None = None
        self._tiles: gguf_tiles.GGUFTiles | None = None
        self._dense_gate = cache(gate_up.best_launcher)
        self._triton = runs_triton(torch.empty(0, device=device))
        target = target_of(device)
        if target.capability >= (8, 0):
            try:
                self._rows = gguf_rows.GGUFRows(device)
                self._tiles = gguf_tiles.GGUFTiles(device) if target.hopper else None
                if chained and target.hopper:
                    self.row, self.chain = gguf_row.GGUFRow(device), gguf_chain.GGUFChain(device)
            except Unavailable as reason:
                log.warning("blocks of GGUF files are rebuilt for each product, which is slower: %s", reason)

    def kernel(
        self, x: Tensor, arranged: Tensor, name: str, outputs: int, bias: Tensor | None = None
    ) -> gguf_rows.GGUFRows | gguf_tiles.GGUFTiles | None:
        """Return the kernel that reads the blocks themselves for this product; None if the matrix is rebuilt."""
        if self._rows is None or gguf_rows.refusal(x, arranged, name, outputs, bias) is not None:
            return None
        if len(x) <= (PORTABLE_ROWS if self._tiles is None else gguf_rows.MOST_ROWS):
            return self._rows
        if (
            self._tiles is None
            or len(x) > block_tiles.MOST_ROWS
            or gguf_tiles.refusal(x, arranged, name, outputs, bias) is not None
        ):
            return None
        return self._tiles

    def _alone(
        self, x: Tensor, arranged: Tensor, name: str, outputs: int, bias: Tensor | None = None, gated: bool = False
    ) -> Tensor | None:
        """Return the product of one row by ``gguf_row.cu``, where it takes it."""
        if self.row is None or not gguf_row.takes(x, ((outputs, x.shape[-1], gated),)):
            return None
        part = gguf_row.BlockPart(arranged, name, outputs)
        if gguf_row.refusal((part,)) is not None:
            return None
        return self.row(x, (part,), bias, gated=gated, dependent_launch=self.dependent)[0]

    def __call__(self, x: Tensor, arranged: Tensor, name: str, outputs: int, bias: Tensor | None = None) -> Tensor:
        """Compute ``reference``. Can be captured in a CUDA graph."""
        alone = self._alone(x, arranged, name, outputs, bias)
        if alone is not None:
            return alone
        kernel = self.kernel(x, arranged, name, outputs, bias)
        if kernel is not None:
            return kernel(x, arranged, name, outputs, bias, dependent_launch=self.dependent)
        if self._triton and x.dtype != torch.float64:
            return rebuilt(x, arranged, name, outputs, bias)
        return reference(x, arranged, name, outputs, bias)

    def gated(self, x: Tensor, arranged: Tensor, name: str, outputs: int) -> Tensor | None:
        """Compute ``silu(gate) * up [T, O / 2]`` of a weight whose groups of 16 rows are gate and up alternately, the
        gate beside the product; None if no kernel does that. For many rows on Hopper the matrix is dequantized for the
        product of ``gate_up.py``."""
        alone = self._alone(x, arranged, name, outputs, gated=True)
        if alone is not None:
            return alone
        kernel = self.kernel(x, arranged, name, outputs)
        if kernel is None and self._tiles is not None and x.element_size() == 2 and outputs % (2 * ROWS) == 0:
            rows = dequantize(arranged, name, outputs, x.shape[1], x.dtype, apart=True)
            return self._dense_gate()(x, rows, dependent_launch=self.dependent)
        if kernel is None or (kernel is self._tiles and block_tiles.refusal(outputs, None, gated=True)):
            return None
        return kernel(x, arranged, name, outputs, gated=True, dependent_launch=self.dependent)


def triton_gguf_matmul(x: Tensor, arranged: Tensor, name: str, outputs: int, bias: Tensor | None = None) -> Tensor:
    """Compute ``rebuilt``, for any layout of x."""
    require("gguf_matmul", x)
    return rebuilt(rows_of(x), arranged, name, outputs, bias)


def cost(x: Tensor, arranged: Tensor, name: str, outputs: int, bias: Tensor | None = None) -> Cost:
    """Count a product and a sum for each weight and row; the blocks are read once."""
    tokens, inputs = x.shape
    read = x.nbytes + arranged.nbytes + (0 if bias is None else bias.nbytes)
    return Cost(2 * tokens * outputs * inputs, read, tokens * outputs * x.element_size())


def random_blocks(name: str, outputs: int, inputs: int, device: torch.device | str = "cpu", seed: int = 1) -> Tensor:
    """Generate rows of whole blocks, uint8 ``[O, bytes]`` as in a file, of random codes whose values are small; for
    tests and measurements."""
    block = BLOCK_TYPES[name]
    generator = torch.Generator(device).manual_seed(seed)
    random: dict[str, Any] = {"dtype": torch.uint8, "device": device, "generator": generator}
    blocks = torch.randint(0, 256, (outputs, inputs // block.block, block.nbytes), **random)
    small = {"Q8_0": 0x18, "IQ4_NL": 0x18, "Q6_K": 0x04, "Q2_K": 0x20, "Q3_K": 0x18}.get(name, 0x10)
    for at in block.halves:
        blocks[..., at + 1] = small
    if not block.halves:  # scales are exponents
        blocks[..., 0] = 120 + blocks[..., 0] % 8
    return blocks.flatten(1)


def drawn(name: str, outputs: int, inputs: int, device: torch.device | str = "cpu", seed: int = 1) -> Tensor:
    """Generate ``random_blocks``, arranged, filled up to whole units."""
    whole = -(-inputs // COLUMNS) * COLUMNS
    return arrange(name, random_blocks(name, outputs, whole, device, seed), whole)


def _inputs(name: str, x: Tensor, outputs: int, biased: bool = False, seed: int = 1) -> dict[str, Any]:
    bias = sample(outputs, seed=2).to(x) if biased else None
    return {"x": x, "arranged": drawn(name, outputs, x.shape[1], x.device, seed), "name": name, "outputs": outputs,
            "bias": bias}  # fmt: skip


def _examples() -> Sequence[dict[str, Any]]:
    sizes = ((3, 40, 512), (1, 16, 256), (17, 33, 320))
    made = []
    for number, name in enumerate(UNITS):
        tokens, outputs, inputs = sizes[number % 3]
        made.append(_inputs(name, sample(tokens, inputs), outputs, number % 2 == 1))
    return made


def _cases() -> Sequence[Case]:
    def case(name: str, rows: int) -> Case:
        def make(device: torch.device, seed: int) -> Mapping[str, Any]:
            generator = torch.Generator(device).manual_seed(seed)
            x = torch.randn(rows, 4096, device=device, dtype=torch.bfloat16, generator=generator)
            return _inputs(name, x, 14336, seed=seed)

        return Case(f"up of {shapes.LLAMA_8B.name}, {name}, {rows} rows", make)

    return [case(name, rows) for name in ("Q4_K", "Q6_K", "Q8_0") for rows in (1, 8, 64, 2048)]


def _kernels() -> Sequence[Kernel]:
    def of(name: str) -> Kernel:
        kind = UNITS[name]
        halves = "*bf16" if kind.exponents else "*fp16"
        types = {"words": "*i32", "bytes_": "*u8", "halves": halves, "chosen": "*fp32", "out": "*bf16"}
        types |= dict.fromkeys(("O", "I", "across"), "i32")
        return Kernel(name, _dequantize, types, _constants(kind) | {"APART": False}, ("I",), targets=TRITON_TARGETS)

    return [of(name) for name in ("Q4_K", "Q6_K", "Q5_1", "MXFP4")]


register(
    Op(
        name="gguf_matmul",
        reference=reference,
        cost=cost,
        implementations={
            "torch": in_torch(reference),
            "triton": in_triton(triton_gguf_matmul),
            "cuda": Implementation(
                "cuda",
                lambda: gguf_rows.GGUFRows(),
                ("sm_90",),
                dtypes=("bfloat16",),
                refusal=gguf_rows.refusal,
                source="gguf_rows.cu",
            ),
            "cuda_tiles": Implementation(
                "cuda",
                lambda: gguf_tiles.GGUFTiles(),
                ("sm_90",),
                dtypes=("bfloat16",),
                refusal=gguf_tiles.refusal,
                source="gguf_tiles.cu",
            ),
        },
        examples=_examples,
        peers={"torch": reference},
        directions=("forward",),
        cases=_cases,
        kernels=_kernels,
        error_ratio=4.0,
        error_note="where the matrix is rebuilt, its numbers are rounded to the dtype first",
    )
)
