"""Write a step's keys and values into the paged KV cache.

Token t of row b stands at position p of its sequence; its slot is offset ``p % block_size`` of block
``block_table[b][p // block_size]``. A copy, no arithmetic, no gradient; the caches change in place.

Shapes: k and v ``[T, K, d]``; caches of one layer ``[blocks, K, block_size, d]``: the keys of a block lie together by
head, which is how attention reads them.
Source: the paged cache of Kwon et al. 2023, arXiv:2309.06180.

Bound by bytes: 0 FLOPs; each element is read once and written once.

The kernel works a token's slot out by itself, from the block tables and the two length vectors: nothing is computed on
the host, so a captured CUDA graph can be replayed after these three have been overwritten in place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ....costs.work import Cost
from ... import shapes
from ...lang.jit import in_triton, kernel, next_power_of_2, require, tl
from ...lang.tiles import after_previous, also
from ...numerics import sample
from ...registry import Case, Implementation, Kernel, Op, register
from .batch import PagedBatch
from .cache_codes import encode, store_heads


def reference(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, batch: PagedBatch) -> None:
    """Copy k, v ``[T, K, d]`` into the slots of the batch's tokens, in the cache's dtype. fp8 saturates at its largest
    number; in int8 each head of a token has a scale (``cache_codes.py``)."""
    blocks, offsets = batch.slots_T
    for x, cache in ((k, k_cache), (v, v_cache)):
        if cache.dtype == torch.int8:
            x = encode(x)
        elif cache.dtype == torch.float8_e4m3fn:
            x = x.clamp(-448, 448)
        cache[blocks, :, offsets] = x.to(cache.dtype)


def numbers(*caches: Tensor) -> tuple[Tensor, ...]:
    """Return the caches whose dtype kernels compute in, for ``require``. An 8-bit cache is only converted to and
    from."""
    return tuple(cache for cache in caches if cache.dtype not in (torch.float8_e4m3fn, torch.int8))


@kernel
def slot(token, tables_ptr, starts_ptr, lengths_ptr, n_rows, table_stride, PAGE: tl.constexpr, SEARCH: tl.constexpr):
    """Return (block, offset) of a token of the step; the block is -1 where the token has no place (padding).

    SEARCH is 0 if token t is row t, else a power of two that holds the rows: the token's row is the number of rows that
    end at or before it.
    """
    if SEARCH == 0:
        row = token
        position = tl.load(lengths_ptr + row) - 1
    else:
        index = tl.arange(0, SEARCH)
        ends = tl.load(starts_ptr + 1 + index, mask=index < n_rows, other=2147483647)
        row = tl.sum((ends <= token).to(tl.int32), 0)
        end = tl.min(tl.where(ends > token, ends, 2147483647), 0)
        position = tl.load(lengths_ptr + row, mask=row < n_rows, other=0) - end + token
    page = tl.load(tables_ptr + row.to(tl.int64) * table_stride + position // PAGE, mask=position >= 0, other=-1)
    return page.to(tl.int64), position % PAGE


@kernel
def _write_kernel(
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, tables_ptr, starts_ptr, lengths_ptr, n_rows, n_heads, size,
    k_token, k_head, v_token, v_head, cache_block, cache_head, cache_slot, table_stride,
    PAGE: tl.constexpr, SEARCH: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr,
):  # fmt: skip
    """Write one token a program."""
    after_previous(DEPENDENT_LAUNCH)
    token = tl.program_id(0)
    page, offset = slot(token, tables_ptr, starts_ptr, lengths_ptr, n_rows, table_stride, PAGE, SEARCH)
    head = tl.arange(0, HEADS)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    inside = also((head < n_heads) & (col < size), page >= 0)
    token = token.to(tl.int64)
    k = tl.load(k_ptr + token * k_token + head * k_head + col, mask=inside)
    v = tl.load(v_ptr + token * v_token + head * v_head + col, mask=inside)
    place = page * cache_block + head * cache_head + offset * cache_slot
    store_heads(k_cache_ptr, place, size, col, k, inside)
    store_heads(v_cache_ptr, place, size, col, v, inside)


def side_by_side(x: Tensor) -> Tensor:
    """Return ``x`` if the elements of its last dimension are contiguous, else a copy in which they are."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def slot_arguments(name: str, batch: PagedBatch, k_cache: Tensor, v_cache: Tensor, tokens: int) -> dict[str, Any]:
    """Return the arguments of ``slot`` and the strides of the caches, by argument name.

    Raises:
        ValueError: caches unlike each other or unlike the batch.
    """
    if k_cache.shape != v_cache.shape or k_cache.stride() != v_cache.stride() or k_cache.stride(-1) != 1:
        raise ValueError(
            f"{name}: the caches must have one shape and one layout with a head's elements side by side; got strides "
            f"{k_cache.stride()} and {v_cache.stride()}"
        )
    if k_cache.shape[2] != batch.block_size:
        raise ValueError(f"{name}: blocks of {k_cache.shape[2]} slots, but the batch was made for {batch.block_size}")
    return {
        "tables_ptr": batch.block_tables,
        "starts_ptr": batch.query_starts,
        "lengths_ptr": batch.seq_lens,
        "n_rows": batch.num_rows,
        "cache_block": k_cache.stride(0),
        "cache_head": k_cache.stride(1),
        "cache_slot": k_cache.stride(2),
        "table_stride": batch.block_tables.stride(0),
        "PAGE": batch.block_size,
        "SEARCH": 0 if tokens == batch.num_rows else next_power_of_2(batch.num_rows),
    }


