r"""Causal attention of a ragged batch whose keys and values lie in a paged cache, read through the block table.

The math is that of ``packed/attention.py``. A row's queries are the last tokens of its sequence; a query at position i
sees the positions j of its own sequence with i - window < j <= i. Inference only: no gradient.

Some models change the scores s: with ``softcap`` c they become c tanh(s / c) (Gemma 2, arXiv:2408.00118); ``sinks``
``[H]`` are scores of their own, which take part in the softmax and have no value (gpt-oss, arXiv:2508.10925); with
``chunk`` n a query at i sees no position before i // n * n (Llama 4). On a GPU these have the Triton kernels of rows of
several queries and of one, not Hopper's own.

Every implementation but the reference walks over tiles of positions, with a running maximum m and sum l (online
softmax, Milakov & Gimelshein 2018, arXiv:1805.02867), and divides by l at the end:

    m' = max(m, max_j s_j)     a = exp(m - m')     l' = a l + sum_j exp(s_j - m')     o' = a o + sum_j exp(s_j - m') v_j

Slots that a row does not own may hold anything, even NaN. So scores are masked, and values too, because 0 * NaN is NaN.

Shapes: q ``[T, H, d]``, caches of one layer ``[blocks, K, block_size, d]``, result like q. float32 inside.
Source: Kwon et al. 2023, arXiv:2309.06180 (paging); Dao et al. 2022, arXiv:2205.14135 (tiles).

On a GPU (``PagedTriton``) a program holds one tile of queries of one key head. The heads that share it lie together, so
K and V are read once for all of them. Rows of several queries (``paged/prefill.py``) and rows of one
(``paged/decode.py``, on Hopper ``paged/decode_hopper.py``) are two launches. On Hopper a few prompt tokens attend while
the decode kernel runs (``FEW_TOKENS``). The host needs shapes and two bounds, no lengths. So a CUDA graph can capture a
step and replay it with other lengths (see ``PagedBatch``).

Bound by bytes in decode: 4 H d FLOPs for each 2 K d cached elements are H / K FLOPs per byte in bfloat16 (3 for
SmolLM2). A prefill chunk of c queries reads them once for all c: c H / K, bound by arithmetic from a few hundred on.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ....costs.work import Cost, visible_keys, visible_pairs
from ... import shapes
from ...lang.jit import TRITON_TARGETS, available
from ...numerics import compute_dtype, sample
from ...registry import Case, Implementation, Op, in_torch, register
from .batch import PagedBatch
from .cache_codes import values_of
from .kv_cache_write import BLOCK_SIZE, example_batch
from .paged_attention_torch import tiled, tiled_uniform


def reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: PagedBatch,
    scale: float,
    window: int | None = None,
    *,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Compute q ``[T, H, d]`` -> ``[T, H, d]``: gather each sequence and attend to it separately."""
    dtype = compute_dtype(q.dtype)
    group = q.shape[1] // k_cache.shape[1]
    out = torch.empty_like(q)
    end = 0
    for row, (new, length) in enumerate(batch.lengths()):
        start, end = end, end + new
        position = torch.arange(length, device=q.device)
        block = batch.block_tables[row].long()[position // batch.block_size]
        offset = position % batch.block_size
        keys = values_of(k_cache[block, :, offset], dtype).repeat_interleave(group, dim=1)
        values = values_of(v_cache[block, :, offset], dtype).repeat_interleave(group, dim=1)
        scores = torch.einsum("thd,shd->hts", q[start:end].to(dtype), keys) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        query = position[length - new :, None]
        distance = query - position[None]
        hidden = (distance < 0) if window is None else (distance < 0) | (distance >= window)
        if chunk is not None:
            hidden = hidden | (position[None] < query // chunk * chunk)
        scores = scores.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.to(dtype)[:, None, None].expand(-1, new, 1)], -1)
        p = scores.softmax(-1)[..., :length]
        # A key that no query of this row sees takes no part, even if its value is NaN.
        values = values.masked_fill(hidden.all(0)[:, None, None], 0)
        out[start:end] = torch.einsum("hts,shd->thd", p, values).to(q.dtype)
    return out


def cost(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: PagedBatch,
    scale: float,
    window: int | None = None,
    *,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    chunk: int | None = None,
) -> Cost:
    """Count 4 d FLOPs for each visible pair and head; each cached position that a row sees is read once."""
    pairs = cached = 0
    for new, length in batch.lengths():
        pairs += visible_pairs(new, length, window, chunk)
        cached += visible_keys(new, length, window, chunk)
    kv_heads, size = k_cache.shape[1], q.shape[2]
    stored = k_cache.shape[3]
    read = cached * kv_heads * stored * (k_cache.element_size() + v_cache.element_size())
    return Cost(4 * pairs * q.shape[1] * size, q.nbytes + read, q.nbytes)


