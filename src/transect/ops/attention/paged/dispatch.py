"""``paged_attention`` on a GPU: which kernel runs a step's prefill chunks and its decode rows.

``paged_attention.py`` has the mathematics, and imports this file when a GPU's implementation is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...lang.jit import available, has_dependent_launch, require
from ...registry import Kernel, Knobs
from . import decode as paged_decode
from . import decode_hopper as paged_decode_hopper
from . import decode_spans
from . import prefill as paged_prefill
from . import prefill_hopper as hopper
from .batch import PagedBatch
from .cache_codes import stored_width
from .decode import DECODE_CHOICES, decode_rule
from .kv_cache_write import numbers
from .prefill import BESIDE_TILING, PREFILL_TILING, SPAN_TILING

FEW_TOKENS = 512
"""In a step in which sequences decode, up to this many prompt tokens attend while the decode kernel runs, in small
tiles on the same multiprocessors, which the decode kernel, bound by memory, leaves idle half of the time. More prompt
tokens go to the kernel of ``paged/prefill_hopper.py``, which needs a multiprocessor to itself. Times:
``docs/lab-notes/attention.md``."""


@dataclass(frozen=True, slots=True)
class PagedTriton:
    """``paged_attention`` on a GPU."""

    chunks: paged_prefill.PrefillTiling = PREFILL_TILING
    """Tiling of prefill chunks."""
    singles: paged_decode.DecodeTiling | None = None
    """Tiling of decode rows; None for the one tuned for the device."""
    bulk: bool = False
    """Run prefill chunks by the kernel of ``paged/prefill_hopper.py``, where it takes the inputs."""
    decode: paged_decode_hopper.PagedDecode | decode_spans.PagedSpans | None = None
    """Run decode rows by this kernel, where it takes the inputs; with ``in_spans`` by ``PagedSpans``."""
    in_spans: bool = False
    """Sum spans of positions apart, in prefill chunks (by a tiling that does so) and in decode rows. A query's sums are
    then the same to the bit whatever the batch is, and however its prompt is cut into chunks."""
    spans: decode_spans.SpansTiling | None = None
    """Tiling of decode rows whose spans are summed separately; None for the choice of
    ``decode_spans.choose_tiling``."""

    def __call__(
        self,
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
        dependent_launch: bool = False,
    ) -> Tensor:
        """Compute ``reference`` without reading a length on the host, so a CUDA graph can capture it.

        ``dependent_launch``: see ``PagedDecode``; other kernels always wait for the one before.
        """
        require("paged_attention", q, *numbers(k_cache, v_cache))
        tokens, heads, d = q.shape
        kv_heads, width = k_cache.shape[1], stored_width(d, k_cache.dtype)
        if heads % kv_heads or k_cache.shape != v_cache.shape or k_cache.shape[3] != width:
            raise ValueError(
                f"paged_attention: q {list(q.shape)} does not fit caches {list(k_cache.shape)}, {list(v_cache.shape)}"
            )
        if k_cache.stride() != v_cache.stride() or k_cache.stride()[2:] != (width, 1):
            # Never so in an engine; one set of strides for both saves registers.
            k_cache, v_cache = k_cache.contiguous(), v_cache.contiguous()
        q = q if q.stride(2) == 1 else q.contiguous()
        sinks = None if sinks is None else sinks.contiguous()
        out = torch.empty((tokens, heads, d), dtype=q.dtype, device=q.device)
        if tokens == 0:
            return out
        dependent = has_dependent_launch(q.device)
        decode_only = batch.decodes_only(tokens)
        chunks, singles = batch.parts
        some, ones = (q, k_cache, v_cache, chunks, scale, window), (q, k_cache, v_cache, singles, scale, window)
        how: dict[str, Any] = {"softcap": softcap, "sinks": sinks, "chunk": chunk}
        plain = all(each is None for each in how.values())
        streams = self.decode is not None and not self.decode.mixed_refusal(q, k_cache, v_cache, singles, window, **how)
        # The prompts' kernel does not wait by itself: without a decode row before it, it would read too early.
        beside = chunks is not singles and singles.num_rows > 0 and tokens <= FEW_TOKENS
        if self.decode is not None and streams and plain and beside:
            self.decode(*ones, out=out, dependent_launch=dependent_launch, beside=True)
            small = replace(BESIDE_TILING, span=self.chunks.span)
            paged_prefill.prefill(*some, out, tiling=small, singles=False, dependent_launch=True, beside=True)
            return out
        bulk = self.bulk and plain and not hopper.refusal(*some)
        if bulk:
            hopper.prefill(
                q, k_cache, v_cache, chunks.block_tables, chunks.query_starts, chunks.seq_lens, chunks.max_seq_len,
                scale, out,
            )  # fmt: skip
        elif not decode_only:
            paged_prefill.prefill(*some, out, tiling=self.chunks, singles=False, dependent_launch=dependent, **how)
        if self.decode is not None and streams:
            self.decode(*ones, sinks=sinks, out=out, dependent_launch=dependent_launch)
        elif self.in_spans:
            mixed = not decode_only
            decode_spans.decode(*ones, out, tiling=self.spans, mixed=mixed, dependent_launch=dependent, **how)
        else:
            tiling = self.singles or paged_decode.tuned(singles.num_rows * kv_heads, singles.max_seq_len, d, q.device)
            paged_decode.decode(*ones, out, tiling=tiling, mixed=not decode_only, dependent_launch=dependent, **how)
        return out


def kernels() -> list[Kernel]:
    """List all kernels, for ahead-of-time compilation."""
    return [*paged_decode.kernels(), *decode_spans.kernels(), *paged_prefill.kernels(), *hopper.kernels()]


def knobs() -> tuple[Knobs, ...]:
    """List the knobs of decode rows."""
    return (Knobs("paged_attention", DECODE_CHOICES, decode_rule, _launch, dict, _size, _valid, _decodes),)


def best_on_hopper() -> Callable[..., Any]:
    """Load the kernels that are fastest on Hopper."""
    return available(PagedTriton(bulk=True, decode=paged_decode_hopper.PagedDecode()))()


def uniform() -> Callable[..., Any]:
    """Load the kernels whose sums do not depend on the batch."""
    return available(PagedTriton(SPAN_TILING, in_spans=True))()


def uniform_on_hopper() -> Callable[..., Any]:
    """Load the kernels of ``uniform`` that are fastest on Hopper."""
    return available(PagedTriton(SPAN_TILING, decode=decode_spans.PagedSpans(), in_spans=True))()


def _launch(q: Tensor, batch: PagedBatch, config: Mapping[str, Any], **others: Any) -> Tensor:
    return PagedTriton(singles=replace(paged_decode.DecodeTiling(), **config))(q, batch=batch, **others)


def _size(arguments: Mapping[str, Any]) -> tuple[int, int, int]:
    batch, cache_ = arguments["batch"], arguments["k_cache"]
    return batch.num_rows * cache_.shape[1], batch.max_seq_len, cache_.shape[3]


def _decodes(arguments: Mapping[str, Any]) -> bool:
    return bool(arguments["batch"].decodes_only(len(arguments["q"])))


def _valid(config: Mapping[str, Any], size: tuple[int, int, int]) -> bool:
    """Check that a warp has 16 to 64 positions of a tile, and a split at least a tile."""
    return 16 <= config["bn"] // config["warps"] <= 64 and config["bn"] <= config["least"]
