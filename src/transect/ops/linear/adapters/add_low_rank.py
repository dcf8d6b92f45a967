r"""Add the product with low-rank factors to rows, each row with the factors of its own adapter.

    y_t += s_p B_p (A_p x_t)          of adapter slots[t], in the outputs of part p;   rows with a slot below 0 keep y_t

Slots are places for adapters. Each holds factors for P matrices that share the input x (parts: q, k and v), which are
concatenated along outputs. A factor of lower rank is filled up with zeros; a scale of 0 says that the adapter has no
factors for a part, and nothing of them is read. No gradient.

Shapes: y ``[T, O]``, changed in place; x ``[T, I]``; a ``[S, P R, I]``, b ``[S, R, O]``, scale ``[S, P]`` float32,
slots ``[T]`` int32; ``sizes`` are the outputs of each part, at most three, and add up to O. R is a power of two, at
least 16.
Source: Hu et al. 2021, arXiv:2106.09685; many adapters in one product: Chen et al. 2023, arXiv:2310.18547 (Punica),
Sheng et al. 2023, arXiv:2311.03285 (S-LoRA).

Bound by bytes: the factors of the adapters that occur, each read once. With one row for each of 64 adapters of rank 16
these are, for all matrices of an 8B model's layers, a third of the bytes of the model itself.

Two kernels: the first leaves ``s A x`` in float32, in parts along I, so that few rows occupy the whole device; the
second adds the parts in one order and multiplies by B. If y is given as a function, the product that makes y is
launched between them. On Hopper the three launches overlap: each reads its matrices before its inputs are there.
Up to ``FEW`` rows a program has one row, and its sums do not depend on the others. More rows come in tiles; a tile is
multiplied once for each adapter in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ....costs.work import Cost
from ... import shapes
from ...lang.jit import TRITON_TARGETS, available_from, tl
from ...numerics import sample
from ...registry import Case, Implementation, Kernel, Op, in_torch, register
from ..linear import fixed_rows

KERNELS = f"{__package__}.triton"


def reference(
    y: Tensor | Callable[[], Tensor],
    x: Tensor,
    a: Tensor,
    b: Tensor,
    scale: Tensor,
    slots: Tensor,
    sizes: tuple[int, ...],
) -> Tensor:
    """Change ``y``, or what it returns if it is a function, and return it; one adapter after another."""
    return _by_slot(F.linear, y, x, a, b, scale, slots, sizes)


def by_fixed_rows(
    y: Tensor | Callable[[], Tensor],
    x: Tensor,
    a: Tensor,
    b: Tensor,
    scale: Tensor,
    slots: Tensor,
    sizes: tuple[int, ...],
) -> Tensor:
    """Compute ``reference``, where a row's result does not depend on the other rows; see ``linear.fixed_rows``."""
    return _by_slot(fixed_rows, y, x, a, b, scale, slots, sizes)


def _by_slot(
    product: Any,
    y: Tensor | Callable[[], Tensor],
    x: Tensor,
    a: Tensor,
    b: Tensor,
    scale: Tensor,
    slots: Tensor,
    sizes: tuple[int, ...],
) -> Tensor:
    y = y() if callable(y) else y
    rank = b.shape[1]
    for slot in set(slots.tolist()) - {-1}:
        rows = torch.nonzero(slots == slot)[:, 0]
        own, first = x.index_select(0, rows), 0
        for part, size in enumerate(sizes):
            factor, outputs = scale[slot, part].item(), slice(first, first + size)
            if factor:
                low = product(own, a[slot, part * rank : (part + 1) * rank]) * factor
                y[rows, outputs] += product(low, b[slot, :, outputs].T)
            first += size
    return y


def cost(y: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: Tensor, slots: Tensor, sizes: tuple[int, ...]) -> Cost:
    """Count two products for each row with an adapter; the factors of the adapters that occur, once each."""
    used = slots[slots >= 0]
    rows, distinct = len(used), len(used.unique())
    flops = 2 * rows * (a[0].numel() + b[0].numel()) if len(a) else 0
    factors = distinct * (a[0].nbytes + b[0].nbytes + scale[0].nbytes) if len(a) else 0
    moved = rows * y.shape[1] * y.element_size()
    return Cost(flops, factors + rows * x.shape[1] * x.element_size() + moved + slots.nbytes, moved)


