"""The start of a decoder step in one launch: embeddings of its tokens, rotations of their positions.

    x[t] = embedding[ids[places[t]]]          rotation[t] = rotations[positions[t]]

The ids may lie apart: some were drawn by the step before and stand where it left them, others came from the host.
Without places the ids are those of the tokens, in order. A place below 0 marks a padding row: its x is 0, and with it,
in a decoder, everything that follows, which takes less power than other numbers do. Copies, no arithmetic, no gradient.
Every other place, id and position must be inside its table: nothing is checked on the device. Of a table that is a part
of a larger one, from row ``first`` of that, ids of other rows give 0, too.

Shapes: embedding ``[V, D]``, rotations ``[positions, d]`` float32 (cosines, then sines); ids int64, of any number where
there are places, else ``[T]``; positions and places int32 or int64 ``[T]``; results ``[T, D]`` and ``[T, d]``.

Bound by bytes: each row is read once and written once. With few tokens the launches are what counts: apart, these are
three, and each waits for the one before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...costs.work import Cost
from .. import shapes
from ..lang.jit import in_triton, kernel, next_power_of_2, require, rows_of, tl
from ..lang.tiles import also, let_next_begin, wait_for_previous
from ..numerics import sample
from ..registry import Case, Kernel, Op, in_torch, register


def reference(
    ids: Tensor,
    positions: Tensor,
    embedding: Tensor,
    rotations: Tensor,
    places: Tensor | None = None,
    first: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (embeddings ``[T, D]``, rotations ``[T, d]``)."""
    turned = rotations.index_select(0, positions)
    if first is not None:
        own = (ids if places is None else ids.index_select(0, places.clamp(min=0))) - first
        outside = (own < 0) | (own >= len(embedding)) | (False if places is None else places < 0)
        x = embedding.index_select(0, own.clamp(0, len(embedding) - 1))
        return x.masked_fill_(outside[:, None], 0), turned
    if places is None:
        return embedding.index_select(0, ids), turned
    x = embedding.index_select(0, placed(ids, places))
    return x.masked_fill_((places < 0)[:, None], 0), turned


def placed(ids: Tensor, places: Tensor) -> Tensor:
    """Return the ids at these places; 0 where a place is below 0."""
    return ids.index_select(0, places.clamp(min=0)).masked_fill_(places < 0, 0)


@kernel
def _embed(
    ids_ptr, places_ptr, positions_ptr, embedding_ptr, rotations_ptr, x_ptr, out_ptr, n_cols, n_angles,
    embedding_row, rotations_row, first, n_rows,
    BLOCK: tl.constexpr, ANGLES: tl.constexpr, PART: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr,
):  # fmt: skip
    """Embed one token a program."""
    # In this order: what begins now finds all that was there before this kernel.
    wait_for_previous(DEPENDENT_LAUNCH)
    let_next_begin(DEPENDENT_LAUNCH)
    t = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + t).to(tl.int64)
    place = t
    if places_ptr is not None:
        place = tl.load(places_ptr + t).to(tl.int64)
    token = tl.load(ids_ptr + place, mask=place >= 0, other=0)
    inside = place >= 0
    if PART:
        token -= first
        inside = inside & (token >= 0) & (token < n_rows)
    angle = tl.arange(0, ANGLES)
    turn = tl.load(rotations_ptr + position * rotations_row + angle, mask=angle < n_angles)
    col = tl.arange(0, BLOCK)
    row = tl.load(embedding_ptr + token * embedding_row + col, mask=also(col < n_cols, inside), other=0.0)
    tl.store(out_ptr + t * n_angles + angle, turn, mask=angle < n_angles)
    tl.store(x_ptr + t * n_cols + col, row, mask=col < n_cols)


