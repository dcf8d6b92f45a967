r"""Everything that changes a row of logits before a token is drawn, on the device: bias, masked tokens, three
penalties.

Row r has a line s = state[r] in two tables that live from step to step: ``bias`` (a masked token has -inf) and
``counts``: how often each token stands in the output (the low 15 bits) and whether it stands in the prompt (the sign).

    y = x + bias[s]
    y = y / repetition where y > 0, y * repetition elsewhere        for tokens in prompt or output
    y = y - frequency * count - presence                            for tokens in the output

Rows with state -1 pass unchanged. Once a token is drawn for every row, ``triton_count`` adds them to the counts.

Shapes: logits ``[R, V]``; counts int16 and bias float32 ``[S, V]``; state int32, repetition, frequency and presence
float32 ``[R]``; result float32 ``[R, V]``. No gradient. The host reads no value.
Source: the order is that of vLLM's sampler; repetition penalty: Keskar et al. 2019, arXiv:1909.05858.

Bound by bytes: at most 2 or 4 V read and 4 V written a row, 6 V more read where there is a state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...costs.work import Cost
from .. import shapes
from ..lang.jit import INTERPRETED, in_triton, kernel, next_power_of_2, require, rows_of, tl
from ..numerics import compute_dtype, sample
from ..registry import Case, Kernel, Op, in_torch, register

IN_PROMPT = -(2**15)
"""The bit in a token's count that marks it as part of the prompt."""
MOST = 2**15 - 1
"""Counts stop here; no context is so long and so repetitive."""


def reference(
    logits: Tensor,
    counts: Tensor,
    bias: Tensor,
    state: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
) -> Tensor:
    """Compute the adjusted logits ``[R, V]``, float32 (float64 for float64 logits)."""
    x = logits.to(compute_dtype(logits.dtype))
    line = state.clamp(min=0)
    held = counts[line]
    count = (held & MOST).to(x.dtype)
    y = x + bias[line]
    factor = repetition[:, None]
    y = torch.where(held != 0, torch.where(y > 0, y / factor, y * factor), y)
    y = y - (frequency[:, None] * count + presence[:, None] * (count > 0))
    return torch.where((state >= 0)[:, None], y, x)


def reference_count(counts: Tensor, state: Tensor, tokens: Tensor) -> None:
    """Count one more of ``tokens[r]`` in line ``state[r]``; lines are distinct, -1 counts nothing."""
    real = state >= 0
    line, token = state[real].long(), tokens[real]
    held = counts[line, token]
    counts[line, token] = held + ((held & MOST) < MOST).to(held.dtype)


