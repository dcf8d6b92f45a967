r"""Product of 1 to 256 rows with a weight: a linear layer in decode.

    Y = X W^T + b

Shapes: x ``[M, K]``, weight ``[N, K]`` with neighbouring k side by side, bias ``[N]``, result ``[M, N]``; float32
inside. Inference only; training has enough rows for ``many_rows/matmul.py``, which has the gradient.

Bound by bytes for few rows: 2 M N K FLOPs against 2 N K bytes of weights in bfloat16 is M FLOPs per byte, where an H200
needs about 185. So the weights must be read once, at the full bandwidth of memory. This leads to the design:

* Enough bytes must be in flight. 4.3 TB/s times a latency near 1 us is 4 MB, or 32 KB for each of 132 multiprocessors.
  One column of tiles (N / BN programs) is too few for a narrow layer, so K is cut into SPLIT parts as well.
* The parts of a tile must be added up. Each program leaves its float32 part in a buffer and counts itself on the tile's
  counter. The last to arrive adds all parts, in the order of the parts. So every run gives the same sum, and one launch
  is enough (a second one would cost 2 us where the whole product takes 8).
* Every column of tiles reads X again, from the L2 cache: M / BN of the bytes of the weights. Hence BN >= 64 for 16
  rows.
* With SWAP the weights are the left operand of the tensor cores: rows of W fill its 64 or 128 rows, where 8 rows of X
  would leave most of them empty.

There are four kernels. A file of choices, measured for each device, says which one runs a weight with which tiling, or
that cuBLAS runs it (``best_launcher``):

* ``small_matmul.cu`` (``few_rows/cuda.py``), bfloat16, 1 to 16 rows, or 32 of a small weight. Blocks share the rows of
  W evenly; the warps of a block share its k. With ``dependent_launch`` a launch fetches its weights while the one
  before ends.
* ``small_matmul_hopper.cu`` (``few_rows/hopper.py``), bfloat16 on Hopper, 17 rows and more.
* ``few_rows/triton.py``, all other dtypes and GPUs. On Hopper also small weights with 64 rows or more, which need about
  as many tiles as multiprocessors, and launches that overlap.
* ``few_rows/gluon.py``, small weights on Hopper with norms beside the product (``stream_products.py``).

In a decode step each product waits for the kernel before it, and with small weights that wait, not memory, decides the
time. A launch that takes all of the shared memory keeps the next one from fetching its weights. So for small weights
the ring is only as deep as a warp has chunks.

Source: split-K with a fix-up by the last arriver: Osama et al. 2023, arXiv:2301.03598 (Stream-K). What was tried and
lost is in ``docs/lab-notes/few-row-products.md``.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ....costs.work import Cost
from ....hardware.device import target_of
from ....hardware.targets import PLAIN_TARGETS, TARGETS
from ... import shapes
from ...lang import cuda
from ...lang.jit import TRITON_TARGETS, available, in_triton
from ...numerics import compute_dtype, sample
from ...registry import Case, Implementation, Kernel, Op, Unavailable, register
from . import choices
from . import gluon as small_matmul_gluon
from . import hopper as small_matmul_hopper
from .cuda import CUDA_ROWS, CudaRows, cuda_refusal, quicker
from .triton import TritonRows, _rows, _vector, by_triton, portable_gate, portable_tiling

log = logging.getLogger(__name__)
MOST_ROWS = 256


def reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply x ``[M, K]``, weight ``[N, K]``, bias ``[N]`` -> ``[M, N]`` in x's dtype."""
    dtype = compute_dtype(x.dtype)
    y = x.to(dtype) @ weight.to(dtype).T
    return (y if bias is None else y + bias.to(dtype)).to(x.dtype)


# --------------------------------------------------------------------------------------------------------- the choice


