"""The CUDA C++ ladder of ``matmul.cu`` in Python: five ways to one product, from a thread an element to tensor cores.

Each rung is an implementation of the operator ``matmul`` without an epilogue (docs/understand/matmul-ladder.md).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..lang import cuda
from ..registry import Case, Implementation

RUNGS = {"cuda_naive": 1, "cuda_coalesced": 2, "cuda_shared_tiles": 3, "cuda_register_tiles": 4, "cuda_tensor_cores": 5}
"""The rungs of ``matmul.cu``; 1 to 4 in float32, 5 in bfloat16."""


def cuda_matmul(x: Tensor, weight: Tensor, *, rung: int, **epilogue: Any) -> Tensor:
    """Compute ``x @ weight.T`` by one rung of ``matmul.cu``; a weight that is not stored as ``[K, N]`` is copied.

    Rung 5 writes float32, which a second launch rounds to bfloat16.

    Raises:
        ValueError: a shape that the rung does not take, or an epilogue, of which it has none.
    """
    reason = refusal(x, weight, rung=rung, **epilogue)
    if reason:
        raise ValueError(f"matmul.cu: {reason}")
    (m, k), n = x.shape, weight.shape[0]
    a, b, c = cuda.aligned(x), cuda.aligned(weight.T), x.new_empty((m, n), dtype=torch.float32)
    if rung == RUNGS["cuda_tensor_cores"]:
        cuda.launcher("matmul", "transect_matmul_bfloat16")(a, b, c, m, n, k)
    else:
        cuda.launcher("matmul", "transect_matmul_float")(rung, a, b, c, m, n, k)
    return c.to(x.dtype)


def refusal(x: Tensor, weight: Tensor, *, rung: int, **epilogue: Any) -> str | None:
    """Return the reason why a rung does not take these arguments; None if it does."""
    (m, k), n = x.shape, weight.shape[0]
    if any(value is not None and value != "" for value in epilogue.values()):
        return "the ladder has no fused epilogue"
    if rung == 4 and (k % 4 or n % 4):
        return "this rung reads 16 bytes at a time: K and N must be multiples of 4"
    if rung == 5 and (m % 128 or n % 128 or k % 32):
        return "this rung has no edges: M and N must be multiples of 128, K of 32"
    return None


def rung(number: int) -> Implementation:
    """Return a rung as an implementation of the operator ``matmul``."""
    call: Callable[..., Tensor] = functools.partial(cuda_matmul, rung=number)
    dtypes = ("bfloat16",) if number == 5 else ("float32",)
    return cuda.in_cuda("matmul", call, dtypes=dtypes, refusal=functools.partial(refusal, rung=number))


def ladder_cases() -> Sequence[Case]:
    """Square products for the ladder: 3620 makes matrices of 50 MB, 4096 is what all rungs take."""

    def make(device: torch.device, seed: int, n: int, dtype: torch.dtype) -> Mapping[str, Any]:
        generator = torch.Generator(device).manual_seed(seed)
        x, b = torch.randn(2, n, n, device=device, generator=generator).to(dtype)
        return {"x": x, "weight": b.T}

    floats = tuple(name for name, rung in RUNGS.items() if rung < 5)
    single = [
        Case(
            f"ladder, float32, {n} square",
            functools.partial(make, n=n, dtype=torch.float32),
            "float32",
            ("forward",),
            (*floats, "triton", "torch", *(("cpu_blas",) if n == 3620 else ())),
        )
        for n in (3620, 4096)
    ]
    half = functools.partial(make, n=4096, dtype=torch.bfloat16)
    only = ("cuda_tensor_cores", "triton", "torch")
    return [*single, Case("ladder, bfloat16, 4096 square", half, "bfloat16", ("forward",), only)]