def triton_kv_cache_write(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, batch: PagedBatch, *, dependent_launch: bool = False
) -> None:
    """Compute ``reference`` in one launch; k and v may be views of one projection (any token and head strides).

    A batch with as many tokens as rows has one token in each row. Tokens past the last row's, rows of length 0 and
    block table entries below 0 are padding: nothing is written for them. ``dependent_launch``: begin while the kernel
    before still runs (Hopper). ValueError if the caches do not fit each other or the batch.
    """
    require("kv_cache_write", k, v, *numbers(k_cache, v_cache))
    tokens, heads, size = k.shape
    where = slot_arguments("kv_cache_write", batch, k_cache, v_cache, tokens)
    if not k.numel():
        return
    k, v = side_by_side(k), side_by_side(v)
    block, held = next_power_of_2(size), next_power_of_2(heads)
    _write_kernel[(tokens,)](
        k_ptr=k, v_ptr=v, k_cache_ptr=k_cache, v_cache_ptr=v_cache, n_heads=heads, size=size,
        k_token=k.stride(0), k_head=k.stride(1), v_token=v.stride(0), v_head=v.stride(1), **where,
        HEADS=held, BLOCK=block, DEPENDENT_LAUNCH=dependent_launch, num_warps=min(8, max(1, held * block // 256)),
        **({"launch_pdl": True} if dependent_launch else {}),
    )  # fmt: skip


def cost(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, batch: PagedBatch) -> Cost:
    """Count each new key and value as read and written once, without block tables."""
    kept = k.shape[0] * k.shape[1] * k_cache.shape[3]
    return Cost(0, k.nbytes + v.nbytes, kept * (k_cache.element_size() + v_cache.element_size()))


def example_batch(rows: Sequence[tuple[int, int]], block_size: int, n_blocks: int) -> PagedBatch:
    """Return a batch of (new tokens, tokens in all), its blocks scattered over the pool; unowned table entries are
    -1."""
    widest = max(-(-length // block_size) for _, length in rows)
    tables = torch.full((len(rows), widest), -1, dtype=torch.int32)
    pool = torch.randperm(n_blocks, generator=torch.Generator().manual_seed(0)).to(torch.int32)
    taken = 0
    for row, (_, length) in enumerate(rows):
        count = -(-length // block_size)
        tables[row, :count] = pool[taken : taken + count]
        taken += count
    starts = torch.tensor([0, *(new for new, _ in rows)]).cumsum(0, dtype=torch.int32)
    return PagedBatch(tables, starts, torch.tensor([length for _, length in rows], dtype=torch.int32), block_size)


def _examples() -> Sequence[dict[str, Any]]:
    examples = []
    for rows, heads, size, block_size in ((((1, 1),), 1, 4, 16), (((1, 9), (13, 20), (5, 5)), 3, 6, 4)):
        tokens = sum(new for new, _ in rows)
        examples.append(
            {
                "k": sample(tokens, heads, size),
                "v": sample(tokens, heads, size, seed=1),
                "k_cache": sample(16, heads, block_size, size, seed=2),
                "v_cache": sample(16, heads, block_size, size, seed=3),
                "batch": example_batch(rows, block_size, 16),
            }
        )
    return examples


def decode_batch(tokens: int, context: int, block_size: int, device: torch.device, seed: int) -> PagedBatch:
    """Make a batch of one new token for each of ``tokens`` sequences of ``context`` tokens, for measuring writes: only
    the block that is written to is the sequence's own."""
    generator = torch.Generator(device).manual_seed(seed)
    last = (context - 1) // block_size
    tables = torch.zeros(tokens, last + 1, dtype=torch.int32, device=device)
    tables[:, last] = torch.randperm(tokens, device=device, generator=generator).to(torch.int32)
    starts = torch.arange(tokens + 1, dtype=torch.int32, device=device)
    return PagedBatch(tables, starts, torch.full((tokens,), context, dtype=torch.int32, device=device), block_size)


def prefill_batch(tokens: int, block_size: int, device: torch.device, seed: int) -> PagedBatch:
    """Make a batch of one prompt of ``tokens`` tokens in scattered blocks."""
    generator = torch.Generator(device).manual_seed(seed)
    table = torch.randperm(-(-tokens // block_size), device=device, generator=generator).to(torch.int32)
    starts = torch.tensor([0, tokens], dtype=torch.int32, device=device)
    return PagedBatch(table[None], starts, starts[1:].clone(), block_size)


BLOCK_SIZE = 16
CONTEXT = 1024


def case_batch(tokens: int, decode: bool, device: torch.device, seed: int) -> tuple[PagedBatch, int]:
    """Return the batch of a measured case, and how many blocks its cache must have."""
    batch = (
        decode_batch(tokens, CONTEXT, BLOCK_SIZE, device, seed)
        if decode
        else prefill_batch(tokens, BLOCK_SIZE, device, seed)
    )
    batch.slots_T  # noqa: B018  (worked out here, so that the torch peer need not do it while it is timed)
    return batch, tokens if decode else -(-tokens // BLOCK_SIZE)


def _cases() -> Sequence[Case]:
    def case(model: shapes.ModelShape, tokens: int, decode: bool) -> Case:
        def make(device: torch.device, seed: int) -> Mapping[str, Any]:
            batch, blocks = case_batch(tokens, decode, device, seed)
            generator = torch.Generator(device).manual_seed(seed)
            options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16, "generator": generator}
            k, v = torch.randn(2, tokens, model.n_kv_heads, model.head_dim, **options)
            caches = torch.randn(2, blocks, model.n_kv_heads, BLOCK_SIZE, model.head_dim, **options)
            return {"k": k, "v": v, "k_cache": caches[0], "v_cache": caches[1], "batch": batch}

        return Case(f"{model.name}, {'decode' if decode else 'prefill'}, {tokens} tokens", make)

    made = [case(m, tokens, True) for m in (shapes.LLAMA_8B, shapes.LLAMA_1B) for tokens in shapes.DECODE_ROWS]
    large = shapes.rows_for_bytes(4 * shapes.LLAMA_8B.n_kv_heads * shapes.LLAMA_8B.head_dim)
    return [*made, *(case(shapes.LLAMA_8B, tokens, False) for tokens in (*shapes.PREFILL_ROWS, large))]


def _kernels() -> Sequence[Kernel]:
    tensors = dict.fromkeys(("k_ptr", "v_ptr", "k_cache_ptr", "v_cache_ptr"), "*bf16")
    batch = dict.fromkeys(("tables_ptr", "starts_ptr", "lengths_ptr"), "*i32")
    strides = ("k_token", "k_head", "v_token", "v_head", "cache_block", "cache_head", "cache_slot")
    numbers = dict.fromkeys(("n_rows", "n_heads", "size", *strides, "table_stride"), "i32")
    tile = {"PAGE": BLOCK_SIZE, "HEADS": 8, "BLOCK": 128, "DEPENDENT_LAUNCH": False}
    return [
        Kernel(name, _write_kernel, {**tensors, **batch, **numbers}, {**tile, "SEARCH": rows}, ("size", *strides))
        for name, rows in (("one token a row", 0), ("ragged", 64))
    ]


register(
    Op(
        name="kv_cache_write",
        reference=reference,
        cost=cost,
        implementations={
            # Looked up at each load: a rung of ``transect learn`` replaces it.
            "torch": Implementation("torch", lambda: reference, ("any",), batch_invariant=True),
            "triton": in_triton(triton_kv_cache_write, batch_invariant=True),
        },
        examples=_examples,
        peers={"torch": reference},
        mutates=("k_cache", "v_cache"),
        directions=("forward",),
        cases=_cases,
        kernels=_kernels,
    )
)