def best_launcher() -> Callable[..., Tensor]:
    """Return a new ``small_matmul(x, weight, bias=None, *, dependent_launch=False)`` that runs the quickest kernel for
    each shape.

    In bfloat16 it runs what the file of choices for this GPU names (``few_rows/choices.py``): one of the kernels here,
    or cuBLAS, which is ``torch.nn.functional.linear``. On Hopper a size that no file has goes by ``rule.py``. Without a
    choice it runs cuBLAS on Hopper above 32 rows; else ``small_matmul.cu`` where it is ``quicker`` and takes the
    arguments; else the Triton kernels. With
    ``dependent_launch`` the choices are those of a chain of layers, where launches overlap; without, those of a call by
    itself, which are cuBLAS more often.

    The device, the shape, the strides, the dtype and ``dependent_launch`` alone decide which kernel runs. If the CUDA
    kernels cannot be built, the log says so once. Counters are its own (see ``few_rows/triton.Counters``).
    """
    triton_rows = TritonRows()
    built: dict[torch.device, CudaRows | None] = {}
    hopper: dict[torch.device, small_matmul_hopper.HopperRows | None] = {}

    def build(device: torch.device) -> CudaRows | None:
        if device.type != "cuda" or torch.version.hip is not None:
            return None
        try:
            return CudaRows()
        except Unavailable as error:
            log.warning("small_matmul runs its Triton kernels, which are slower: %s", error)
            return None

    def build_hopper(device: torch.device) -> small_matmul_hopper.HopperRows | None:
        if built[device] is None or not target_of(device).hopper:
            return None
        try:
            return small_matmul_hopper.HopperRows(device)
        except Unavailable as error:
            log.warning("small_matmul runs without its kernels for 17 to 256 rows, which is slower: %s", error)
            return None

    def call(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, dependent_launch: bool = False) -> Tensor:
        """Compute ``reference`` on the GPU; ``dependent_launch`` means the same as in ``CudaRows``."""
        device = x.device
        if device not in built:
            built[device] = build(device)
            hopper[device] = build_hopper(device)
        rows, wide = built[device], hopper[device]
        if rows is None or cuda_refusal(x, weight, bias):
            return triton_rows(x, weight, bias)
        m, (n, k) = x.shape[0], weight.shape
        if wide is not None:
            choice = choices.chosen(m, n, k, device, alone=not dependent_launch)
            by = choice.by if choice is not None else "cublas" if m > CUDA_ROWS else ""
            if choice is not None and by == "hopper" and not small_matmul_hopper.refusal(x, weight, bias):
                return wide(x, weight, bias, dependent_launch=dependent_launch, tiling=choice.tiling)
            if by in ("cublas", "hopper"):
                return F.linear(x, weight, bias)
            if choice is not None and by == "triton":
                return triton_rows(x, weight, bias, tiling=choice.tiling)
            if choice is not None and by == "cuda":
                return rows(x, weight, bias, dependent_launch=dependent_launch, tiling=choice.tiling)
        if quicker(m, n, k, target_of(device).block_bytes):
            return rows(x, weight, bias, dependent_launch=dependent_launch)
        return triton_rows(x, weight, bias)

    return call


def gated_launcher() -> Callable[..., Tensor | None]:
    """Return a new ``gate_up(x, weight, *, dependent_launch=False)`` of one launch, as ``gate_up.py`` defines it,
    without a bias. None where the GPU or the shape has no such kernel, or where two launches are quicker."""
    triton_rows = TritonRows()
    built: dict[torch.device, tuple[CudaRows, small_matmul_hopper.HopperRows | None] | None] = {}

    def call(x: Tensor, weight: Tensor, *, dependent_launch: bool = False) -> Tensor | None:
        choice = choices.chosen(x.shape[0], *weight.shape, x.device, gated=True)
        if choice is None or choice.tiling is None or choice.by == "gluon":
            return None
        if (cuda_refusal if choice.by == "cuda" else small_matmul_hopper.refusal)(x, weight):
            return None
        if choice.by == "triton":
            return triton_rows(x, weight, tiling=choice.tiling)
        if x.device not in built:
            try:
                wide = small_matmul_hopper.HopperRows(x.device) if target_of(x.device).hopper else None
                built[x.device] = CudaRows(), wide
            except Unavailable:  # the product of one half after the other then runs, and says why in the log
                built[x.device] = None
        kernels = built[x.device]
        if kernels is None:
            return None
        rows, hopper = kernels
        if choice.by == "cuda":
            return rows(x, weight, dependent_launch=dependent_launch, tiling=choice.tiling, gated=True)
        if hopper is None:
            return None
        return hopper(x, weight, dependent_launch=dependent_launch, tiling=choice.tiling)

    return call


small_matmul = best_launcher()


# ----------------------------------------------------------------------------------------------------- registry entry


