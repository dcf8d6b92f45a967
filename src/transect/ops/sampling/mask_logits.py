r"""Logits under grammars: -inf for every token that an answer's grammar does not allow next, on the device, in place.

Row r of the logits has row m = index[r] of packed masks, 32 tokens in a word, or none (-1):

    x[r, t] = -inf    where index[r] >= 0 and bit (t mod 32) of mask[m, t div 32] is 0

On the way it can say of each row whether its own logits, before the mask, have a largest one that is finite
(``sound``): a sampler that finds nothing to draw must know whether the model or the grammar is at fault.

Shapes: logits ``[R, V]``, float32 or 16-bit; mask int32 ``[M, ceil(V / 32)]``; index int32 ``[R]``; sound bool ``[R]``.
No gradient; no value is read on the host. Source: the packed form is the one of llguidance and xgrammar.

Bound by bytes: V / 8 read of the mask, and what is written, at most 2 or 4 V a row: most tokens, where a grammar is
tight. With ``sound`` the logits are read too.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...costs.work import Cost
from ..lang.jit import INTERPRETED, in_triton, kernel, require, tl
from ..numerics import sample
from ..registry import Kernel, Op, in_torch, register
from .adjust_logits import cases


def reference(logits: Tensor, mask: Tensor, index: Tensor, sound: Tensor | None = None) -> None:
    """Mask the logits in place."""
    if sound is not None:
        sound.copy_(torch.isfinite(logits.amax(-1)))
    bits = torch.arange(32, device=mask.device, dtype=torch.int32)
    allowed_MV = (mask[:, :, None] >> bits & 1).flatten(1)[:, : logits.shape[1]].bool()
    banned_RV = ~allowed_MV[index.clamp(min=0).long()] if len(mask) else torch.zeros_like(logits, dtype=torch.bool)
    logits.masked_fill_(banned_RV & (index >= 0)[:, None], float("-inf"))


@kernel
def _mask(logits, mask, index, flags, V, row_stride, mask_stride, BLOCK: tl.constexpr, SOUND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Mask a part (axis 1) of one row (axis 0). ``flags``, for each part: 2 if it has NaN or +inf, else 1 if it has a
    finite number, else 0."""
    row = tl.program_id(0)
    line = tl.load(index + row).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < V
    place = logits + row.to(tl.int64) * row_stride + column
    if SOUND:
        value = tl.load(place, inside, float("-inf")).to(tl.float32)
        wrong = (value != value) | (value == float("inf"))
        flag = tl.max(tl.where(wrong, 2, tl.where(value > float("-inf"), 1, 0)), 0)
        tl.store(flags + row * tl.num_programs(1) + tl.program_id(1), flag.to(tl.int8))
    if line >= 0:
        word = tl.load(mask + line * mask_stride + column // 32, inside, -1)
        banned = inside & (((word >> (column % 32)) & 1) == 0)
        tl.store(place, tl.full((BLOCK,), float("-inf"), tl.float32).to(logits.dtype.element_ty), banned)


def triton_mask(logits: Tensor, mask: Tensor, index: Tensor, sound: Tensor | None = None) -> None:
    """Compute ``reference`` in Triton; can be captured in a CUDA graph."""
    require("mask_logits", logits)
    rows, vocab = logits.shape
    if logits.stride(1) != 1 or mask.stride(1) != 1:
        raise ValueError("mask_logits: the elements of a row must lie side by side")
    if mask.dtype != torch.int32 or mask.shape[1] != -(-vocab // 32):
        raise ValueError(f"mask_logits: the mask must be int32 [rows, {-(-vocab // 32)}], not {list(mask.shape)}")
    if not logits.numel():
        return
    block = 256 if INTERPRETED else 2048
    pieces = -(-vocab // block)
    flags = torch.empty((rows, pieces), dtype=torch.int8, device=logits.device) if sound is not None else index
    _mask[(rows, pieces)](
        logits, mask, index.contiguous(), flags, vocab, logits.stride(0), mask.stride(0), BLOCK=block,
        SOUND=sound is not None,
    )  # fmt: skip
    if sound is not None:
        torch.eq(flags.amax(1), 1, out=sound)


def cost(logits: Tensor, mask: Tensor, index: Tensor) -> Cost:
    """Count a mask for every row, with half of the tokens banned."""
    elements = logits.numel()
    return Cost(elements, elements // 8 + index.nbytes, logits.nbytes // 2)


def _inputs(logits: Tensor, masks: int, seed: int) -> dict[str, Any]:
    rows, vocab = logits.shape
    generator = torch.Generator(logits.device).manual_seed(seed)
    options: dict[str, Any] = {"device": logits.device, "generator": generator}
    words = torch.randint(-(2**31), 2**31, (masks, -(-vocab // 32)), dtype=torch.int64, **options).to(torch.int32)
    index = torch.randint(-1, masks, (rows,), dtype=torch.int32, **options)
    return {"logits": logits, "mask": words, "index": index}


def _examples() -> Sequence[dict[str, Any]]:
    return [_inputs(4 * sample(*shape), shape[0] + 2, 1) for shape in ((1, 300), (5, 1000), (3, 17), (0, 5), (2, 64))]


def _kernels() -> Sequence[Kernel]:
    types = {"logits": "*bf16", "mask": "*i32", "index": "*i32", "flags": "*i8"}
    types |= dict.fromkeys(("V", "row_stride", "mask_stride"), "i32")
    numbers = "V", "row_stride", "mask_stride"
    return [
        Kernel(f"mask{', sound' * sound}", _mask, types, {"BLOCK": 2048, "SOUND": sound}, numbers)
        for sound in (False, True)
    ]


register(
    Op(
        name="mask_logits",
        reference=reference,
        cost=cost,
        implementations={
            "torch": in_torch(reference, batch_invariant=True),
            "triton": in_triton(triton_mask, batch_invariant=True),
        },
        examples=_examples,
        peers={"torch": reference},
        mutates=("logits",),
        cases=partial(cases, _inputs),
        kernels=_kernels,
    )
)
