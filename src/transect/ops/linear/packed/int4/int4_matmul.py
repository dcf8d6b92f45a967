r"""Product of a few to some thousand rows with a weight of 4-bit codes in groups.

    Y = X W^T + b        W[n, k] = scale[n, k // G] * code[n, k] + zero[n, k // G]

For each group g of G neighbouring k, the scale and the zero leave the sum:

    sum over g of  scale[n, g] * (sum of code * x)  +  zero[n, g] * (sum of x)

The inner product of codes and x runs on the tensor cores. An ``or`` turns a code c into a bfloat16: the bits 0x4300 are
128 with a step of 1, so 0x4300 | c is 128 + c, and the zero takes off 128 times the sum of x. Codes are exact that way,
and no weight is rounded; a kernel that rebuilds W in bfloat16 rounds each one. float16 has 0x6400, 1024 + c. In float32
the kernel subtracts 8 from the code instead: zeros lie near -8 scale, and their share would cancel against that of the
codes.

Shapes: x ``[M, K]``, weight int32 ``[K / 128, N / 16, 256 + 2048 / G]`` (``arrange`` of ``int4_packing.py``: codes,
scales and zeros, which are bfloat16), n = N, bias ``[N]``, result ``[M, N]``. G is 32, 64 or 128 and K a multiple of
128. Inference only.

Bound by bytes for few rows: (1/2 + 4 / G) bytes a weight, 0.53 at G = 128 with 16-bit scales, against 2 in bfloat16.

All ways read the same order of the weight, so one copy of it is enough. ``way`` chooses what was quicker on an H200 in
a chain of launches (``benchmarks/ops/int4.py``):

* ``int4_matmul.cu`` (``int4_rows.py``) runs up to 16 rows, and up to 32 of narrow weights. For up to 8 rows of weights
  below about 30 MB, X may be rounded to whole numbers of 16 bits, in units of at most 2^-14 of the largest of 128 k
  (``int4_whole.cuh``): products of bytes are then exact, and what X loses is far below the rounding of the bfloat16
  result. For 9 to 16 rows it multiplies codes as subnormal numbers, exactly too; X must be below 2^64 there, and loses
  digits below 2^-57.
* ``int4_matmul_hopper.cu`` (``int4_hopper.py``) runs heads of up to 16 rows.
* ``int4_tiles.cu`` (``int4_tiles.py``) runs 17 to 512 rows, 33 and more of narrow weights: it rounds each weight to
  bfloat16, in registers.
* For more rows of a half type W is rebuilt and cuBLAS multiplies; elsewhere than on Hopper from 65 rows on.
* On other GPUs since Ampere ``int4_portable.cu`` runs up to 128 rows; for 9 and more, and for wide weights, it rounds
  each weight to bfloat16.
* The Triton kernel of ``triton.py`` runs other dtypes and GPUs.

Source: the formats of GPTQ (Frantar et al. 2022, arXiv:2210.17323) and AWQ (Lin et al. 2023, arXiv:2306.00978), with
the or-trick of Kim et al. 2022, arXiv:2211.10017; split sums as in ``few_rows/small_matmul.py``. What bounds 16 rows,
and what was tried and lost, is in ``docs/lab-notes/int4.md``.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .....costs.work import Cost
from .....hardware.device import target_of
from .....hardware.targets import NVIDIA_TARGETS
from .... import shapes
from ....lang.jit import (
    in_triton,
)
from ....numerics import compute_dtype, sample
from ....registry import Case, Implementation, Knobs, Op, Unavailable, register
from ... import gate_up
from .. import block_tiles
from . import int4_hopper, int4_portable, int4_rows, int4_tiles
from .int4_packing import CHUNK, arrange, group_of, pack, taken_apart
from .triton import TRITON_CHOICES, by_triton, kernels, launcher, rebuild, rebuilt, triton_rule

log = logging.getLogger(__name__)
DENSE_ROWS = 65
"""From this number of rows on it is faster to dequantize W first, if no kernel takes tiles of it."""


def reference(x: Tensor, weight: Tensor, n: int, bias: Tensor | None = None) -> Tensor:
    """Multiply x ``[M, K]``, weight from ``arrange`` for ``n`` rows, bias ``[n]`` -> ``[M, n]`` in x's dtype."""
    dtype = compute_dtype(x.dtype)
    y = x.to(dtype) @ dense(weight, n, dtype).T
    return (y if bias is None else y + bias.to(dtype)).to(x.dtype)


