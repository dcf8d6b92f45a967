"""Products whose kernel gives each line of its result to the other ranks as soon as it is there, so that their sum
(``ops/comm/all_reduce.py``) has one way over the link behind it when it begins."""

from __future__ import annotations

import logging
from collections.abc import Callable

from torch import Tensor

from ...comm.peer_memory import Push
from ...registry import Unavailable
from .choices import chosen
from .cuda import CudaRows, CudaTiling, cuda_refusal, quicker

log = logging.getLogger(__name__)
MOST_ROWS = 8
"""The most rows of X: beyond, lines are pushed by few threads at a time, and the sum does it as well."""


def tiling_for(x: Tensor, weight: Tensor) -> CudaTiling | str | None:
    """Return the tiling of ``small_matmul.cu`` in a chain of layers (None for its rule), or the reason it cannot
    run."""
    rows, (n, k) = len(x), weight.shape
    if rows > MOST_ROWS or not rows:
        return f"it has {rows} rows, of {MOST_ROWS} at most"
    if n % 16:
        return f"N is {n}, no multiple of 16"
    if reason := cuda_refusal(x, weight):
        return reason
    choice = chosen(rows, n, k, x.device)
    if choice is None:
        return None if quicker(rows, n, k) else "another kernel is quicker"
    return choice.tiling if choice.by == "cuda" else f"{choice.by} is quicker"


def pushed_rows(weight: Tensor, push: Push) -> Callable[[Tensor], Tensor | None] | None:
    """Return ``x -> x weight^T`` whose result is also pushed to the other ranks; it returns None for an x that
    ``tiling_for`` refuses. None if the kernels cannot be built."""
    try:
        rows = CudaRows()
    except Unavailable as error:
        log.warning("products are given to other ranks by their sums, which is slower: %s", error)
        return None

    def run(x: Tensor) -> Tensor | None:
        tiling = tiling_for(x, weight)
        if isinstance(tiling, str):
            return None
        return rows(x, weight, dependent_launch=True, tiling=tiling, push=push)

    return run
