"""Collect the arguments that the Triton kernels of paged attention have in common: of a launch, and their types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..packed.tiling import LOG2E, padded
from .batch import PagedBatch

STRIDES = ("q_t", "q_h", "cache_b", "cache_k")
"""Strides that are multiples of 16."""
PLAIN = dict.fromkeys(("SINKS", "CAPPED", "CHUNKED"), False)
"""Constants of scores without sinks, a cap and chunks."""


def arguments_of(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: PagedBatch, scale: float, window: int | None, out: Tensor, *,
    softcap: float | None, sinks: Tensor | None, chunk: int | None, dependent_launch: bool,
) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...], dict[str, Any]]:  # fmt: skip
    """Return inputs; rows, scale, window and strides; what changes scores; constants and options.

    A kernel's own arguments stand between the first three. Without sinks, ``q`` takes their place and is not read.
    """
    _, heads, d = q.shape
    _, kv_heads, block_size, _ = k_cache.shape
    tables = batch.block_tables
    inputs = (q, k_cache, v_cache, tables, batch.query_starts, batch.seq_lens, out)
    scale2 = (scale if softcap is None else softcap) * LOG2E
    sizes = (batch.num_rows, scale2, window or 0, *q.stride()[:2], *k_cache.stride()[:2], tables.stride(0))
    scores = (q if sinks is None else sinks, scale / (softcap or 1.0), chunk or 1)
    constants = {
        "H": heads, "G": heads // kv_heads, "D": d, "DP": padded(d), "BLOCK": block_size, "WINDOW": window is not None,
        "DEPENDENT_LAUNCH": dependent_launch, "SINKS": sinks is not None, "CAPPED": softcap is not None,
        "CHUNKED": chunk is not None,
    }  # fmt: skip
    return inputs, sizes, scores, constants | ({"launch_pdl": True} if dependent_launch else {})


def types_of(own: Mapping[str, str], cache: str = "*bf16") -> dict[str, str]:
    """Return the types of all arguments by name, for ahead-of-time builds; ``own``: arguments of this kernel alone."""
    tensors = dict.fromkeys(("q", "out", "sinks"), "*bf16") | dict.fromkeys(("k_cache", "v_cache"), cache)
    indices = dict.fromkeys(("tables", "starts", "lengths"), "*i32")
    ints = dict.fromkeys(("B", "window", *STRIDES, "table_b", "span"), "i32")
    return {**tensors, **indices, **ints, "scale2": "fp32", "squeeze": "fp32", **own}