def dense(weight: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    """Compute W ``[n, K]`` by torch: exact in float64, rounded at every step in a narrower type."""
    codes, scale, zero = taken_apart(weight, n)
    grouped = codes.view(*scale.shape, -1).to(dtype)
    return torch.addcmul(zero[..., None].to(dtype), scale[..., None].to(dtype), grouped).view(n, -1)


def way(m: int, n: int) -> str:
    """Return the quickest way on an H200 for ``m`` rows of bfloat16 and a weight of ``n`` rows: ``rows``
    (``int4_matmul.cu``),
    ``hopper`` (``int4_matmul_hopper.cu``), ``tiles`` (``int4_tiles.cu``) or ``rebuilt``."""
    if m > block_tiles.MOST_ROWS:
        return "rebuilt"
    if m > 32 or (m > 16 and n >= 16384):
        return "tiles"
    return "hopper" if n >= 65536 else "rows"


Kernel = int4_rows.CudaCodes | int4_hopper.HopperCodes | int4_tiles.Int4Tiles | int4_portable.PortableCodes


def _cuda_kernels(device: torch.device) -> dict[str, Kernel]:
    """Build the CUDA C++ kernels: of Hopper, by their names in ``way``; on other GPUs since Ampere the ``portable``
    one. None on other devices, or where they cannot be built, which is logged."""
    target = target_of(device)
    if target.capability < (8, 0):
        return {}
    try:
        if not target.hopper:
            return {"portable": int4_portable.PortableCodes(device)}
        few, heads, many = int4_rows.CudaCodes(), int4_hopper.HopperCodes(), int4_tiles.Int4Tiles(device)
        return {"rows": few, "hopper": heads, "tiles": many}
    except Unavailable as error:
        log.warning("int4_matmul runs its Triton kernel, which is slower: %s", error)
        return {}


def rows_kernel(device: torch.device) -> int4_rows.CudaCodes | None:
    """Return ``int4_matmul.cu`` on a Hopper GPU; None elsewhere, or where it cannot be built, which is logged."""
    found = _cuda_kernels(device).get("rows")
    return found if isinstance(found, int4_rows.CudaCodes) else None


def gated_launcher() -> Callable[..., Tensor | None]:
    """Return a new ``(x, weight, n, *, dependent_launch=False)`` -> ``silu(gate) * up [M, n / 2]`` of a weight whose
    sixteens of rows are gate and up in turn; None where no kernel has the gate beside its product (see
    ``CudaCodes.gated`` and ``Int4Tiles``). For many rows on Hopper W is rebuilt for the product of ``gate_up.py``."""
    built: dict[torch.device, dict[str, Kernel]] = {}
    dense_gate = cache(gate_up.best_launcher)

    def call(x: Tensor, weight: Tensor, n: int, *, dependent_launch: bool = False) -> Tensor | None:
        if x.device not in built:  # at the first call, which no graph captures, whatever its number of rows
            built[x.device] = _cuda_kernels(x.device)
        portable = built[x.device].get("portable")
        if isinstance(portable, int4_portable.PortableCodes):
            few = x.shape[0] <= int4_portable.MOST_ROWS and n % 32 == 0 and not int4_rows.cuda_refusal(x, weight, n)
            return portable(x, weight, n, gated=True, dependent_launch=dependent_launch) if few else None
        kernel = built[x.device].get(way(x.shape[0], n))
        if isinstance(kernel, int4_tiles.Int4Tiles) and not int4_tiles.refusal(x, weight, n, gated=True):
            return kernel(x, weight, n, gated=True, dependent_launch=dependent_launch)
        if isinstance(kernel, int4_rows.CudaCodes):
            return kernel.gated(x, weight, n, dependent_launch=dependent_launch)
        if kernel is None and built[x.device] and x.element_size() == 2 and n % 32 == 0:
            return dense_gate()(x, rebuild(weight, n, x.dtype, apart=True), dependent_launch=dependent_launch)
        return None

    return call


def best_launcher() -> Callable[..., Tensor]:
    """Return a new ``int4_matmul(x, weight, n, bias=None, *, dependent_launch=False)``: on a Hopper GPU what ``way``
    says, if that takes the arguments; else ``rebuilt`` for many rows of a half type, and the Triton kernel.

    The shape, the strides and the dtype alone decide which one runs, and all of them read the same order of the weight.
    If the CUDA kernels cannot be built, the log says so once.
    """
    by_tiles = launcher()
    built: dict[torch.device, dict[str, Kernel]] = {}

    def call(
        x: Tensor, weight: Tensor, n: int, bias: Tensor | None = None, *, dependent_launch: bool = False
    ) -> Tensor:
        """Compute ``reference`` on the GPU; ``dependent_launch`` means the same as in ``CudaRows``."""
        if x.device not in built:  # at the first call, which no graph captures, whatever its number of rows
            built[x.device] = _cuda_kernels(x.device)
        m, kernels = x.shape[0], built[x.device]
        kernel = kernels.get("portable" if m <= int4_portable.MOST_ROWS else "", kernels.get(way(m, n)))
        if isinstance(kernel, int4_tiles.Int4Tiles) and n % 8 and m < DENSE_ROWS:
            kernel = kernels["rows"]
        refusal = int4_tiles.refusal if isinstance(kernel, int4_tiles.Int4Tiles) else int4_rows.cuda_refusal
        if kernel is not None and not refusal(x, weight, n, bias):
            return kernel(x, weight, n, bias, dependent_launch=dependent_launch)
        if m >= DENSE_ROWS and x.element_size() == 2:
            return rebuilt(x, weight, n, bias)
        return by_tiles(x, weight, n, bias)

    return call


int4_matmul = best_launcher()


# ----------------------------------------------------------------------------------------------------- registry entry


def cost(x: Tensor, weight: Tensor, n: int, bias: Tensor | None = None) -> Cost:
    """Count a product and a sum for each weight and row; codes, scales and zeros are read once."""
    m, k = x.shape
    read = sum(t.nbytes for t in (x, weight, bias) if t is not None)
    return Cost(2 * m * n * k, read, m * n * x.element_size())


class Prepared:
    """A peer that converts a weight to its own order at the first call; the copy is dropped with the weight."""

    def __init__(self, make: Callable[[Tensor, int, torch.dtype], Any], call: Callable[..., Tensor]) -> None:
        self._make, self._call = make, call
        self._held: dict[int, tuple[weakref.ref[Tensor], Any]] = {}

    def __call__(self, x: Tensor, weight: Tensor, n: int, bias: Tensor | None = None) -> Tensor:
        held = self._held.get(id(weight))
        if held is None or held[0]() is not weight:
            key = id(weight)
            kept = weakref.ref(weight, lambda _: self._held.pop(key, None))
            held = self._held[key] = (kept, self._make(weight, n, x.dtype))
        y = self._call(x, held[1])
        return y if bias is None else y + bias


def _rounded(weight: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    return dense(weight, n, dtype)


def _for_torch(weight: Tensor, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, int]:
    """Return the arguments of torch's own product with 4-bit codes: W = scale (code - 8) + zero, groups of 32 to
    256."""
    codes, scale, zero = taken_apart(weight, n)
    pairs = codes[:, ::2] << 4 | codes[:, 1::2]
    both = torch.stack((scale, zero + 8 * scale), -1).to(dtype).transpose(0, 1).contiguous()
    return torch.ops.aten._convert_weight_to_int4pack(pairs.contiguous(), 8), both, group_of(weight)


def _by_torch(x: Tensor, packed: tuple[Tensor, Tensor, int]) -> Tensor:
    codes, both, group = packed
    return torch.ops.aten._weight_int4pack_mm(x, codes, group, both)


def _examples() -> Sequence[dict[str, Any]]:
    def inputs(m: int, n: int, k: int, group: int, bias: bool) -> dict[str, Any]:
        codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
        scale = (sample(n, k // group, seed=1).abs() + 0.1) / math.sqrt(20 * k)
        weight = arrange(pack(codes, group), scale, -7.5 * scale)
        return {"x": sample(m, k), "weight": weight, "n": n, "bias": sample(n, seed=2) if bias else None}

    return [inputs(1, 33, 128, 32, True), inputs(5, 16, 384, 64, False), inputs(17, 20, 256, 128, False)]


def _cases() -> Sequence[Case]:
    """List the projections of an 8B model and its head, in groups of 128."""

    def make(device: torch.device, seed: int, m: int, n: int, k: int) -> Mapping[str, Any]:
        generator = torch.Generator(device).manual_seed(seed)
        weight = torch.randint(-(2**31), 2**31, (k // CHUNK, n // 16, 272), device=device, generator=generator)
        weight = weight.to(torch.int32)
        scale = torch.rand(k // CHUNK, n // 16, 16, device=device, generator=generator).add(0.1).mul(k**-0.5 / 4)
        weight[..., 256:] = torch.stack((scale, -7.5 * scale), -1).to(torch.bfloat16).view(torch.int32).squeeze(-1)
        x = torch.randn(m, k, device=device, dtype=torch.bfloat16, generator=generator)
        return {"x": x, "weight": weight, "n": n, "bias": None}

    model = shapes.LLAMA_8B
    projections = {
        "qkv": (model.qkv_dim, model.dim),
        "out": (model.dim, model.n_heads * model.head_dim),
        "gate and up": (2 * model.ffn_dim, model.dim),
        "down": (model.dim, model.ffn_dim),
        "head": (model.vocab_size, model.dim),
    }
    return [
        Case(f"{what} of {model.name}: {m} x {k} by {n}, groups of 128", partial(make, m=m, n=n, k=k))
        for what, (n, k) in projections.items()
        for m in (1, 8, 16, 64)
    ]


def _size(inputs: Mapping[str, Any]) -> tuple[int, int, int]:
    x = inputs["x"]
    return x.shape[0], inputs["n"], x.shape[1]


def _runs(name: str, inputs: Mapping[str, Any]) -> bool:
    m, n, _ = _size(inputs)
    return way(m, n) == name and not int4_rows.cuda_refusal(**inputs)


def _tuned(made: type[int4_rows.CudaCodes] | type[int4_hopper.HopperCodes]) -> Callable[..., Tensor]:
    """Return a kernel to tune: built at the first call."""

    @cache
    def kernel() -> Callable[..., Tensor]:
        return made()

    def launch(x: Tensor, weight: Tensor, n: int, bias: Tensor | None, *, config: Mapping[str, Any]) -> Tensor:
        return kernel()(x, weight, n, bias, dependent_launch=True, config=config)

    return launch


def _in_cuda(
    made: type[int4_rows.CudaCodes] | type[int4_hopper.HopperCodes], source: str, *, dependent_launch: bool
) -> Implementation:
    return Implementation(
        "cuda", lambda: partial(made(), dependent_launch=dependent_launch), ("sm_90",), dtypes=("bfloat16",),
        refusal=int4_rows.cuda_refusal, source=source,
    )  # fmt: skip


def _portable_refusal(x: Tensor, weight: Tensor, n: int, bias: Tensor | None = None) -> str | None:
    if len(x) > int4_portable.MOST_ROWS:
        return f"with more than {int4_portable.MOST_ROWS} rows it is faster to dequantize the weight"
    return int4_rows.cuda_refusal(x, weight, n, bias)


register(
    Op(
        name="int4_matmul",
        reference=reference,
        cost=cost,
        implementations={
            "triton": in_triton(by_triton),
            "cuda": _in_cuda(int4_rows.CudaCodes, "int4_matmul.cu", dependent_launch=False),
            "cuda_dependent": _in_cuda(int4_rows.CudaCodes, "int4_matmul.cu", dependent_launch=True),
            "hopper": _in_cuda(int4_hopper.HopperCodes, "int4_matmul_hopper.cu", dependent_launch=False),
            "hopper_dependent": _in_cuda(int4_hopper.HopperCodes, "int4_matmul_hopper.cu", dependent_launch=True),
            "portable": Implementation(
                "cuda",
                lambda: int4_portable.PortableCodes(),
                NVIDIA_TARGETS,
                dtypes=("bfloat16",),
                refusal=_portable_refusal,
                source="int4_portable.cu",
            ),
            "tiles": Implementation(
                "cuda",
                lambda: partial(int4_tiles.Int4Tiles(), dependent_launch=True),
                ("sm_90",),
                dtypes=("bfloat16",),
                refusal=int4_tiles.refusal,
                source="int4_tiles.cu",
            ),
        },
        examples=_examples,
        peers={
            "torch": Prepared(_rounded, F.linear),
            "torch_int4": Prepared(_for_torch, _by_torch),
        },
        cases=_cases,
        kernels=kernels,
        knobs=lambda: [
            Knobs("int4_matmul", TRITON_CHOICES, triton_rule, by_triton, dict, _size),
            Knobs(
                "int4_matmul.cu",
                int4_rows.CHOICES,
                int4_rows.rule,
                _tuned(int4_rows.CudaCodes),
                dict,
                _size,
                applies=lambda inputs: _runs("rows", inputs),
            ),
            Knobs(
                "int4_matmul_hopper.cu",
                int4_hopper.CHOICES,
                int4_hopper.rule,
                _tuned(int4_hopper.HopperCodes),
                dict,
                _size,
                applies=lambda inputs: _runs("hopper", inputs),
            ),
        ],
    )
)