def _inputs(slots: Sequence[int], inputs: int, sizes: tuple[int, ...], rank: int, adapters: int) -> dict[str, Any]:
    scale = torch.linspace(0.5, 2.0, adapters * len(sizes)).view(adapters, len(sizes))
    if adapters > 1:
        scale[0, -1] = 0.0
    return {
        "y": sample(len(slots), sum(sizes)),
        "x": sample(len(slots), inputs, seed=1),
        "a": sample(adapters, rank * len(sizes), inputs, seed=2),
        "b": sample(adapters, rank, sum(sizes), seed=3),
        "scale": scale,
        "slots": torch.tensor(slots, dtype=torch.int32),
        "sizes": sizes,
    }


def _examples() -> Sequence[dict[str, Any]]:
    return [
        _inputs([1, -1, 0, 2, 1], 48, (40, 16, 24), 16, 3),
        _inputs([0], 33, (17,), 16, 1),
        _inputs([-1, -1], 24, (5, 9), 16, 2),
        _inputs([*[2] * 7, -1, *[0] * 3, *[1, 2] * 140], 40, (24, 33), 32, 3),
    ]


def _cases() -> Sequence[Case]:
    def case(model: shapes.ModelShape, name: str, tokens: int, adapters: int) -> Case:
        def make(device: torch.device, seed: int) -> Mapping[str, Any]:
            options: dict[str, Any] = {"device": device, "generator": torch.Generator(device).manual_seed(seed)}
            dim, kv = model.dim, model.n_kv_heads * model.head_dim
            inputs, sizes = {
                "qkv": (dim, (model.n_heads * model.head_dim, kv, kv)),
                "down": (model.ffn_dim, (dim,)),
            }[name]

            def draw(*shape: int) -> Tensor:
                return torch.randn(*shape, dtype=torch.bfloat16, **options)

            slots = torch.arange(tokens, device=device, dtype=torch.int32) * adapters // tokens
            return {
                **{"y": draw(tokens, sum(sizes)), "x": draw(tokens, inputs)},
                **{"a": draw(adapters, 16 * len(sizes), inputs), "b": draw(adapters, 16, sum(sizes))},
                **{"scale": torch.ones(adapters, len(sizes), device=device), "slots": slots, "sizes": sizes},
            }

        return Case(f"{model.name}, {name}, {tokens} rows of {adapters} adapters, rank 16", make)

    sizes = ((1, 1), (64, 1), (64, 64), (8192, 8))
    return [case(shapes.LLAMA_8B, name, *each) for name in ("qkv", "down") for each in sizes]


def _kernels() -> Sequence[Kernel]:
    from . import triton as kernels

    tensors = {"x_ptr": "*bf16", "a_ptr": "*bf16", "scale_ptr": "*fp32", "slots_ptr": "*i32", "low_ptr": "*fp32"}
    shrink = tensors | dict.fromkeys(("n_rows", "K", "x_row", "span"), "i32")
    expand = {"y_ptr": "*bf16", "b_ptr": "*bf16"} | {
        name: tensors[name] for name in ("scale_ptr", "slots_ptr", "low_ptr")
    }
    expand |= dict.fromkeys(("n_rows", "N0", "N1", "N2", "y_row"), "i32")
    sizes, wide = ("K", "x_row", "span"), ("N0", "N1", "N2", "y_row")
    shared = {"P": 3, "R": 16, "DEPENDENT_LAUNCH": False}
    return [
        Kernel("shrink_rows", kernels.shrink_rows, shrink, {**shared, "BK": 1024}, sizes),
        Kernel("expand_rows", kernels.expand_rows, expand, {**shared, "SPLITS": 4, "BN": 1024}, wide),
        Kernel("shrink_tiles", kernels.shrink_tiles, shrink, {**shared, "BT": 16, "BK": 128}, sizes),
        Kernel("expand_tiles", kernels.expand_tiles, expand, {**shared, "SPLITS": 4, "BT": 16, "BN": 128}, wide),
    ]


register(
    Op(
        name="add_low_rank",
        reference=reference,
        cost=cost,
        implementations={
            "torch": in_torch(reference),
            "torch, fixed rows": in_torch(by_fixed_rows, batch_invariant=True),
            "triton": Implementation("triton", available_from(KERNELS, "triton_add_low_rank"), TRITON_TARGETS),
            "triton, rows alone": Implementation(
                "triton", available_from(KERNELS, "triton_each_row"), TRITON_TARGETS, batch_invariant=True
            ),
        },
        examples=_examples,
        peers={"torch": reference},
        mutates=("y",),
        keeps_dtype=("scale",),
        directions=("forward",),
        cases=_cases,
        kernels=_kernels if tl is not None else lambda: (),
    )
)
