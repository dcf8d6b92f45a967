r"""Attention over packed documents without ever storing the scores, forward and backward: causal, full, or windowed.

The math is that of ``attention.py``, which is the causal case of this operator. For a query i of a document with n
tokens:

    s_j = scale * q . k_j      p = softmax(s)      o = sum_j p_j v_j
    causal: j <= i      window: i - window < j (and j < i + window where not causal)

**Forward.** A program holds BM queries of one head and walks over tiles of BN keys. It keeps, for each query, the
largest score so far m, the sum l of exp(s - m), and the output o not yet divided (Milakov & Gimelshein 2018). A new
tile with the largest score m' multiplies the earlier sums by exp(m - m'). So the softmax never needs a second look.
Only o and L = m + log l leave the program: T H (d + 1) numbers, not T^2 H.

Two kernels do this: the one of this file, which runs everywhere, and on Hopper the one in ``packed/hopper.py`` for
16-bit heads of 64, 96 and 128. ``forward`` chooses by device, dtype, head size, strides, and the average length of the
documents. ``flash_attention.cu`` is the forward pass in CUDA C++, to be read.

**Backward.** The gradient, its derivation and its kernels are in ``packed/backward.py``.

Exponentials are powers of two (the hardware's own), with log2(e) in the scale; L is kept in that unit.

Shapes: q ``[T, H, d]``, k and v ``[T, K, d]``, H a multiple of K, cu_seqlens ``[documents + 1]`` int32, result like q.
Softmax and sums in float32; p and ds are rounded to the inputs' dtype for the products, as every fused attention does.
Source: Dao et al. 2022, arXiv:2205.14135; Dao 2023, arXiv:2307.08691; Shah et al. 2024, arXiv:2407.08608.

Bound by arithmetic for documents of more than a few hundred tokens: 4 d FLOPs for each visible pair and head.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.utils.checkpoint import checkpoint

from ....costs.work import Cost, visible_pairs
from ....hardware.device import target_of
from ... import shapes
from ...lang import cuda
from ...lang.jit import INTERPRETED, TRITON_TARGETS, available
from ...numerics import compute_dtype, sample
from ...registry import Case, Implementation, Kernel, KernelTrace, Op, register
from . import hopper as hopper
from . import peers
from .backward import backward as backward
from .backward import gradient_op
from .backward import kernels as backward_kernels
from .tiling import LOG2E, PackedTiling, check, descriptor, fits_descriptor, padded
from .triton import _forward
from .triton import kernels as forward_kernels


def reference(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float, causal: bool = True, window: int | None = None
) -> Tensor:
    """Compute attention of q ``[T, H, d]``, k and v ``[T, K, d]``, cu_seqlens ``[documents + 1]`` -> ``[T, H, d]``,
    holding all T x T scores."""
    dtype = compute_dtype(q.dtype)
    group = q.shape[1] // k.shape[1]
    keys = k.to(dtype).repeat_interleave(group, dim=1)
    values = v.to(dtype).repeat_interleave(group, dim=1)
    scores = torch.einsum("thd,shd->hts", q.to(dtype), keys) * scale
    token = torch.arange(q.shape[0], device=q.device)
    document = torch.searchsorted(cu_seqlens[1:].contiguous(), token, right=True)
    distance = token[:, None] - token[None]
    visible = document[:, None] == document[None]
    if causal:
        visible &= distance >= 0
    if window is not None:
        visible &= distance.abs() < window
    p = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return torch.einsum("hts,shd->thd", p, values).to(q.dtype)


def exact(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float, causal: bool = True, window: int | None = None
) -> Tensor:
    """Compute ``reference`` for real shapes: one document and one key head at a time, with scores recomputed for the
    gradient."""
    bounds = cu_seqlens.tolist()
    group = q.shape[1] // k.shape[1]
    documents = []
    for start, end in pairwise(bounds):
        alone = cu_seqlens.new_tensor([0, end - start])
        heads = []
        for head in range(k.shape[1]):
            inputs = (
                q[start:end, head * group : (head + 1) * group],
                k[start:end, head : head + 1],
                v[start:end, head : head + 1],
            )
            heads.append(checkpoint(reference, *inputs, alone, scale, causal, window, use_reentrant=False))
        documents.append(torch.cat(heads, 1))
    return torch.cat(documents)


# -------------------------------------------------------------------------------------------------------- launchers


def choose(q: Tensor) -> PackedTiling:
    """Return the tiling of this file's kernel. Measured on an H200; elsewhere a guess from the same numbers."""
    if INTERPRETED:
        return PackedTiling(16, 16, 1, 1)
    if q.element_size() == 4:
        return PackedTiling(32, 32, 4, 1)
    # Two programs on a multiprocessor: one computes exponentials while the other has the tensor cores.
    bulk = target_of(q.device).bulk_copies
    return PackedTiling(64, 64, 4, 3 if bulk else 2, bulk=bulk)


def forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float, causal: bool = True, window: int | None = None,
    *, tiling: PackedTiling | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the result, and L ``[H, T]`` in powers of two, which the backward pass needs.

    By the Hopper kernel where it takes the inputs and pays (``flash_attention_hopper.takes``, ``.pays``); else, or
    where a ``tiling`` is given, by the kernel of this file.
    """
    q, k, v = check(q, k, v, cu_seqlens)
    if tiling is None and hopper.takes(q, k, v) and hopper.pays(q, len(cu_seqlens) - 1):
        return hopper.forward(q, k, v, cu_seqlens, scale, causal, window)
    tokens, heads, d = q.shape
    out = torch.empty((tokens, heads, d), dtype=q.dtype, device=q.device)
    lse = torch.empty((heads, tokens), dtype=torch.float32, device=q.device)
    if out.numel() == 0:
        return out, lse
    tiling = tiling or choose(q)
    bulk = tiling.bulk and fits_descriptor(k) and fits_descriptor(v)
    documents = len(cu_seqlens) - 1
    _forward[(tokens // tiling.bm + documents, heads)](
        q, descriptor(k, tiling.bn, bulk), descriptor(v, tiling.bn, bulk), out, lse, cu_seqlens, documents, tokens,
        scale * LOG2E, window or 0, *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], H=heads,
        GROUP=heads // k.shape[1], D=d, DP=padded(d), BM=tiling.bm, BN=tiling.bn, CAUSAL=causal,
        WINDOW=window is not None, BULK=bulk, num_warps=tiling.warps, num_stages=tiling.stages,
    )  # fmt: skip
    return out, lse


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float, causal: bool = True, window: int | None = None
) -> Tensor:
    """Compute ``reference`` without holding the scores."""
    return forward(q, k, v, cu_seqlens, scale, causal, window)[0]


def portable(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float, causal: bool = True, window: int | None = None
) -> Tensor:
    """Compute ``flash_attention`` by the kernel of this file on every device."""
    return forward(q, k, v, cu_seqlens, scale, causal, window, tiling=choose(q))[0]


def cuda_refusal(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float, causal: bool = True, window: int | None = None
) -> str | None:
    """Return the reason why ``flash_attention.cu`` does not take heads of this size; None if it does."""
    return None if q.shape[2] in (64, 128) else f"flash_attention.cu takes heads of 64 or 128, not of {q.shape[2]}"


def by_cuda(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float, causal: bool = True, window: int | None = None
) -> Tensor:
    """Compute ``flash_attention`` by ``flash_attention.cu``: bfloat16 heads of 64 or 128, else ValueError."""
    q, k, v = check(q, k, v, cu_seqlens)
    reason = cuda_refusal(q, k, v, cu_seqlens, scale, causal, window)
    if not reason and any(t.dtype != torch.bfloat16 for t in (q, k, v)):
        reason = f"flash_attention.cu takes bfloat16, not {q.dtype}, {k.dtype} and {v.dtype}"
    if reason:
        raise ValueError(f"{reason}; use another implementation")
    q, k, v = (t if fits_descriptor(t) else cuda.aligned(t) for t in (q, k, v))  # it reads 16 bytes at a time
    tokens, heads, d = q.shape
    out = torch.empty((tokens, heads, d), dtype=q.dtype, device=q.device)
    lse = torch.empty((heads, tokens), dtype=torch.float32, device=q.device)
    cuda.launcher("flash_attention", "transect_flash_attention")(
        q, k, v, out, lse, cu_seqlens.contiguous(), len(cu_seqlens) - 1, tokens, heads, heads // max(1, k.shape[1]), d,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], scale * LOG2E, int(causal), window or 0,
    )  # fmt: skip
    return out


def attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float, window: int | None = None) -> Tensor:
    """Compute ``flash_attention`` with the arguments of the operator ``attention``."""
    return forward(q, k, v, cu_seqlens, scale, True, window)[0]


@torch.library.custom_op("transect::flash_attention", mutates_args=())
def _attention_op(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float, causal: bool = True, window: int | None = None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return forward(q, k, v, cu_seqlens, scale, causal, window)


@_attention_op.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float, causal: bool = True, window: int | None = None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, cu_seqlens, scale, causal, window = inputs
    ctx.save_for_backward(q, k, v, cu_seqlens, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.options = (scale, causal, window)


def _backward_op(ctx: Any, g: Tensor, _lse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, cu_seqlens, out, lse = ctx.saved_tensors
    return (*gradient_op(g, q, k, v, out, lse, cu_seqlens, *ctx.options), None, None, None, None)


_attention_op.register_autograd(_backward_op, setup_context=_save)


def flash_attention_autograd(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float, causal: bool = True, window: int | None = None
) -> Tensor:
    """Call ``flash_attention`` through ``torch.library``: gradients, fake tensors, ``torch.compile``."""
    return _attention_op(q, k, v, cu_seqlens, scale, causal, window)[0]


flash_attention_autograd.operator = _attention_op  # type: ignore[attr-defined]


def attention_autograd(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float, window: int | None = None
) -> Tensor:
    """Compute ``attention`` with gradients."""
    return _attention_op(q, k, v, cu_seqlens, scale, True, window)[0]


# ----------------------------------------------------------------------------------------------------- registry entry


def _pairs(cu_seqlens: Tensor, causal: bool, window: int | None) -> int:
    """Count the visible query-key pairs of a head."""
    bounds = cu_seqlens.tolist()
    lengths = [end - start for start, end in pairwise(bounds)]
    one_sided = sum(visible_pairs(n, n, window) for n in lengths)
    return one_sided if causal else 2 * one_sided - sum(lengths)


def cost(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float, causal: bool = True, window: int | None = None
) -> Cost:
    """Count 4 d FLOPs for each visible pair and head, without the softmax. ``cu_seqlens`` must hold its values."""
    pairs = _pairs(cu_seqlens, causal, window)
    return Cost(4 * pairs * q.shape[1] * q.shape[2], q.nbytes + k.nbytes + v.nbytes, q.nbytes)


def gradient_cost(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float, causal: bool = True, window: int | None = None
) -> Cost:
    """Count 5 products of 2 d FLOPs for each visible pair and head."""
    pairs = _pairs(cu_seqlens, causal, window)
    read = 3 * q.nbytes + k.nbytes + v.nbytes
    return Cost(10 * pairs * q.shape[1] * q.shape[2], read, q.nbytes + k.nbytes + v.nbytes)


def _examples() -> Sequence[dict[str, Any]]:
    examples = []
    for lengths, heads, kv_heads, d, causal, window in (
        ((1,), 1, 1, 8, True, None),
        ((5, 1, 37), 4, 2, 16, True, None),
        ((33, 20), 2, 1, 10, False, None),
        ((3, 50, 2), 4, 1, 16, True, 9),
        ((40, 7), 2, 2, 24, False, 18),
        ((70, 1, 3), 2, 1, 64, True, None),
        ((37,), 1, 1, 96, False, None),
        ((50,), 2, 1, 128, True, 20),
    ):
        tokens = sum(lengths)
        examples.append(
            {
                "q": 2 * sample(tokens, heads, d),
                "k": sample(tokens, kv_heads, d, seed=1),
                "v": sample(tokens, kv_heads, d, seed=2),
                "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32),
                "scale": d**-0.5,
                "causal": causal,
                "window": window,
            }
        )
    return examples


def _cases() -> Sequence[Case]:
    def make(
        device: torch.device, seed: int, lengths: tuple[int, ...], heads: int, kv_heads: int, d: int, causal: bool
    ) -> Mapping[str, Any]:
        generator = torch.Generator(device).manual_seed(seed)
        q, k, v = (
            torch.randn(sum(lengths), h, d, device=device, dtype=torch.bfloat16, generator=generator)
            for h in (heads, kv_heads, kv_heads)
        )
        cu_seqlens = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32).to(device)
        return {"q": q, "k": k, "v": v, "cu_seqlens": cu_seqlens, "scale": d**-0.5, "causal": causal}

    table = [
        (f"16 heads of 128, {documents} x {length}, {'causal' if causal else 'full'}", documents * (length,), 16, 16,
         128, causal)
        for documents, length in ((4, 4096), (1, 16384))
        for causal in (True, False)
    ]  # fmt: skip
    models: dict[tuple[int, int, int], list[str]] = {}
    for model in shapes.MODELS:
        models.setdefault((model.n_heads, model.n_kv_heads, model.head_dim), []).append(model.name)
    table += [
        (f"{', '.join(names)}, {8192 // length} x {length}, causal", (8192 // length) * (length,), *sizes, True)
        for sizes, names in models.items()
        for length in (8192, 1024)
    ]
    return [
        Case(name, functools.partial(make, lengths=lengths, heads=heads, kv_heads=kv_heads, d=d, causal=causal))
        for name, lengths, heads, kv_heads, d, causal in table
    ]


def _kernels() -> Sequence[Kernel]:
    return [*forward_kernels(), *hopper.kernels(), *backward_kernels()]


def _trace() -> KernelTrace:
    def arguments() -> Mapping[str, Any]:
        q, k, v = (sample(12, 1, 16, seed=seed) for seed in range(3))
        return {"q": q, "k": k, "v": v, "cu_seqlens": torch.tensor([0, 12], dtype=torch.int32), "scale": 0.25}

    return KernelTrace(
        arguments,
        functools.partial(forward, tiling=PackedTiling(4, 4, 1, 1)),
        ("_walk_keys", "start", "fade", "l", "m"),
        "m, the largest score so far, only grows; when it does, l, the sum of powers of 2, and what was summed of v "
        "are multiplied by fade.",
    )


register(
    Op(
        name="flash_attention",
        reference=reference,
        cost=cost,
        gradient_cost=gradient_cost,
        implementations={
            "hopper": Implementation(
                "triton",
                hopper.available(hopper.flash_attention),
                ("sm_90",),
                batch_invariant=True,
                autograd=hopper.available(flash_attention_autograd),
                dtypes=("bfloat16", "float16"),
                refusal=hopper.refusal,
            ),
            "triton": Implementation(
                "triton",
                available(portable),
                TRITON_TARGETS,
                batch_invariant=True,
                autograd=available(flash_attention_autograd),
            ),
            "cuda": cuda.in_cuda(
                "flash_attention", by_cuda, batch_invariant=True, dtypes=("bfloat16",), refusal=cuda_refusal
            ),
        },
        examples=_examples,
        peers={
            "torch": peers.torchs,
            "cudnn": peers.equal_documents(peers.fused(SDPBackend.CUDNN_ATTENTION)),
            "flash2": peers.equal_documents(peers.fused(SDPBackend.FLASH_ATTENTION)),
            "flex": peers.equal_documents(peers.flex),
            "unfused": peers.equal_documents(peers.unfused),
        },
        differentiable=("q", "k", "v"),
        cases=_cases,
        kernels=_kernels,
        trace=_trace,
        exact=exact,
    )
)
