r"""One AdamW step over many tensors in one launch.

    g' = s g        m <- b1 m + (1 - b1) g'        v <- b2 v + (1 - b2) g'^2
    w <- (1 - lr decay) w - (lr / c1) m / (sqrt(v) / c2 + eps)        c1 = 1 - b1^t        c2 = sqrt(1 - b2^t)

s scales the gradient (clipping). The kernel reads it from the device, so the host does not wait for the norm. If s is
not a number, nothing changes: a step with a bad gradient is skipped before the host knows about it. With a float32
master copy of w the update happens there, and w is the rounded copy.

Shapes: w, g, m, v of one shape, any number of dimensions; float32 inside, each result rounded once, to the nearest or
by chance (``rounding.py``). g may be float32 beside weights in 16 bits: a sum over micro-batches. w, m, v (and the
master copy) change in place; no gradient.
Source: Loshchilov & Hutter 2017, arXiv:1711.05101.

Bound by bytes: about 15 FLOPs an element against four reads and three writes, 15 / (7 * 2) FLOPs per byte in bfloat16.
A model has hundreds of tensors, many of a few kilobytes, and a launch for each would cost more than the bytes. So the
kernel gets a table of addresses, and another that says which tensor each program works on, and where in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...costs.work import Cost
from .. import shapes
from ..lang.jit import TRITON_TARGETS, available, kernel, kernel_of_numbers, require, tl
from ..numerics import compute_dtype, sample
from ..registry import Case, Implementation, Kernel, Op, register
from .rounding import block_words, rounded

BLOCK = 4096
SEEN = 4
"""Number of tensors whose tables ``OneTensor`` keeps, and with them the tensors."""


@dataclass(frozen=True, slots=True)
class AdamWStep:
    """The numbers of one step. ``correction1`` is c1 and ``correction2`` c2 above; ``seed`` and ``number`` (of the
    step) choose the bits of rounding by chance."""

    rate: float
    beta1: float
    beta2: float
    eps: float
    correction1: float
    correction2: float
    seed: int = 0
    number: int = 0


def reference(
    weight: Tensor, gradient: Tensor, m: Tensor, v: Tensor, rate: float, decay: float, steps: int, scale: Tensor
) -> None:
    """Update ``weight``, ``m`` and ``v`` in place; betas 0.9 and 0.95, eps 1e-8; ``scale`` is a scalar tensor."""
    wide = compute_dtype(weight.dtype)
    step = _step(rate, steps)
    g = gradient.to(wide) * scale.to(wide)
    new_m = m.to(wide) + (1 - step.beta1) * (g - m.to(wide))
    new_v = step.beta2 * v.to(wide) + (1 - step.beta2) * g * g
    update = new_m / (new_v.sqrt() / step.correction2 + step.eps)
    weight.copy_(weight.to(wide) * (1 - rate * decay) - rate / step.correction1 * update)
    m.copy_(new_m)
    v.copy_(new_v)


def _step(rate: float, steps: int) -> AdamWStep:
    return AdamWStep(rate, 0.9, 0.95, 1e-8, 1 - 0.9**steps, (1 - 0.95**steps) ** 0.5)


@kernel_of_numbers("number", "low", "high")
def _adamw_kernel(
    table_ptr, owner_ptr, first_ptr, scale_ptr, tensors, rate, beta1, beta2, eps, correction1, correction2,
    number, low, high,
    weight_type: tl.constexpr, gradient_type: tl.constexpr, state_type: tl.constexpr, MASTER: tl.constexpr,
    CHANCE: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update BLOCK elements of tensor ``owner[p]`` from ``first[p]`` on in program p.

    ALIGNED: every address and every number of elements is a multiple of 16, so accesses may be 16 bytes wide.
    The table has a row of ``tensors`` numbers for each of: address of w, g, m, v, master; elements; bits of the decay;
    the tensor's own number. CHANCE: round w, m and v by chance, with the bits of step ``number`` and of the seed, whose
    halves are ``low`` and ``high``.
    """
    program = tl.program_id(0)
    owner = tl.load(owner_ptr + program)
    at = tl.load(first_ptr + program) * BLOCK + tl.arange(0, BLOCK)
    row = table_ptr + owner
    size = tl.load(row + 5 * tensors)
    w_base = tl.load(row).to(tl.pointer_type(weight_type))
    g_base = tl.load(row + tensors).to(tl.pointer_type(gradient_type))
    m_base = tl.load(row + 2 * tensors).to(tl.pointer_type(state_type))
    v_base = tl.load(row + 3 * tensors).to(tl.pointer_type(state_type))
    master_base = tl.load(row + 4 * tensors).to(tl.pointer_type(tl.float32))
    if ALIGNED:
        size = tl.multiple_of(size, 16)
        w_base = tl.multiple_of(w_base, 16)
        g_base = tl.multiple_of(g_base, 16)
        m_base = tl.multiple_of(m_base, 16)
        v_base = tl.multiple_of(v_base, 16)
        master_base = tl.multiple_of(master_base, 16)
    scale = tl.load(scale_ptr)
    inside = at < tl.where(scale == scale, size, 0)
    decay = tl.load(row + 6 * tensors).to(tl.int32).to(tl.float32, bitcast=True)
    g = tl.load(g_base + at, mask=inside, other=0.0).to(tl.float32)
    m = tl.load(m_base + at, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(v_base + at, mask=inside, other=0.0).to(tl.float32)
    if MASTER:
        w = tl.load(master_base + at, mask=inside, other=0.0)
    else:
        w = tl.load(w_base + at, mask=inside, other=0.0).to(tl.float32)
    g = g * scale
    m = m + (1.0 - beta1) * (g - m)
    v = beta2 * v + (1.0 - beta2) * g * g
    w = w * (1.0 - rate * decay) - rate / correction1 * (m / (tl.sqrt(v) / correction2 + eps))
    if CHANCE:
        tensor = tl.load(row + 7 * tensors).to(tl.uint32)
        words = block_words(
            tl.load(first_ptr + program), number.to(tl.uint32), tensor, low.to(tl.uint32, bitcast=True),
            high.to(tl.uint32, bitcast=True), BLOCK,
        )  # fmt: skip
        tl.store(m_base + at, rounded(m, words, 16), mask=inside)
        tl.store(v_base + at, rounded(v, words, 8), mask=inside)
        tl.store(w_base + at, rounded(w, words, 0), mask=inside)
    else:
        tl.store(m_base + at, m.to(state_type), mask=inside)
        tl.store(v_base + at, v.to(state_type), mask=inside)
        if MASTER:
            tl.store(master_base + at, w, mask=inside)
        tl.store(w_base + at, w.to(weight_type), mask=inside)


@kernel
def _squares_kernel(  # type: ignore[no-untyped-def]
    table_ptr, owner_ptr, first_ptr, sums_ptr, tensors, gradient_type: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum the squares of program p's BLOCK elements of the gradients; tables as above."""
    program = tl.program_id(0)
    row = table_ptr + tl.load(owner_ptr + program)
    at = tl.load(first_ptr + program) * BLOCK + tl.arange(0, BLOCK)
    size = tl.load(row + 5 * tensors)
    g_base = tl.load(row + tensors).to(tl.pointer_type(gradient_type))
    if ALIGNED:
        size = tl.multiple_of(size, 16)
        g_base = tl.multiple_of(g_base, 16)
    g = tl.load(g_base + at, mask=at < size, other=0.0).to(tl.float32)
    tl.store(sums_ptr + program, tl.sum(g * g, 0))


class FusedAdamW:
    """The tables for a fixed list of tensors; ``step`` is one launch, ``norm`` another.

    Args:
        weights, ms, vs: contiguous, weights of one dtype and moments of one dtype. masters: float32, or empty.
        decays: the weight decay of each.
        chance: round weights and moments, which must be bfloat16 then, by chance. numbers: by which they choose their
            bits; their places if empty.

    Raises:
        ValueError: tensors that do not fit each other or are not contiguous.
    """

    def __init__(
        self,
        weights: Sequence[Tensor],
        ms: Sequence[Tensor],
        vs: Sequence[Tensor],
        decays: Sequence[float],
        masters: Sequence[Tensor] = (),
        *,
        chance: bool = False,
        numbers: Sequence[int] = (),
    ) -> None:
        require("adamw", *weights, *ms, *vs, *masters)
        if len({w.dtype for w in weights}) != 1 or len({s.dtype for s in (*ms, *vs)}) != 1:
            raise ValueError("adamw: the weights must be of one dtype, and so must the moments")
        if not all(t.is_contiguous() for t in (*weights, *ms, *vs, *masters)):
            raise ValueError("adamw: weights and moments must be contiguous")
        if chance and ({w.dtype for w in (*weights, *ms)} != {torch.bfloat16} or masters):
            raise ValueError("adamw: rounding by chance is for weights and moments in bfloat16 without master copies")
        self._chance = chance
        device = weights[0].device
        self._kept = (tuple(weights), tuple(ms), tuple(vs), tuple(masters))
        everything = (*weights, *ms, *vs, *masters)
        self._aligned = all(t.data_ptr() % 16 == 0 and t.numel() % 16 == 0 for t in everything)
        count = len(weights)
        bits = torch.tensor(decays, dtype=torch.float32).view(torch.int32).to(torch.int64).tolist()
        addresses = [[t.data_ptr() for t in part] for part in (weights, weights, ms, vs)]
        rows = [
            *addresses, [t.data_ptr() for t in masters] or [0] * count, [w.numel() for w in weights], bits,
            list(numbers) or list(range(count)),
        ]  # fmt: skip
        self._table = torch.tensor(rows, dtype=torch.int64).to(device)
        blocks = [-(-w.numel() // BLOCK) for w in weights]
        owners = torch.arange(count).repeat_interleave(torch.tensor(blocks))
        first = torch.cat([torch.arange(n) for n in blocks]) if blocks else torch.empty(0, dtype=torch.int64)
        self._owners, self._first = owners.to(device, torch.int32), first.to(device)
        self._addresses: list[int] = []

    def step(self, gradients: Sequence[Tensor], numbers: AdamWStep, scale: Tensor) -> None:
        """Do one step, or none if ``scale``, a float32 scalar on the device, is NaN. ``gradients`` are in the order of
        the weights."""
        weights, ms, _, masters = self._kept
        gradients = self._point(gradients)
        if not len(self._owners):
            return
        aligned = self._aligned and all(g.data_ptr() % 16 == 0 for g in gradients)
        _adamw_kernel[(len(self._owners),)](
            self._table, self._owners, self._first, scale, len(weights), numbers.rate, numbers.beta1, numbers.beta2,
            numbers.eps, numbers.correction1, numbers.correction2, numbers.number, _signed(numbers.seed),
            _signed(numbers.seed >> 32),
            weight_type=_kind(weights[0]), gradient_type=_kind(gradients[0]), state_type=_kind(ms[0]),
            MASTER=bool(masters), CHANCE=self._chance, ALIGNED=aligned, BLOCK=BLOCK,
            num_warps=8,
        )  # fmt: skip

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the 2-norm of all gradients together, a float32 scalar on the device; the same to the bit in every
        run."""
        gradients = self._point(gradients)
        sums = torch.zeros(len(self._owners), dtype=torch.float32, device=self._owners.device)
        if len(self._owners):
            aligned = self._aligned and all(g.data_ptr() % 16 == 0 for g in gradients)
            _squares_kernel[(len(self._owners),)](
                self._table, self._owners, self._first, sums, len(gradients), gradient_type=_kind(gradients[0]),
                ALIGNED=aligned, BLOCK=BLOCK, num_warps=8,
            )  # fmt: skip
        return sums.sum().sqrt()

    def _point(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Enter the addresses of the gradients, made contiguous, into the table."""
        held = [g if g.is_contiguous() else g.contiguous() for g in gradients]
        addresses = [g.data_ptr() for g in held]
        if addresses != self._addresses:
            fresh = torch.tensor(addresses, dtype=torch.int64)  # not one buffer: the last copy may not have been made
            self._table[1].copy_(fresh.pin_memory() if self._table.is_cuda else fresh, non_blocking=True)
            self._addresses = addresses
        return held


def _signed(word: int) -> int:
    """Return the low 32 bits as an int32, which every launch is given alike."""
    word &= 0xFFFFFFFF
    return word - 2**32 if word >= 2**31 else word


def _kind(x: Tensor) -> Any:
    """Return the dtype by Triton's name."""
    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[x.dtype]


class OneTensor:
    """``reference`` by ``FusedAdamW``, whose tables are kept for the last tensors that it was called with."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, int, int, int, float], FusedAdamW] = {}

    def __call__(
        self,
        weight: Tensor,
        gradient: Tensor,
        m: Tensor,
        v: Tensor,
        rate: float,
        decay: float,
        steps: int,
        scale: Tensor,
    ) -> None:
        """Update one tensor; strided tensors are copied and written back."""
        state = (weight, m, v)
        if all(t.is_contiguous() for t in state):
            key = (weight.data_ptr(), m.data_ptr(), v.data_ptr(), weight.numel(), decay)  # held, so in no other use
            if key not in self._seen:
                if len(self._seen) == SEEN:
                    del self._seen[next(iter(self._seen))]
                self._seen[key] = FusedAdamW([weight], [m], [v], [decay])
            fused, parts = self._seen[key], list(state)
        else:
            parts = [t.contiguous() for t in state]
            fused = FusedAdamW([parts[0]], [parts[1]], [parts[2]], [decay])
        fused.step([gradient.contiguous().to(weight.dtype)], _step(rate, steps), scale.to(torch.float32))
        for target, part in zip(state, parts, strict=True):
            if part is not target:
                target.copy_(part)


def cost(
    weight: Tensor, gradient: Tensor, m: Tensor, v: Tensor, rate: float, decay: float, steps: int, scale: Tensor
) -> Cost:
    """Count 15 FLOPs an element."""
    state = weight.nbytes + m.nbytes + v.nbytes
    return Cost(15 * weight.numel(), state + gradient.nbytes, state)


def _peer(
    weight: Tensor, gradient: Tensor, m: Tensor, v: Tensor, rate: float, decay: float, steps: int, scale: Tensor
) -> None:
    """Call torch's fused AdamW, with a separate operator that scales the gradient."""
    gradient = gradient * scale.to(gradient.dtype)
    torch._fused_adamw_(
        [weight], [gradient], [m], [v], [], [torch.full((), float(steps), device=weight.device)], lr=rate, beta1=0.9,
        beta2=0.95, weight_decay=decay, eps=1e-8, amsgrad=False, maximize=False,
    )  # fmt: skip


def _examples() -> Sequence[dict[str, Any]]:
    made = []
    for shape, steps in (((5000,), 1), ((3, 5, 7), 12), ((1,), 100), ((0,), 3)):
        made.append(
            {
                "weight": sample(*shape),
                "gradient": sample(*shape, seed=1),
                "m": 0.1 * sample(*shape, seed=2),
                "v": sample(*shape, seed=3).square(),
                "rate": 0.01,
                "decay": 0.1,
                "steps": steps,
                "scale": torch.tensor(0.5),
            }
        )
    return made


def _cases() -> Sequence[Case]:
    def case(shape: shapes.ModelShape) -> Case:
        size = shape.ffn_dim, shape.dim * max(1, -(-(2**27) // (shape.ffn_dim * shape.dim)))

        def make(device: torch.device, seed: int) -> Mapping[str, Any]:
            generator = torch.Generator(device).manual_seed(seed)
            w, g, m, v = torch.randn(4, *size, device=device, dtype=torch.bfloat16, generator=generator)
            scale = torch.ones((), device=device)
            return {
                "weight": w, "gradient": g, "m": m, "v": v.abs(), "rate": 1e-4, "decay": 0.1, "steps": 9, "scale": scale
            }  # fmt: skip

        return Case(f"{size[0]} x {size[1]}, as MLPs of {shape.name}", make)

    return [case(shape) for shape in shapes.MODELS]


def _kernels() -> Sequence[Kernel]:
    arguments = {
        "table_ptr": "*i64", "owner_ptr": "*i32", "first_ptr": "*i64", "scale_ptr": "*fp32", "tensors": "i32",
        **dict.fromkeys(("rate", "beta1", "beta2", "eps", "correction1", "correction2"), "fp32"),
        **dict.fromkeys(("number", "low", "high"), "i32"),
    }  # fmt: skip
    constants = {
        "weight_type": tl.bfloat16,
        "gradient_type": tl.bfloat16,
        "state_type": tl.bfloat16,
        "MASTER": False,
        "CHANCE": False,
        "ALIGNED": True,
        "BLOCK": BLOCK,
    }
    tables = {"table_ptr": "*i64", "owner_ptr": "*i32", "first_ptr": "*i64", "sums_ptr": "*fp32", "tensors": "i32"}
    squares = {"gradient_type": tl.bfloat16, "ALIGNED": True, "BLOCK": BLOCK}
    return [
        Kernel("adamw", _adamw_kernel, arguments, constants, warps=8),
        Kernel("adamw_by_chance", _adamw_kernel, arguments, {**constants, "CHANCE": True}, warps=8),
        Kernel("squares", _squares_kernel, tables, squares, warps=8),
    ]


register(
    Op(
        name="adamw",
        reference=reference,
        cost=cost,
        implementations={"triton": Implementation("triton", lambda: available(OneTensor)()(), TRITON_TARGETS)},
        examples=_examples,
        peers={"torch": _peer},
        cases=_cases,
        kernels=_kernels,
        mutates=("weight", "m", "v"),
        keeps_dtype=("scale",),
    )
)