def triton_embed_tokens(
    ids: Tensor,
    positions: Tensor,
    embedding: Tensor,
    rotations: Tensor,
    places: Tensor | None = None,
    first: int | None = None,
    *,
    dependent_launch: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute ``reference`` in one launch.

    ``dependent_launch``: begin while the kernel before still runs (Hopper), and let the next one begin when that one
    has ended. A kernel that reads the results before it waits must not begin by that; a kernel between them must wait
    for these results before it lets others begin (``norm/rms_norm.py``).

    Raises:
        ValueError: tables that are not matrices, or a number of positions that is not that of the tokens.
    """
    require("embed_tokens", embedding, rotations)
    if embedding.dim() != 2 or rotations.dim() != 2:
        raise ValueError(
            f"embed_tokens: both tables must be matrices; got {list(embedding.shape)}, {list(rotations.shape)}"
        )
    listed = ids if places is None else places
    if listed.shape != positions.shape or positions.dim() != 1:
        raise ValueError(
            "embed_tokens: each token needs one position, and one place where there are places; got "
            f"{list(positions.shape)} positions for {list(listed.shape)} tokens"
        )
    tokens, width, angles = len(positions), embedding.shape[1], rotations.shape[1]
    x, out = embedding.new_empty((tokens, width)), rotations.new_empty((tokens, angles))
    if not tokens:
        return x, out
    embedding, rotations = rows_of(embedding), rows_of(rotations)
    block = next_power_of_2(width)
    _embed[(tokens,)](
        ids.contiguous(), None if places is None else places.contiguous(), positions.contiguous(), embedding, rotations,
        x, out, width, angles, embedding.stride(0), rotations.stride(0), first or 0, len(embedding),
        BLOCK=block, ANGLES=next_power_of_2(angles), PART=first is not None,
        DEPENDENT_LAUNCH=dependent_launch, num_warps=max(1, min(8, block // 512)),
        **({"launch_pdl": True} if dependent_launch else {}),
    )  # fmt: skip
    return x, out


def cost(
    ids: Tensor,
    positions: Tensor,
    embedding: Tensor,
    rotations: Tensor,
    places: Tensor | None = None,
    first: int | None = None,
) -> Cost:
    """Count the rows of both tables, read and written, without the numbers that select them."""
    row = embedding.shape[1] * embedding.element_size() + rotations.shape[1] * rotations.element_size()
    return Cost(0, len(positions) * row, len(positions) * row)


def _numbers(tokens: int, vocab: int, device: torch.device, seed: int) -> dict[str, Any]:
    generator = torch.Generator(device).manual_seed(seed)

    def draw(most: int, dtype: torch.dtype) -> Tensor:
        return torch.randint(0, most, (tokens,), device=device, dtype=dtype, generator=generator)

    return {
        "ids": draw(vocab, torch.int64),
        "places": draw(tokens, torch.int32),
        "positions": draw(64, torch.int32),
    }


def _examples() -> Sequence[dict[str, Any]]:
    examples = []
    for tokens, vocab, width, angles in ((1, 7, 12, 4), (5, 30, 33, 10), (9, 3, 8, 2), (0, 4, 8, 2)):
        tables = {"embedding": sample(vocab, width), "rotations": sample(64, angles, seed=1)}
        numbers = _numbers(max(1, tokens), vocab, torch.device("cpu"), 3)
        examples.append({name: value[:tokens] for name, value in numbers.items()} | tables)
    in_order = dict(examples[1])
    del in_order["places"]
    examples[2]["places"][3:5] = -1
    parts = [{**examples[1], "first": 11}, {**in_order, "first": 0, "embedding": sample(17, 33)}]
    return [*examples, in_order, *parts]


def _cases() -> Sequence[Case]:
    def case(model: shapes.ModelShape, tokens: int) -> Case:
        def make(device: torch.device, seed: int) -> Mapping[str, Any]:
            options: dict[str, Any] = {"device": device, "generator": torch.Generator(device).manual_seed(seed)}
            table = torch.randn(model.vocab_size, model.dim, dtype=torch.bfloat16, **options)
            tables = {"embedding": table, "rotations": torch.randn(64, model.head_dim, **options)}
            return {**_numbers(tokens, model.vocab_size, device, seed), **tables}

        return Case(f"{model.name}, {tokens} tokens", make)

    return [case(model, tokens) for model in shapes.MODELS for tokens in (*shapes.DECODE_ROWS, *shapes.PREFILL_ROWS)]


def _kernels() -> Sequence[Kernel]:
    arguments = {"ids_ptr": "*i64", "places_ptr": "*i32", "positions_ptr": "*i32", "embedding_ptr": "*bf16"}
    arguments |= {"rotations_ptr": "*fp32", "x_ptr": "*bf16", "out_ptr": "*fp32"}
    numbers = ("n_cols", "n_angles", "embedding_row", "rotations_row")
    arguments |= dict.fromkeys((*numbers, "first", "n_rows"), "i32")
    constants = {"BLOCK": 1024, "ANGLES": 128, "DEPENDENT_LAUNCH": False}
    return [
        Kernel(name, _embed, arguments, {**constants, "PART": part}, numbers, warps=2)
        for name, part in (("embed_tokens", False), ("part", True))
    ]


register(
    Op(
        name="embed_tokens",
        reference=reference,
        cost=cost,
        implementations={
            "torch": in_torch(reference, batch_invariant=True),
            "triton": in_triton(triton_embed_tokens, batch_invariant=True),
        },
        examples=_examples,
        peers={"torch": reference},
        keeps_dtype=("rotations",),
        directions=("forward",),
        cases=_cases,
        kernels=_kernels,
    )
)