def _examples() -> Sequence[dict[str, Any]]:
    examples = []
    changed = {"sinks": 2 * sample(6, seed=3)}, {"softcap": 3.0, "chunk": 32}
    for rows, heads, kv_heads, size, block_size, window, scores in (
        (((1, 1),), 1, 1, 8, 16, None, {}),
        (((1, 100), (1, 3), (1, 64), (1, 65)), 6, 2, 16, 16, None, {}),
        (((40, 40), (1, 7), (33, 130), (2, 2)), 4, 4, 10, 4, None, {}),
        (((1, 200), (70, 90), (5, 5)), 9, 3, 16, 16, 20, {}),
        (((3, 70),), 2, 1, 8, 128, 5, {}),
        (((1, 90), (1, 3), (1, 32)), 8, 2, 64, 16, 40, {}),
        (((1, 70), (20, 40)), 6, 2, 16, 16, 50, changed[0]),
        (((1, 70), (20, 40)), 6, 2, 16, 16, None, changed[1]),
    ):
        n_blocks = sum(-(-length // block_size) for _, length in rows) + 3
        examples.append(
            {
                "q": 2 * sample(sum(new for new, _ in rows), heads, size),
                "k_cache": sample(n_blocks, kv_heads, block_size, size, seed=1),
                "v_cache": sample(n_blocks, kv_heads, block_size, size, seed=2),
                "batch": example_batch(rows, block_size, n_blocks),
                "scale": size**-0.5,
                "window": window,
                **scores,
            }
        )
    return examples


def _gathered(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: PagedBatch, scale: float, window: int | None = None
) -> Tensor:
    """Return the way that torch offers: copy every sequence out of its pages, then attend; for rows of one length."""
    rows, (_, kv_heads, block, d) = batch.num_rows, k_cache.shape
    length = batch.block_tables.shape[1] * block
    tables = batch.block_tables.long()
    keys, values = (
        cache[tables].transpose(1, 2).reshape(rows, kv_heads, length, d) for cache in (k_cache, v_cache)
    )  # fmt: skip
    queries = q.view(rows, -1, *q.shape[1:]).transpose(1, 2)
    new = queries.shape[2]
    if new > 1 and window is None:  # the last queries of each row, by flash attention
        from torch.nn.attention.bias import causal_lower_right  # imports torch's compiler, which takes a second

        keys, values = (each.repeat_interleave(queries.shape[1] // kv_heads, 1) for each in (keys, values))
        out = F.scaled_dot_product_attention(queries, keys, values, causal_lower_right(new, length), scale=scale)
    else:
        distance = torch.arange(length - new, length, device=q.device)[:, None] - torch.arange(length, device=q.device)
        mask = None if window is None else (distance >= 0) & (distance < window)
        out = F.scaled_dot_product_attention(queries, keys, values, mask, scale=scale, enable_gqa=True)
    return out.transpose(1, 2).reshape(q.shape)


MOST_CASE_BYTES = 5e9


def _cases() -> Sequence[Case]:
    def case(
        model: shapes.ModelShape,
        lengths: Sequence[int],
        news: Sequence[int],
        name: str,
        only: tuple[str, ...] = (),
        chunk_rows: int | None = None,
    ) -> Case:
        rows, widest = len(lengths), -(-max(lengths) // BLOCK_SIZE)

        def make(device: torch.device, seed: int) -> Mapping[str, Any]:
            generator = torch.Generator(device).manual_seed(seed)
            options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16, "generator": generator}
            blocks = rows * widest
            tables = torch.randperm(blocks, device=device, generator=generator).to(torch.int32).view(rows, -1)
            starts = torch.tensor([0, *news], device=device).cumsum(0, dtype=torch.int32)
            k_cache, v_cache = (
                torch.randn(blocks, model.n_kv_heads, BLOCK_SIZE, model.head_dim, **options) for _ in range(2)
            )
            return {
                "q": torch.randn(sum(news), model.n_heads, model.head_dim, **options),
                "k_cache": k_cache,
                "v_cache": v_cache,
                "batch": PagedBatch(
                    tables,
                    starts,
                    torch.tensor(lengths, dtype=torch.int32, device=device),
                    BLOCK_SIZE,
                    chunk_rows=chunk_rows,
                ),
                "scale": model.head_dim**-0.5,
            }

        return Case(f"{model.name}, {name}", make, only=only)

    def uniform(model: shapes.ModelShape, rows: int, context: int, new: int = 1) -> Case:
        step = "decode" if new == 1 else f"prefill of {new}"
        return case(model, (context,) * rows, (new,) * rows, f"{step}, {rows} rows at {context}")

    # The peer is for rows of one length.
    ours = ("hopper", "triton", "cuda_hopper", "triton_uniform")

    def between(rows: int, shortest: int, longest: int) -> list[int]:
        lengths = [shortest + (longest - shortest) * row // (rows - 1) for row in range(rows)]
        random.Random(rows).shuffle(lengths)
        return lengths

    def ragged(rows: int, shortest: int, longest: int) -> Case:
        name = f"decode, {rows} rows of {shortest} to {longest}"
        return case(shapes.LLAMA_8B, between(rows, shortest, longest), (1,) * rows, name, ours)

    def filled(prompts: Sequence[tuple[int, int]], rows: int, shortest: int, longest: int) -> Case:
        """Make the rows of a step with chunked prefill: prompts as (tokens of this step, total tokens), empty rows,
        decodes."""
        room = 16
        lengths = [length for _, length in prompts] + [0] * (room - len(prompts)) + between(rows, shortest, longest)
        news = [new for new, _ in prompts] + [0] * (room - len(prompts)) + [1] * rows
        beside = " and ".join(f"{new} of {length}" for new, length in prompts)
        name = f"decode, {rows} rows of {shortest} to {longest}, beside {beside}"
        return case(shapes.LLAMA_8B, lengths, news, name, ours, chunk_rows=room)

    per_token = 4 * shapes.LLAMA_8B.n_kv_heads * shapes.LLAMA_8B.head_dim
    decode = [
        uniform(shapes.LLAMA_8B, rows, context)
        for context in (512, 1024, 4096, 32768)
        for rows in (1, 8, 32, 64, 128, 256)
        if rows * context * per_token < MOST_CASE_BYTES
    ]
    # As a queue of 256 requests of 100 to 1024 tokens in and out runs empty.
    emptying = [ragged(*sizes) for sizes in ((256, 150, 1074), (153, 500, 1424), (77, 800, 1724), (48, 950, 1874))]
    emptying += [ragged(*sizes) for sizes in ((23, 1050, 1974), (12, 1100, 2024))]
    emptying.append(filled(((40, 1000), (66, 66)), 150, 200, 1200))
    others = [
        uniform(model, rows, 1024) for model in (shapes.LLAMA_1B, shapes.QWEN3_0_6B) for rows in shapes.DECODE_ROWS
    ]
    chunks = [uniform(shapes.LLAMA_8B, *sizes) for sizes in ((16, 512, 512), (4, 2048, 2048), (4, 8192, 512))]
    chunks.append(uniform(shapes.QWEN3_0_6B, 16, 512, 512))
    long = [uniform(model, 1, context, 4096) for context in (12288, 32768, 131072) for model in shapes.HEADS]
    return [*decode, *emptying, *others, *chunks, *long]


def _dispatch() -> Any:
    from . import dispatch

    return dispatch


register(
    Op(
        name="paged_attention",
        reference=reference,
        cost=cost,
        implementations={
            # Looked up at each load: a rung of ``transect learn`` replaces it.
            "torch": Implementation("torch", lambda: tiled, ("any",)),
            "torch_uniform": in_torch(tiled_uniform, batch_invariant=True),
            "hopper": Implementation("triton", lambda: _dispatch().best_on_hopper(), ("sm_90",)),
            "triton": Implementation("triton", lambda: available(_dispatch().PagedTriton(bulk=True))(), TRITON_TARGETS),
            "cuda_hopper": Implementation(
                "cuda",
                lambda: _dispatch().paged_decode_hopper.PagedDecode(),
                ("sm_90",),
                dtypes=("bfloat16",),
                refusal=lambda *inputs, **named: _dispatch().paged_decode_hopper.refusal(*inputs, **named),
                source="paged_decode_hopper.cu",
            ),
            "hopper_uniform": Implementation(
                "triton", lambda: _dispatch().uniform_on_hopper(), ("sm_90",), batch_invariant=True
            ),
            "cuda_hopper_uniform": Implementation(
                "cuda",
                lambda: _dispatch().decode_spans.PagedSpans(),
                ("sm_90",),
                dtypes=("bfloat16",),
                batch_invariant=True,
                refusal=lambda *inputs, **named: _dispatch().decode_spans.refusal(*inputs, **named),
                source="paged_spans_hopper.cu",
            ),
            "triton_uniform": Implementation(
                "triton", lambda: _dispatch().uniform(), TRITON_TARGETS, batch_invariant=True
            ),
        },
        examples=_examples,
        peers={"torch, gathered": _gathered},
        cases=_cases,
        kernels=lambda: _dispatch().kernels(),
        knobs=lambda: _dispatch().knobs(),
        error_ratio=3.0,
        error_note="float32 scores are multiplied by log2(e) for an approximate power of two, which rounds once more "
        "than torch does; half types stay within 2",
    )
)