def cost(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Cost:
    """Count a product and a sum for each weight and row; the weights are read once."""
    tokens, outputs = x.shape[0], weight.shape[0]
    read = x.nbytes + weight.nbytes + (0 if bias is None else bias.nbytes)
    return Cost(2 * tokens * weight.numel(), read, tokens * outputs * x.element_size())


def _examples() -> Sequence[dict[str, Any]]:
    def inputs(m: int, n: int, k: int, bias: bool) -> dict[str, Any]:
        made: dict[str, Any] = {"x": sample(m, k), "weight": sample(n, k, seed=1) / math.sqrt(k)}
        return made | {"bias": sample(n, seed=2) if bias else None}

    return [inputs(1, 33, 70, True), inputs(2, 20, 130, False), inputs(17, 40, 64, True), inputs(0, 3, 2, False)]


ROWS = (1, 8, 16, 32, 64, 128, 256)


def _cases() -> Sequence[Case]:
    """List every projection of the models, and their output heads, at each number of rows."""

    def make(device: torch.device, seed: int, m: int, n: int, k: int) -> Mapping[str, Any]:
        generator = torch.Generator(device).manual_seed(seed)
        x, weight = (torch.randn(r, k, device=device, dtype=torch.bfloat16, generator=generator) for r in (m, n))
        return {"x": x, "weight": weight * k**-0.5, "bias": None}

    named: dict[tuple[int, int], list[str]] = {}
    for model in shapes.MODELS:
        heads = model.n_heads * model.head_dim
        for what, n, k in (
            ("qkv", model.qkv_dim, model.dim),
            ("out", model.dim, heads),
            ("gate and up", 2 * model.ffn_dim, model.dim),
            ("down", model.dim, model.ffn_dim),
            ("head", model.vocab_size, model.dim),
        ):
            named.setdefault((n, k), []).append(f"{what} of {model.name}")
    return [
        Case(f"{', '.join(names)}: {m} x {k} by {n}", partial(make, m=m, n=n, k=k))
        for (n, k), names in named.items()
        for m in ROWS
    ]


def _kernels() -> Sequence[Kernel]:
    def cut(rows: int, gated: bool = False) -> Kernel:
        """Return the kernel with the portable tiling of ``rows`` rows, or that with a gate."""
        tiling = (portable_gate if gated else portable_tiling)(rows, 28672 if gated else 6144, 4096, TARGETS["sm_89"])
        sizes = {"BM": tiling.bm, "BN": tiling.bn, "BK": tiling.bk, "SPLIT": tiling.split, "SWAP": tiling.swap}
        sizes["GATED"] = gated
        constants = {**split.constants, **sizes}
        if tiling.split == 1:
            constants |= {"parts": None, "counters": None}
        arguments = {name: kind for name, kind in split.arguments.items() if name not in constants}
        return replace(
            split, name=f"portable{' gate' * gated}, {rows} rows", arguments=arguments, constants=constants,
            warps=tiling.warps, stages=tiling.stages, targets=PLAIN_TARGETS,
        )  # fmt: skip

    ints = dict.fromkeys(("M", "N", "K", "x_m", "w_n", "out_m"), "i32")
    pointers = dict.fromkeys(("x", "weight", "out"), "*bf16")
    divisible = ("N", "K", "x_m", "w_n", "out_m", "part_k")
    split = Kernel(
        name="rows",
        function=_rows,
        arguments={
            **pointers,
            "parts": "*fp32",
            "counters": "*i32",
            **ints,
            "part_k": "i32",
            "n_squares": "i32",
            "eps": "fp32",
        },
        constants={
            "bias": None,
            "BM": 16,
            "BN": 64,
            "BK": 128,
            "SPLIT": 4,
            "SWAP": True,
            "EVEN": True,
            "BULK": False,
            "DEPENDENT_LAUNCH": False,
            "GATED": False,
            **dict.fromkeys(("residual", "scale", "scaled", "left", "squares", "w_scale")),
            "SQUARES": 1,
        },
        divisible=divisible,
        stages=4,
        targets=TRITON_TARGETS,
    )
    coded = {**split.arguments, "weight": "*fp8e4nv", "w_scale": "*fp32"}
    return [
        split,
        replace(
            split,
            name="rows, weight in fp8",
            arguments=coded,
            constants={name: value for name, value in split.constants.items() if name not in coded},
            targets=tuple(name for name in PLAIN_TARGETS if TARGETS[name].fp8_products),
        ),
        *(cut(rows) for rows in (32, 64, 128, 256)),
        *(cut(rows, gated=True) for rows in (16, 64, 128)),
        Kernel(
            name="vector",
            function=_vector,
            arguments={**pointers, **ints},
            constants={"bias": None, "BN": 8, "BK": 512, "EVEN": True, "DEPENDENT_LAUNCH": False},
            divisible=divisible,
            stages=4,
            targets=TRITON_TARGETS,
        ),
        *small_matmul_gluon.kernels(),
    ]


register(
    Op(
        name="small_matmul",
        reference=reference,
        cost=cost,
        implementations={
            "triton": in_triton(by_triton),
            "cuda": Implementation(
                "cuda",
                lambda: CudaRows(),
                cuda.CUDA_TARGETS,
                batch_invariant=True,
                dtypes=("bfloat16",),
                refusal=cuda_refusal,
                source="small_matmul.cu",
            ),
            "cuda_dependent": Implementation(
                "cuda",
                lambda: partial(CudaRows(), dependent_launch=True),
                ("sm_90",),
                batch_invariant=True,
                dtypes=("bfloat16",),
                refusal=cuda_refusal,
                source="small_matmul.cu",
            ),
            "hopper_dependent": Implementation(
                "cuda",
                lambda: partial(small_matmul_hopper.HopperRows(), dependent_launch=True),
                ("sm_90",),
                dtypes=("bfloat16",),
                refusal=small_matmul_hopper.refusal,
                source="small_matmul_hopper.cu",
            ),
            "chosen": Implementation(
                "cuda", available(small_matmul), ("sm_90",), dtypes=("bfloat16",), source="small_matmul_hopper.cu"
            ),
            "chosen_dependent": Implementation(
                "cuda",
                available(partial(small_matmul, dependent_launch=True)),
                ("sm_90",),
                dtypes=("bfloat16",),
                source="small_matmul_hopper.cu",
            ),
        },
        examples=_examples,
        peers={"torch": F.linear},
        cases=_cases,
        kernels=_kernels,
    )
)
