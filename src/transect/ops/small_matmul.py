r"""Product of 1 to 256 rows with a weight: what a linear layer is in decode.

    Y = X W^T + b

Shapes: x ``[M, K]``, weight ``[N, K]`` with neighbouring k side by side, bias ``[N]``, result ``[M, N]``; float32
inside. Inference only; training has enough rows for ``matmul.py``, which has the gradient.

Bound by bytes for few rows: 2 M N K FLOPs against 2 N K bytes of weights in bfloat16 is M FLOPs per byte, where an H200
needs about 185. So the weights are read once, at the full width of memory, and everything else follows from that:

* Enough bytes must be in flight. 4.3 TB/s times a latency near 1 us is 4 MB, 32 KB for each of 132 multiprocessors.
  A column of tiles (N / BN programs) is too few for a narrow layer, so K is cut into SPLIT parts as well.
* The parts of a tile must be added up. Each program leaves its float32 part in a buffer and counts itself on the
  tile's counter; the last to arrive adds them all in the order of the parts. So the sum is the same in every run, and
  one launch does it (a second launch would cost 2 us where the whole product takes 8).
* X is read again by every column of tiles, from the L2 cache: M / BN of the bytes of the weights. Hence BN >= 64 for
  16.
* With SWAP the weights are the left operand of the tensor cores: rows of W fill their 64 or 128 rows where 8 rows
  of X would leave most of them empty.

Three kernels. ``small_matmul.cu`` (``small_matmul_cuda.py``), bfloat16, for 1 to 16 rows (32 of a small weight): rows
of W dealt out evenly, the k of a block among its warps; with ``pdl`` the next launch fetches its weights while this one
ends, which is worth 0.5 to 1.5 us a launch. ``small_matmul_hopper.py``'s, bfloat16, for 17 rows and more on Hopper. The
Triton kernels below for other dtypes and GPUs. A file of choices, measured for each device, says which of them runs a
weight, and how, or that cuBLAS does (``best_launcher``). With Triton, at 32 rows W and X together come through the L2
cache at 5.4 to 5.7 TB/s (one H200), little more than memory's 4.3, and more bytes in flight change nothing: from there
on a tile has to be wide, not only its loads deep.

In a decode step each product waits for the kernel before it, and with small weights that, not memory, is what its time
is. Shared memory decides then: a launch that takes all of it keeps the next one from fetching its weights.
So for one row of Qwen3-0.6B the quickest ring is as deep as a warp has chunks, no deeper: a layer takes 26.7 us with
such plans and the gate inside, 35.1 with the deepest rings that fit (one run, H200). Lost: asking for the weights of
later products ahead, into the L2 cache (0.7 to 9 us a layer more at 1 to 64 rows, 0.6B and 8B).

Source: split-K and its fix-up by the last arriver: Osama et al. 2023, arXiv:2301.03598 (Stream-K).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import cuda, shapes, small_matmul_hopper
from .jit import INTERPRETED, TRITON_TARGETS, available, kernel, require, tl, triton
from .numerics import compute_dtype, sample
from .registry import Case, Cost, Implementation, Kernel, Op, Unavailable, register
from .small_matmul_cuda import CUDA_ROWS, CudaRows, cuda_refuses, quicker
from .tiles import after_previous, describe, dot, fits_descriptor

log = logging.getLogger(__name__)
MOST_ROWS = 256


def reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x ``[M, K]``, weight ``[N, K]``, bias ``[N]`` -> ``[M, N]`` in x's dtype."""
    dtype = compute_dtype(x.dtype)
    y = x.to(dtype) @ weight.to(dtype).T
    return (y if bias is None else y + bias.to(dtype)).to(x.dtype)