@kernel
def _adjust(  # type: ignore[no-untyped-def]
    logits, counts, bias, state, repetition, frequency, presence, out, V, row_stride, counts_stride, bias_stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Adjust a part (axis 1) of one row (axis 0)."""
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < V
    y = tl.load(logits + row.to(tl.int64) * row_stride + column, inside, 0.0).to(tl.float32)
    line = tl.load(state + row).to(tl.int64)
    if line >= 0:
        factor = tl.load(repetition + row)
        held = tl.load(counts + line * counts_stride + column, inside, 0).to(tl.int32)
        count = (held & 0x7FFF).to(tl.float32)
        y += tl.load(bias + line * bias_stride + column, inside, 0.0)
        y = tl.where(held != 0, tl.where(y > 0, tl.div_rn(y, y * 0.0 + factor), y * factor), y)
        used = tl.where(count > 0, 1.0, 0.0)
        y -= tl.load(frequency + row) * count + tl.load(presence + row) * used
    tl.store(out + row.to(tl.int64) * V + column, y, inside)


@kernel
def _count(counts, state, tokens, R, V, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Count the tokens of all rows."""
    row = tl.arange(0, BLOCK)
    line = tl.load(state + row, row < R, -1).to(tl.int64)
    real = line >= 0
    at = counts + line * V + tl.load(tokens + row, real, 0)
    held = tl.load(at, real, 0).to(tl.int32)
    more = tl.where((held & 0x7FFF) < 0x7FFF, held + 1, held)
    tl.store(at, more.to(tl.int16), real)


def triton_adjust(
    logits: Tensor,
    counts: Tensor,
    bias: Tensor,
    state: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
) -> Tensor:
    """Compute ``reference`` in Triton; can be captured in a CUDA graph."""
    require("adjust_logits", logits)
    logits = rows_of(logits)
    rows, vocab = logits.shape
    if counts.shape[1:] != (vocab,) or bias.shape != counts.shape:
        raise ValueError(f"adjust_logits: counts and bias must be [states, {vocab}], not {list(counts.shape)}")
    counts, bias = rows_of(counts), rows_of(bias)
    out = torch.empty((rows, vocab), dtype=torch.float32, device=logits.device)
    if out.numel():
        block = 256 if INTERPRETED else 2048
        parameters = [t.contiguous() for t in (state, repetition, frequency, presence)]
        _adjust[(rows, -(-vocab // block))](
            logits,
            counts,
            bias,
            *parameters,
            out,
            vocab,
            logits.stride(0),
            counts.stride(0),
            bias.stride(0),
            BLOCK=block,
        )
    return out


def triton_count(counts: Tensor, state: Tensor, tokens: Tensor) -> None:
    """Compute ``reference_count`` in one launch of one program."""
    rows = state.shape[0]
    if rows:
        _count[(1,)](counts, state, tokens, rows, counts.shape[1], BLOCK=max(256, next_power_of_2(rows)))


def cost(logits: Tensor, **parameters: Tensor) -> Cost:
    """Count 6 FLOPs a token; every row has a state."""
    elements = logits.numel()
    return Cost(6 * elements, logits.nbytes + 6 * elements, 4 * elements)


def _inputs(logits: Tensor, states: int, seed: int) -> dict[str, Any]:
    rows, vocab = logits.shape
    generator = torch.Generator(logits.device).manual_seed(seed)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, device=logits.device, generator=generator)

    counts = (uniform(states, vocab) * 4).to(torch.int16).where(uniform(states, vocab) < 0.1, 0)
    counts = torch.where(uniform(states, vocab) < 0.1, counts + IN_PROMPT, counts)
    line = torch.randperm(states, device=logits.device, generator=generator)[:rows].to(torch.int32)
    return {
        "logits": logits,
        "counts": counts,
        "bias": torch.where(uniform(states, vocab) < 0.05, uniform(states, vocab) * 20 - 10, 0),
        "state": torch.where(uniform(rows) < 0.3, -1, line).to(torch.int32),
        "repetition": 0.5 + uniform(rows),
        "frequency": uniform(rows) * 2 - 1,
        "presence": uniform(rows) * 2 - 1,
    }


def _examples() -> Sequence[dict[str, Any]]:
    return [_inputs(4 * sample(*shape), shape[0] + 2, 1) for shape in ((1, 300), (5, 1000), (3, 17), (0, 5))]


def cases(inputs: Callable[[Tensor, int, int], Mapping[str, Any]]) -> Sequence[Case]:
    """Return the cases of an operator on whole logits: decode steps of two models.

    Args:
        inputs: makes the operator's arguments from logits ``[R, V]``, R and a seed.
    """

    def case(model: shapes.ModelShape, rows: int) -> Case:
        def make(device: torch.device, seed: int) -> Mapping[str, Any]:
            generator = torch.Generator(device).manual_seed(seed)
            options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16, "generator": generator}
            return inputs(4 * torch.randn(rows, model.vocab_size, **options), rows, seed)

        return Case(f"{model.name}, {rows} rows", make)

    return [case(model, rows) for model in (shapes.LLAMA_8B, shapes.QWEN3_0_6B) for rows in shapes.DECODE_ROWS]


def _kernels() -> Sequence[Kernel]:
    floats = dict.fromkeys(("repetition", "frequency", "presence"), "*fp32")
    tables = {"counts": "*i16", "bias": "*fp32", "state": "*i32"}
    adjust = {"logits": "*bf16", **tables, **floats, "out": "*fp32"}
    adjust |= dict.fromkeys(("V", "row_stride", "counts_stride", "bias_stride"), "i32")
    count = {"counts": "*i16", "state": "*i32", "tokens": "*i64", "R": "i32", "V": "i32"}
    return [
        Kernel("adjust", _adjust, adjust, {"BLOCK": 2048}, ("V", "row_stride", "counts_stride", "bias_stride")),
        Kernel("count", _count, count, {"BLOCK": 1024}),
    ]


register(
    Op(
        name="adjust_logits",
        reference=reference,
        cost=cost,
        implementations={
            "torch": in_torch(reference, batch_invariant=True),
            "triton": in_triton(triton_adjust, batch_invariant=True),
        },
        examples=_examples,
        peers={"torch": reference},
        keeps_dtype=("bias", "repetition", "frequency", "presence"),
        cases=partial(cases, _inputs),
        kernels=_kernels,
    )
)
