r"""Everything between the projections and paged attention in one launch: rotate q and k, write k and v to the cache.

For token t, with slot s(t) (``kv_cache_write.py``) and the rotation R of its position (``position/rotary.py``):

    q'_t = R_t norm(q_t)        K[s(t)] = R_t norm(k_t)        V[s(t)] = v_t

``norm`` is the RMSNorm of each head by itself with learned weights (Qwen3), where weights are given, else nothing.
Inference only: no gradient. The caches change in place.

Shapes: q ``[T, H, d]``, k and v ``[T, K, d]`` (views of one ``[T, (H + 2K) d]`` projection will do), cos and sin ``[T,
d/2]`` float32, weights ``[d]``, or ``[H, d]`` and ``[K, d]`` where each head has its own, caches ``[blocks, K,
block_size, d]``. Result: the rotated q ``[T, H, d]``.
Sources: Su et al. 2021, arXiv:2104.09864; Kwon et al. 2023, arXiv:2309.06180; QK-norm: Henry et al. 2020,
arXiv:2010.04245.

Bound by bytes: each element is read once and written once, with 3 FLOPs (7 with the norm) in between. Apart, these are
three or four launches and the keys travel twice; with few tokens the launches are what counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ....costs.work import Cost
from ....hardware.targets import FP8_TARGETS
from ... import shapes
from ...lang.jit import in_triton, kernel, next_power_of_2, require, runs_triton, tl
from ...lang.tiles import also, let_next_begin, wait_for_previous
from ...norm import rms_norm
from ...numerics import sample
from ...position import rotary
from ...position.rotary import CHOICES, check_shapes, joined_projection, turned_by
from ...position.rotary import rule as plain_rule
from ...registry import Case, Kernel, Knobs, Op, in_torch, register
from ...tuning import Config, choose
from . import kv_cache_write
from .batch import PagedBatch
from .cache_codes import store_halves, stored_width
from .kv_cache_write import BLOCK_SIZE, case_batch, example_batch, side_by_side, slot, slot_arguments


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: PagedBatch,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    k_out: Tensor | None = None,
) -> Tensor:
    """Return the steps one after another, each rounded to the dtype; returns the turned q ``[T, H, d]``.

    ``k_out`` ``[T, K, d]`` gets the turned k too; it may be ``k``.
    """
    if q_weight is not None:
        q = rms_norm.reference(q, q_weight, eps)
    if k_weight is not None:
        k = rms_norm.reference(k, k_weight, eps)
    q, k = rotary.reference(q, k, cos, sin)
    kv_cache_write.reference(k, v, k_cache, v_cache, batch)
    if k_out is not None:
        k_out.copy_(k)
    return q


@kernel
def _kernel(
    q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, q_weight_ptr, k_weight_ptr, q_out_ptr, k_out_ptr, k_cache_ptr, v_cache_ptr,
    tables_ptr, starts_ptr, lengths_ptr, n_rows, q_heads, k_heads, n_planes, eps,
    q_token, q_head, k_token, k_head, v_token, v_head, q_out_token, q_out_head, k_out_token, k_out_head,
    cos_token, sin_token, cache_block, cache_head, cache_slot, table_stride, q_groups, k_groups, groups,
    PAGE: tl.constexpr, SEARCH: tl.constexpr, NORM: tl.constexpr, OWN: tl.constexpr,
    HEADS: tl.constexpr, PLANES: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr,
):  # fmt: skip
    """Rotate or write HEADS heads of one token a program: of q for the first ``q_groups``, then of k for ``k_groups``,
    then of v. OWN: each head has weights of its own."""
    let_next_begin(DEPENDENT_LAUNCH)
    token = (tl.program_id(0) // groups).to(tl.int64)
    group = tl.program_id(0) % groups
    plane = tl.arange(0, PLANES)[None, :]
    cos = tl.load(cos_ptr + token * cos_token + plane, mask=plane < n_planes, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + token * sin_token + plane, mask=plane < n_planes, other=0.0).to(tl.float32)
    if group < q_groups:
        wait_for_previous(DEPENDENT_LAUNCH)
        head = group * HEADS + tl.arange(0, HEADS)[:, None]
        inside = (head < q_heads) & (plane < n_planes)
        x_ptr = q_ptr + token * q_token + head * q_head + plane
        w_ptr = q_weight_ptr + head * (2 * n_planes) if OWN else q_weight_ptr
        a, b = turned_by(x_ptr, w_ptr, cos, sin, plane, n_planes, inside, eps, NORM, OWN)
        q_at = q_out_ptr + token * q_out_token + head * q_out_head + plane
        tl.store(q_at, a.to(q_out_ptr.dtype.element_ty), mask=inside)
        tl.store(q_at + n_planes, b.to(q_out_ptr.dtype.element_ty), mask=inside)
    else:
        page, offset = slot(token.to(tl.int32), tables_ptr, starts_ptr, lengths_ptr, n_rows, table_stride, PAGE, SEARCH)
        wait_for_previous(DEPENDENT_LAUNCH)
        if group < q_groups + k_groups:
            head = (group - q_groups) * HEADS + tl.arange(0, HEADS)[:, None]
            inside = also((head < k_heads) & (plane < n_planes), page >= 0)
            x_ptr = k_ptr + token * k_token + head * k_head + plane
            w_ptr = k_weight_ptr + head * (2 * n_planes) if OWN else k_weight_ptr
            a, b = turned_by(x_ptr, w_ptr, cos, sin, plane, n_planes, inside, eps, NORM, OWN)
            if k_out_ptr is not None:
                k_at = k_out_ptr + token * k_out_token + head * k_out_head + plane
                tl.store(k_at, a.to(k_out_ptr.dtype.element_ty), mask=inside)
                tl.store(k_at + n_planes, b.to(k_out_ptr.dtype.element_ty), mask=inside)
            place = page * cache_block + head * cache_head + offset * cache_slot
            store_halves(k_cache_ptr, place, n_planes, plane, a, b, inside)
        else:
            head = (group - q_groups - k_groups) * HEADS + tl.arange(0, HEADS)[:, None]
            inside = also((head < k_heads) & (plane < n_planes), page >= 0)
            x_ptr = v_ptr + token * v_token + head * v_head + plane
            first = tl.load(x_ptr, mask=inside)
            second = tl.load(x_ptr + n_planes, mask=inside)
            place = page * cache_block + head * cache_head + offset * cache_slot
            store_halves(v_cache_ptr, place, n_planes, plane, first, second, inside)


def rule(size: tuple[int, int, int]) -> Config:
    """Choose the knobs for (tokens, head size, 1 with norm else 0): as for rotary, but many tokens with norm take fewer
    threads.

    A thread has 8 neighbours of each half (fewer of small heads) for any number of tokens, so a head's sum of squares
    adds up in one order. Where a cache has 8 bits, ``warps_for`` adds warps for that. Multiply-adds are written out
    (``rotary.turned_by``). So a token gets the same bits in any batch.
    """
    if size[0] > 256 and size[1] > 32 and size[2]:
        return {"heads": 8, "warps": max(1, next_power_of_2(size[1]) // 128)}
    return plain_rule(size[:2])


def warps_for(knobs: Config, planes: int, cache_bytes: int) -> int:
    """Return the warps of a program for a cache whose numbers have this many bytes.

    Triton assigns to a thread the neighbours that fill 16 bytes of the cache, if there are enough for all threads: in 8
    bits 16. The sum of squares would then have another order than with 8, so a program has enough warps for 8.
    """
    return knobs["warps"] if cache_bytes > 1 else max(knobs["warps"], knobs["heads"] * planes // (8 * 32))


def _size(inputs: Mapping[str, Any]) -> tuple[int, int, int]:
    return *inputs["q"].shape[::2], int(inputs.get("q_weight") is not None)


def triton_rotary_kv_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: PagedBatch,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    out: Tensor | None = None,
    k_out: Tensor | None = None,
    dependent_launch: bool = False,
    own_tuning: bool = True,
    config: Config | None = None,
) -> Tensor:
    """Compute ``reference`` in one launch, rounded once; returns the rotated q ``[T, H, d]``.

    Slots come from the batch's tensors on the device, as ``kv_cache_write.triton_kv_cache_write`` describes, so the
    launch can be captured in a CUDA graph. ``out``: where the turned q goes (``q`` itself will do), else a new tensor;
    ``k_out``: where the turned k goes beside the cache (``k`` itself will do; padding stays as it is);
    ``dependent_launch``: begin while the kernel before still runs (dependent launch, Hopper), and read the batch, cos
    and sin before it has ended: it must not write those. ``own_tuning``: see ``tuning.choices``.

    Raises:
        ValueError: shapes, caches or batch that do not fit each other; one weight without the other, or of one for all
            heads and one for each.
    """
    require("rotary_kv_write", q, k, v, cos, sin, *kv_cache_write.numbers(k_cache, v_cache))
    check_shapes("rotary_kv_write", q, k, cos, sin)
    if v.shape != k.shape or k_cache.shape[1::2] != (k.shape[1], stored_width(k.shape[2], k_cache.dtype)):
        raise ValueError(
            f"rotary_kv_write: k and v [T, K, d] and caches [blocks, K, block_size, d] are needed; got "
            f"{list(k.shape)}, {list(v.shape)}, {list(k_cache.shape)}"
        )
    if (q_weight is None) != (k_weight is None):
        raise ValueError("rotary_kv_write: give both q_weight and k_weight, or neither")
    tokens, heads, size = q.shape
    kv_heads = k.shape[1]
    own = q_weight is not None and q_weight.dim() == 2
    if q_weight is not None and k_weight is not None:
        wanted = ((heads, size), (kv_heads, size)) if own else ((size,), (size,))
        if (q_weight.shape, k_weight.shape) != wanted:
            raise ValueError(
                f"rotary_kv_write: weights must be [d] both, or [H, d] and [K, d]; got {list(q_weight.shape)} and "
                f"{list(k_weight.shape)}"
            )
    where = slot_arguments("rotary_kv_write", batch, k_cache, v_cache, tokens)
    if out is None:
        out = torch.empty(q.shape, device=q.device, dtype=q.dtype)
    elif out.shape != q.shape or out.stride(-1) != 1:
        raise ValueError(f"rotary_kv_write: out must be {list(q.shape)} with a head's elements side by side")
    if k_out is not None and (k_out.shape != k.shape or k_out.stride(-1) != 1):
        raise ValueError(f"rotary_kv_write: k_out must be {list(k.shape)} with a head's elements side by side")
    if not tokens:
        return out
    q, k, v, cos, sin = (side_by_side(x) for x in (q, k, v, cos, sin))
    norm = q_weight is not None and k_weight is not None
    knobs = config or choose("rotary_kv_write", (tokens, size, int(norm)), q.device, rule, own_tuning)
    held = knobs["heads"]
    q_groups, k_groups = -(-heads // held), -(-kv_heads // held)
    groups, planes = q_groups + 2 * k_groups, next_power_of_2(size // 2)
    launch: dict[str, Any] = {"launch_pdl": True} if dependent_launch else {}
    _kernel[(tokens * groups,)](
        q_ptr=q, k_ptr=k, v_ptr=v, cos_ptr=cos, sin_ptr=sin,
        q_weight_ptr=q_weight.contiguous() if q_weight is not None else q,
        k_weight_ptr=k_weight.contiguous() if k_weight is not None else k,
        q_out_ptr=out, k_out_ptr=k_out, k_cache_ptr=k_cache, v_cache_ptr=v_cache,
        q_heads=heads, k_heads=kv_heads, n_planes=size // 2, eps=eps,
        q_token=q.stride(0), q_head=q.stride(1), k_token=k.stride(0), k_head=k.stride(1),
        v_token=v.stride(0), v_head=v.stride(1), q_out_token=out.stride(0), q_out_head=out.stride(1),
        k_out_token=0 if k_out is None else k_out.stride(0), k_out_head=0 if k_out is None else k_out.stride(1),
        cos_token=cos.stride(0), sin_token=sin.stride(0), q_groups=q_groups, k_groups=k_groups, groups=groups, **where,
        NORM=norm, OWN=own, HEADS=held, PLANES=planes, DEPENDENT_LAUNCH=dependent_launch,
        num_warps=warps_for(knobs, planes, k_cache.element_size()), **launch,
    )  # fmt: skip
    return out


@torch.library.custom_op("transect::rotary_kv_write", mutates_args=("k_cache", "v_cache"))
def _operator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    seq_lens: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
) -> Tensor:
    batch = PagedBatch(block_tables, query_starts, seq_lens, k_cache.shape[2])
    call = triton_rotary_kv_write if runs_triton(q, k, v, cos, sin, k_cache, v_cache) else reference
    return call(q, k, v, cos, sin, k_cache, v_cache, batch, q_weight, k_weight, eps)


@_operator.register_fake
def _(q: Tensor, *others: Any) -> Tensor:
    return torch.empty(q.shape, device=q.device, dtype=q.dtype)


def rotary_kv_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: PagedBatch,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """Return the operator for ``torch.compile``: the Triton kernel where it can run, else the reference."""
    tables = (batch.block_tables, batch.query_starts, batch.seq_lens)
    return _operator(q, k, v, cos, sin, k_cache, v_cache, *tables, q_weight, k_weight, eps)


def cost(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: PagedBatch,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
) -> Cost:
    """Count 3 FLOPs an element of q and k, 4 more with the norm, without block tables."""
    weights = sum(w.nbytes for w in (q_weight, k_weight) if w is not None)
    kept = k.shape[0] * k.shape[1] * k_cache.shape[3]
    written = q.nbytes + kept * (k_cache.element_size() + v_cache.element_size())
    read = q.nbytes + k.nbytes + v.nbytes + cos.nbytes + sin.nbytes + weights
    return Cost((7 if weights else 3) * (q.numel() + k.numel()), read, written)


def _examples() -> Sequence[dict[str, Any]]:
    examples = []
    for rows, heads, kv_heads, size, block_size, norm in (
        (((1, 1), (1, 7)), 9, 3, 64, 16, False),
        (((1, 9), (13, 20), (5, 5)), 4, 4, 6, 4, True),
        (((3, 3),), 3, 1, 2, 16, True),
    ):
        tokens = sum(new for new, _ in rows)
        angles = 10 * sample(tokens, size // 2, seed=2)
        weights = {"q_weight": sample(size, seed=6), "k_weight": sample(size, seed=7)} if norm else {}
        examples.append(
            {
                "q": sample(tokens, heads, size),
                "k": sample(tokens, kv_heads, size, seed=1),
                "v": sample(tokens, kv_heads, size, seed=3),
                "cos": angles.cos(),
                "sin": angles.sin(),
                "k_cache": sample(16, kv_heads, block_size, size, seed=4),
                "v_cache": sample(16, kv_heads, block_size, size, seed=5),
                "batch": example_batch(rows, block_size, 16),
                **weights,
            }
        )
    return examples


def _cases() -> Sequence[Case]:
    def case(model: shapes.ModelShape, tokens: int, decode: bool) -> Case:
        def make(device: torch.device, seed: int) -> Mapping[str, Any]:
            batch, blocks = case_batch(tokens, decode, device, seed)
            heads, angles = joined_projection(model, tokens, device, seed)
            generator = torch.Generator(device).manual_seed(seed)
            options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16, "generator": generator}
            caches = torch.randn(2, blocks, model.n_kv_heads, BLOCK_SIZE, model.head_dim, **options)
            made = {**heads, **angles, "k_cache": caches[0], "v_cache": caches[1], "batch": batch}
            if model.qk_norm:
                made["q_weight"], made["k_weight"] = torch.randn(2, model.head_dim, **options)
            return made

        return Case(f"{model.name}, {'decode' if decode else 'prefill'}, {tokens} tokens", make)

    made = []
    for model in shapes.MODELS:
        made += [case(model, tokens, True) for tokens in shapes.DECODE_ROWS]
        large = shapes.rows_for_bytes(2 * model.qkv_dim)
        made += [case(model, tokens, False) for tokens in (*shapes.PREFILL_ROWS, large)]
    return made


def _kernels() -> Sequence[Kernel]:
    numbers = ("n_rows", "q_heads", "k_heads", "n_planes")
    strides = (
        *("q_token", "q_head", "k_token", "k_head", "v_token", "v_head", "q_out_token", "q_out_head"),
        *("k_out_token", "k_out_head"),
        *("cos_token", "sin_token", "cache_block", "cache_head", "cache_slot"),
    )
    arguments = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "q_weight_ptr", "k_weight_ptr"), "*bf16")
    arguments |= dict.fromkeys(("q_out_ptr", "k_cache_ptr", "v_cache_ptr"), "*bf16")
    arguments |= {"cos_ptr": "*fp32", "sin_ptr": "*fp32", "eps": "fp32"}
    arguments |= dict.fromkeys(("tables_ptr", "starts_ptr", "lengths_ptr"), "*i32")
    arguments |= dict.fromkeys((*numbers, *strides, "table_stride", "q_groups", "k_groups", "groups"), "i32")
    tile = {"PAGE": BLOCK_SIZE, "PLANES": 64, "DEPENDENT_LAUNCH": False, "k_out_ptr": None, "OWN": False}
    in_fp8 = dict.fromkeys(("k_cache_ptr", "v_cache_ptr"), "*fp8e4nv")
    cached = {**tile, "HEADS": 16, "SEARCH": 0, "NORM": False}
    in_int8 = dict.fromkeys(("k_cache_ptr", "v_cache_ptr"), "*i8")
    scaled = {**tile, "HEADS": 16, "SEARCH": 0, "NORM": True, "OWN": True}
    many = {**tile, "HEADS": 8, "SEARCH": 64, "NORM": True}
    small = [
        Kernel("fp8, norms of heads", _kernel, arguments | in_fp8, scaled, ("n_planes", *strides), targets=FP8_TARGETS),
        Kernel("cache in fp8", _kernel, arguments | in_fp8, cached, ("n_planes", *strides), targets=FP8_TARGETS),
        Kernel("cache in int8", _kernel, arguments | in_int8, cached, ("n_planes",)),
        Kernel(
            "cache in fp8, many tokens",
            _kernel,
            arguments | in_fp8,
            many,
            ("n_planes", *strides),
            warps=2,
            targets=FP8_TARGETS,
        ),
    ]
    return small + [
        Kernel(
            f"{name}{', with norm' if norm else ''}",
            _kernel,
            arguments,
            {**tile, "HEADS": heads, "SEARCH": rows, "NORM": norm},
            ("n_planes", *strides),
            warps=warps,
        )
        for norm in (False, True)
        for name, heads, rows, warps in (
            ("one token a row", 16, 0, 4),
            ("ragged", 8 if norm else 16, 64, 1 if norm else 4),
        )
    ]


register(
    Op(
        name="rotary_kv_write",
        reference=reference,
        cost=cost,
        implementations={
            "torch": in_torch(reference, batch_invariant=True),
            "triton": in_triton(triton_rotary_kv_write, batch_invariant=True),
        },
        examples=_examples,
        peers={"torch": reference},
        mutates=("k_cache", "v_cache"),
        keeps_dtype=("cos", "sin"),
        directions=("forward",),
        cases=_cases,
        kernels=_kernels,
        knobs=lambda: [
            Knobs(
                "rotary_kv_write",
                CHOICES,
                rule,
                triton_rotary_kv_write,
                dict,
                _size,
            )
        ],
    )
)