@kernel
def add_parts(  # type: ignore[no-untyped-def]
    acc, parts, counters, tile, part, rows, columns, M, N, SPLIT: tl.constexpr
):  # fmt: skip
    """Leave this program's part; True and the whole sum for the program that arrives last at its tile.

    ``rows`` and ``columns`` give each element's row and column of Y in the shape of ``acc``; parts is ``[SPLIT, M,
    N]``.
    """
    inside = (rows < M) & (columns < N)
    at = rows * N + columns
    tl.store(parts + tl.cast(part, tl.int64) * M * N + at, acc, inside)
    tl.debug_barrier()
    # Release: the parts of all threads of this program are visible before the count is. Acquire: so are the others'.
    arrived = tl.atomic_add(counters + tile, 1, sem="acq_rel")
    last = arrived == SPLIT - 1
    if last:
        tl.store(counters + tile, 0)  # ready for the next launch
        acc = tl.zeros_like(acc)
        for i in range(SPLIT):
            acc += tl.load(parts + tl.cast(i, tl.int64) * M * N + at, inside, 0.0, cache_modifier=".cg")
    return last, acc


@kernel
def _rows(  # type: ignore[no-untyped-def]
    x, weight, bias, out, parts, counters, M, N, K, x_m, w_n, out_m, part_k,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, SWAP: tl.constexpr,
    EVEN: tl.constexpr, BULK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One tile of Y, or one of SPLIT parts of it. Axis 0: column tiles; axis 1: row tiles; axis 2: parts of K.

    BULK: x and weight are tensor descriptors, which pad with zeros.
    """
    after_previous(EARLY)
    tile_n = tl.program_id(0)
    tile_m = tl.program_id(1)
    part = tl.program_id(2)
    m = tile_m * BM + tl.arange(0, BM)
    n = tile_n * BN + tl.arange(0, BN)
    k_end = min(K, (part + 1) * part_k)
    acc = tl.zeros((BN, BM), tl.float32) if SWAP else tl.zeros((BM, BN), tl.float32)
    if not BULK:
        k = part * part_k + tl.arange(0, BK)
        x_at = x + m[:, None] * x_m + k[None, :]
        w_at = weight + tl.where(n < N, n, 0).to(tl.int64)[:, None] * w_n + k[None, :]
    for start in range(part * part_k, k_end, BK):
        if BULK:
            b = weight.load([tile_n * BN, start])
            a = x.load([tile_m * BM, start])
        else:
            if EVEN:
                b = tl.load(w_at)
                a = tl.load(x_at, m[:, None] < M, 0.0)
            else:
                inner = tl.arange(0, BK)[None, :] < k_end - start
                b = tl.load(w_at, inner, 0.0)
                a = tl.load(x_at, (m[:, None] < M) & inner, 0.0)
            x_at += BK
            w_at += BK
        acc = dot(b, a.T, acc) if SWAP else dot(a, b.T, acc)
    rows = m[None, :] if SWAP else m[:, None]
    columns = n[:, None] if SWAP else n[None, :]
    done = True
    if SPLIT > 1:
        tile = tile_m * tl.num_programs(0) + tile_n
        done, acc = add_parts(acc, parts, counters, tile, part, rows, columns, M, N, SPLIT)
    if done:
        if bias is not None:
            acc += tl.load(bias + columns, columns < N, 0.0).to(tl.float32)
        tl.store(out + rows * out_m + columns, acc.to(out.dtype.element_ty), (rows < M) & (columns < N))


@kernel
def _vector(  # type: ignore[no-untyped-def]
    x, weight, bias, out, M, N, K, x_m, w_n, out_m, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """BN elements of one row of Y, without tensor cores: sums run lane by lane and are added up once at the end."""
    after_previous(EARLY)
    m = tl.program_id(1)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    safe_n = tl.where(n < N, n, 0).to(tl.int64)
    k = tl.arange(0, BK)
    x_at = x + m * x_m + k
    w_at = weight + safe_n[:, None] * w_n + k[None, :]
    acc = tl.zeros((BN, BK), tl.float32)
    for start in range(0, K, BK):
        if EVEN:
            b = tl.load(w_at)
            a = tl.load(x_at)
        else:
            inner = k < K - start
            b = tl.load(w_at, inner[None, :], 0.0)
            a = tl.load(x_at, inner, 0.0)
        acc += b.to(tl.float32) * a.to(tl.float32)[None, :]
        x_at += BK
        w_at += BK
    y = tl.sum(acc, 1)
    if bias is not None:
        y += tl.load(bias + n, n < N, 0.0).to(tl.float32)
    tl.store(out + m * out_m + n, y.to(out.dtype.element_ty), n < N)


@dataclass(frozen=True, slots=True)
class Cut:
    """How a product of few rows is cut up. ``bm`` 0 takes the kernel without tensor cores."""

    bm: int
    bn: int
    bk: int
    split: int
    warps: int = 4
    stages: int = 4
    swap: bool = True
    bulk: bool = False
    early: bool = False
    """Dependent launch: begins while the kernel before it on the stream still ends."""


def choose(m: int, n: int, k: int, device: torch.device) -> Cut:
    """The cut for a shape: the quickest of those tried on an H200 at the shapes of an 8B model; elsewhere a guess
    from them.

    Three kinds of weight behave alike: wide (more tiles than the chip takes at once), deep (few tiles, long sums:
    split), and small (over in some 10 us, where the number of programs counts most).
    """
    if INTERPRETED:
        return Cut(16, 16, 16, min(3, -(-k // 16)), warps=1, stages=1) if m > 1 else Cut(0, 4, 32, 1, warps=1, stages=1)
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9
    wide, deep, small = n >= 16384, k >= 8192, n <= 5000
    if m == 1:
        bn, bk, warps = (16, 256, 4) if wide else (2, 2048, 4) if deep else (2, 1024, 2) if small else (8, 512, 4)
        return Cut(0, bn, bk, 1, warps, early=hopper)
    bm = 16 if m <= 16 else 32 if m <= 32 else 64 if m <= 64 else 128 if m <= 128 else 256
    if bm <= 32:
        if wide or deep:
            return Cut(bm, 64, 128, 1 if wide else 4, early=hopper)
        if small and hopper:
            return Cut(bm, 64, 128, 1, stages=6, bulk=True, early=True)
        return Cut(bm, 32, 256, 1, early=hopper)
    if wide:
        bn, warps, stages = {64: (128, 4, 5), 128: (256, 8, 4), 256: (128, 8, 4)}[bm]
        return Cut(bm, bn, 64, 1, warps, stages, swap=False, bulk=hopper, early=hopper)
    if bm == 64:
        return Cut(64, 64, 128, 2 if deep or small else 1, bulk=hopper, early=hopper)
    if bm == 128 and deep:
        return Cut(128, 64, 64, 2, stages=5, bulk=hopper, early=hopper)
    if bm == 256 and not (deep or small):
        return Cut(256, 64, 64, 1, warps=8, stages=5, bulk=hopper, early=hopper)
    return Cut(128, 64, 128, 1, bulk=hopper, early=hopper)


class Counters:
    """Counters of arrivals at split tiles: zeros that every launch leaves as zeros, one set for each device.

    Launches that share them must be on one stream; for a second stream make a second ``launcher()``.
    """

    def __init__(self) -> None:
        self._by_device: dict[torch.device, Tensor] = {}

    def get(self, device: torch.device, tiles: int) -> Tensor:
        """At least ``tiles`` zeros, int32.

        Raises:
            RuntimeError: first use on this device is inside a CUDA graph capture.
        """
        held = self._by_device.get(device)
        if held is None or held.numel() < tiles:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise RuntimeError("small_matmul: run the operator once before capturing it in a CUDA graph")
            held = self._by_device[device] = torch.zeros(max(tiles, 16384), dtype=torch.int32, device=device)
        return held


def launcher() -> Callable[..., Tensor]:
    """A new ``small_matmul(x, weight, bias=None, *, cut=None)`` with counters of its own."""
    counters = Counters()

    def call(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, cut: Cut | None = None) -> Tensor:
        """As ``reference``, on the GPU."""
        require("small_matmul", *(t for t in (x, weight, bias) if t is not None))
        if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
            raise ValueError(
                f"small_matmul: x {list(x.shape)} and weight {list(weight.shape)} must be [M, K] and [N, K]"
            )
        x, weight = (t if t.stride(1) == 1 else t.contiguous() for t in (x, weight))
        bias = None if bias is None else bias.contiguous()
        m, k = x.shape
        n = weight.shape[0]
        out = x.new_empty((m, n))
        if out.numel() == 0:
            return out
        cut = cut or choose(m, n, k, x.device)
        if x.element_size() == 4 and cut.bm > 0 and not INTERPRETED:
            cut = Cut(min(cut.bm, 64), 64, 32, 1, stages=2)  # a tile of float32 takes twice the shared memory
        strides = (x.stride(0), weight.stride(0), n)
        options: dict[str, Any] = {"EARLY": cut.early, "num_warps": cut.warps, "num_stages": cut.stages}
        if cut.early:
            options["launch_pdl"] = True
        if cut.bm == 0:
            _vector[(triton.cdiv(n, cut.bn), m)](
                x, weight, bias, out, m, n, k, *strides, BN=cut.bn, BK=cut.bk, EVEN=k % cut.bk == 0, **options
            )  # fmt: skip
            return out
        grid = (triton.cdiv(n, cut.bn), triton.cdiv(m, cut.bm))
        part_k = triton.cdiv(triton.cdiv(k, cut.bk), cut.split) * cut.bk
        split = max(1, triton.cdiv(k, part_k)) if k else 1
        parts = held = None
        if split > 1:
            parts = x.new_empty((split, m, n), dtype=torch.float32)
            held = counters.get(x.device, grid[0] * grid[1])
        bulk = cut.bulk and k * x.element_size() % 16 == 0 and fits_descriptor(x, weight)
        left, right = (x, weight) if not bulk else (describe(x, cut.bm, cut.bk), describe(weight, cut.bn, cut.bk))
        _rows[(*grid, split)](
            left, right, bias, out, parts, held, m, n, k, *strides, part_k, BM=cut.bm, BN=cut.bn, BK=cut.bk,
            SPLIT=split, SWAP=cut.swap, EVEN=k % cut.bk == 0, BULK=bulk, **options,
        )  # fmt: skip
        return out

    return call


by_triton = launcher()


# --------------------------------------------------------------------------------------------------------- the choice


def best_launcher() -> Callable[..., Tensor]:
    """A new ``small_matmul(x, weight, bias=None, *, pdl=False)``: what was quickest for the shape.

    In bfloat16 what a file of choices for this GPU names (``small_matmul_hopper.chosen``): one of the kernels here, or
    cuBLAS, which is ``torch.nn.functional.linear``. Without one, cuBLAS on Hopper above 32 rows. Otherwise
    ``small_matmul.cu`` where it is ``quicker`` and takes the arguments, else the Triton kernels.

    Which one runs is decided by the device, the shape, the strides and the dtype alone. Where the CUDA kernels cannot
    be built, that is said once, in the log. Counters are its own (see ``Counters``).
    """
    triton_rows = launcher()
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
        if built[device] is None or torch.cuda.get_device_capability(device) != (9, 0):
            return None
        try:
            return small_matmul_hopper.HopperRows(device)
        except Unavailable as error:
            log.warning("small_matmul runs without its kernels for 17 to 256 rows, which is slower: %s", error)
            return None

    def call(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, pdl: bool = False) -> Tensor:
        """As ``reference``, on the GPU; ``pdl`` as in ``CudaRows``."""
        device = x.device
        if device not in built:
            built[device] = build(device)
            hopper[device] = build_hopper(device)
        rows, wide = built[device], hopper[device]
        if rows is None or cuda_refuses(x, weight, bias):
            return triton_rows(x, weight, bias)
        m, (n, k) = x.shape[0], weight.shape
        if wide is not None:
            choice = small_matmul_hopper.chosen(m, n, k, device)
            by = choice.by if choice is not None else "cublas" if m > CUDA_ROWS else ""
            if choice is not None and by == "hopper" and not small_matmul_hopper.refuses(x, weight, bias):
                return wide(x, weight, bias, pdl=pdl, plan=choice.plan)
            if by in ("cublas", "hopper"):
                return F.linear(x, weight, bias)
            if by == "triton":
                return triton_rows(x, weight, bias)
            if choice is not None and by == "cuda":
                return rows(x, weight, bias, pdl=pdl, plan=choice.rows_plan)
        if quicker(m, n, k):
            return rows(x, weight, bias, pdl=pdl)
        return triton_rows(x, weight, bias)

    return call


def gated_launcher() -> Callable[..., Tensor | None]:
    """A new ``gate_up(x, weight, *, pdl=False)`` of one launch, as ``gate_up.py`` defines it, without a bias; None
    where the GPU or the shape has none, or where the product and the gate were quicker one after the other."""
    built: dict[torch.device, tuple[CudaRows, small_matmul_hopper.HopperRows] | None] = {}

    def call(x: Tensor, weight: Tensor, *, pdl: bool = False) -> Tensor | None:
        choice = small_matmul_hopper.chosen(x.shape[0], *weight.shape, x.device, gated=True)
        if choice is None or (choice.plan is None and choice.rows_plan is None):
            return None
        if (small_matmul_hopper.refuses if choice.plan else cuda_refuses)(x, weight):
            return None
        if x.device not in built:
            try:
                built[x.device] = CudaRows(), small_matmul_hopper.HopperRows(x.device)
            except Unavailable:  # the product of one half after the other then runs, and says why in the log
                built[x.device] = None
        kernels = built[x.device]
        if kernels is None:
            return None
        rows, hopper = kernels
        if choice.plan is None:
            return rows(x, weight, pdl=pdl, plan=choice.rows_plan, gated=True)
        return hopper(x, weight, pdl=pdl, plan=choice.plan)

    return call


small_matmul = best_launcher()


# ----------------------------------------------------------------------------------------------------- registry entry


def cost(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Cost:
    """A product and a sum for each weight and row; the weights are read once."""
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
    """Every projection of the models, and their output heads, at each number of rows."""

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
    ints = dict.fromkeys(("M", "N", "K", "x_m", "w_n", "out_m"), "i32")
    pointers = dict.fromkeys(("x", "weight", "out"), "*bf16")
    divisible = ("N", "K", "x_m", "w_n", "out_m", "part_k")
    return [
        Kernel(
            name="rows",
            function=_rows,
            arguments={**pointers, "parts": "*fp32", "counters": "*i32", **ints, "part_k": "i32"},
            constants={
                "bias": None,
                "BM": 16,
                "BN": 64,
                "BK": 128,
                "SPLIT": 4,
                "SWAP": True,
                "EVEN": True,
                "BULK": False,
                "EARLY": False,
            },
            divisible=divisible,
            stages=4,
            targets=TRITON_TARGETS,
        ),
        Kernel(
            name="vector",
            function=_vector,
            arguments={**pointers, **ints},
            constants={"bias": None, "BN": 8, "BK": 512, "EVEN": True, "EARLY": False},
            divisible=divisible,
            stages=4,
            targets=TRITON_TARGETS,
        ),
    ]


register(
    Op(
        name="small_matmul",
        reference=reference,
        cost=cost,
        implementations={
            "triton": Implementation("triton", available(by_triton), TRITON_TARGETS),
            "cuda": Implementation(
                "cuda",
                lambda: CudaRows(),
                cuda.CUDA_TARGETS,
                batch_invariant=True,
                dtypes=("bfloat16",),
                refuses=cuda_refuses,
                source="small_matmul.cu",
            ),
            "cuda_pdl": Implementation(
                "cuda",
                lambda: partial(CudaRows(), pdl=True),
                ("sm_90",),
                batch_invariant=True,
                dtypes=("bfloat16",),
                refuses=cuda_refuses,
                source="small_matmul.cu",
            ),
            "hopper_pdl": Implementation(
                "cuda",
                lambda: partial(small_matmul_hopper.HopperRows(), pdl=True),
                ("sm_90",),
                dtypes=("bfloat16",),
                refuses=small_matmul_hopper.refuses,
                source="small_matmul_hopper.cu",
            ),
            "chosen": Implementation(
                "cuda",
                available(partial(small_matmul, pdl=True)),
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
