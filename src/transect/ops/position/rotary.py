r"""Rotary position embedding of queries and keys, half rotation (the layout of Hugging Face checkpoints).

Each head is split into a first half a and a second half b; element i of both is one plane, turned by the angle that
``models/rope.py`` gives for the token's position:

    a' = a * cos - b * sin        b' = b * cos + a * sin

Backward is the rotation by the opposite angle (cos and sin take no gradient):

    dL/da = dL/da' * cos + dL/db' * sin        dL/db = dL/db' * cos - dL/da' * sin

Shapes: q ``[T, H, d]``, k ``[T, K, d]``, cos and sin ``[T, d/2]`` in float32 (float64 for float64 models; yarn's
attention factor is in them). Results like q and k; float32 inside for half inputs, rounded once at the end.
Source: Su et al. 2021, arXiv:2104.09864.

Bound by bytes: 3 FLOPs an element against one read and one write, so 3 / (2 * 2), under 1 FLOP per byte in bfloat16;
cos and sin are shared by all heads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...costs.work import Cost
from .. import shapes
from ..attention.paged.kv_cache_write import side_by_side
from ..cpu import gradients
from ..lang.jit import in_triton, kernel, next_power_of_2, require, runs_triton, tl
from ..lang.tiles import after_previous
from ..numerics import compute_dtype, sample
from ..peers import compiled
from ..registry import Case, Kernel, Knobs, Op, in_torch, register
from ..tuning import Config, choose


def reference(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate q ``[T, H, d]``, k ``[T, K, d]`` by cos and sin ``[T, d/2]``."""
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    dtype = compute_dtype(x.dtype)
    a, b = x.to(dtype).chunk(2, dim=-1)
    cos, sin = cos.to(dtype).unsqueeze(1), sin.to(dtype).unsqueeze(1)  # the same for every head
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


@kernel
def turned(x_ptr, w_ptr, cos_ptr, sin_ptr, plane, n_planes, inside, eps, sign, NORM: tl.constexpr):
    """Return both halves of some heads of one token, rotated. ``x_ptr`` ``[heads, planes]`` points at the first halves,
    cos and sin at the token's row. With NORM the heads are first divided by their root mean square and scaled by w."""
    used = plane < n_planes
    cos = tl.load(cos_ptr + plane, mask=used, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + plane, mask=used, other=0.0).to(tl.float32) * sign
    return turned_by(x_ptr, w_ptr, cos, sin, plane, n_planes, inside, eps, NORM)


@kernel
def turned_by(x_ptr, w_ptr, cos, sin, plane, n_planes, inside, eps, NORM: tl.constexpr, OWN: tl.constexpr = False):
    """Compute ``turned`` with the token's cos and sin ``[1, planes]`` float32. OWN: ``w_ptr`` ``[heads, 1]`` points at
    each head's own weights.

    Multiply-adds are written out: of the two products of a sum the compiler fuses either, another one in some heads of
    a program than in others, and a head's place differs with the number of heads in a program.
    """
    used = plane < n_planes
    if OWN:
        used = inside
    a = tl.load(x_ptr, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x_ptr + n_planes, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        r = 1.0 / tl.sqrt_rn(tl.sum(tl.fma(a, a, b * b), 1) / (2 * n_planes) + eps)
        a = a * r[:, None] * tl.load(w_ptr + plane, mask=used, other=0.0).to(tl.float32)
        b = b * r[:, None] * tl.load(w_ptr + n_planes + plane, mask=used, other=0.0).to(tl.float32)
    opposite = tl.broadcast_to(0.0 - sin, a.shape)
    cos = tl.broadcast_to(cos, a.shape)
    return tl.fma(a, cos, b * opposite), tl.fma(a, tl.broadcast_to(sin, a.shape), b * cos)


@kernel
def _rotary_kernel(
    q_ptr, k_ptr, cos_ptr, sin_ptr, q_out_ptr, k_out_ptr, q_heads, k_heads, n_planes,
    q_token, q_head, k_token, k_head, q_out_token, k_out_token, cos_token, sin_token, sign, q_groups, groups,
    HEADS: tl.constexpr, PLANES: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr,
):  # fmt: skip
    """Rotate HEADS heads of one token a program: the first ``q_groups`` programs of a token take queries, the others
    keys."""
    after_previous(DEPENDENT_LAUNCH)
    token = (tl.program_id(0) // groups).to(tl.int64)
    group = tl.program_id(0) % groups
    plane = tl.arange(0, PLANES)[None, :]
    cos_ptr += token * cos_token
    sin_ptr += token * sin_token
    if group < q_groups:
        head = group * HEADS + tl.arange(0, HEADS)[:, None]
        inside = (head < q_heads) & (plane < n_planes)
        x_ptr = q_ptr + token * q_token + head * q_head + plane
        a, b = turned(x_ptr, q_ptr, cos_ptr, sin_ptr, plane, n_planes, inside, 0.0, sign, False)
        out = q_out_ptr + token * q_out_token + head * (2 * n_planes) + plane
        tl.store(out, a.to(q_out_ptr.dtype.element_ty), mask=inside)
        tl.store(out + n_planes, b.to(q_out_ptr.dtype.element_ty), mask=inside)
    else:
        head = (group - q_groups) * HEADS + tl.arange(0, HEADS)[:, None]
        inside = (head < k_heads) & (plane < n_planes)
        x_ptr = k_ptr + token * k_token + head * k_head + plane
        a, b = turned(x_ptr, k_ptr, cos_ptr, sin_ptr, plane, n_planes, inside, 0.0, sign, False)
        out = k_out_ptr + token * k_out_token + head * (2 * n_planes) + plane
        tl.store(out, a.to(k_out_ptr.dtype.element_ty), mask=inside)
        tl.store(out + n_planes, b.to(k_out_ptr.dtype.element_ty), mask=inside)


def rule(size: tuple[int, int]) -> Config:
    """Choose the knobs for (tokens, head size): 16 heads a program, 16 bytes of each half a thread."""
    return {"heads": 16, "warps": max(1, next_power_of_2(size[1]) // 32)}


def check_shapes(name: str, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Raise ValueError unless q ``[T, H, d]``, k ``[T, K, d]`` with d even, and cos and sin ``[T, d/2]``."""
    tokens, _, size = q.shape
    if k.shape[0] != tokens or k.shape[2] != size or size % 2 or {cos.shape, sin.shape} != {(tokens, size // 2)}:
        raise ValueError(
            f"{name}: q [T, H, d], k [T, K, d] with d even, cos and sin [T, d/2] are needed; got {list(q.shape)}, "
            f"{list(k.shape)}, {list(cos.shape)}, {list(sin.shape)}"
        )


def triton_rotary(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    opposite: bool = False,
    out: tuple[Tensor, Tensor] | None = None,
    dependent_launch: bool = False,
    config: Config | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute ``reference`` in one launch; ``opposite``: by the opposite angle, which is the gradient.

    Any token and head strides, so q and k may be views of one projection; the results are contiguous. ``out``: where
    they go instead, with the heads of a token side by side; it may be ``(q, k)``. ``dependent_launch``: begin while the
    kernel before still runs (Hopper). ValueError if the shapes do not fit each other.
    """
    require("rotary", q, k, cos, sin)
    check_shapes("rotary", q, k, cos, sin)
    q, k, cos, sin = side_by_side(q), side_by_side(k), side_by_side(cos), side_by_side(sin)
    if out is None:
        q_out = torch.empty(q.shape, device=q.device, dtype=q.dtype)
        k_out = torch.empty(k.shape, device=k.device, dtype=k.dtype)
    else:
        q_out, k_out = out
        if (q_out.shape, k_out.shape) != (q.shape, k.shape) or not all(_heads_together(x) for x in out):
            raise ValueError("rotary: out must have the shapes of q and k, with the heads of a token side by side")
    tokens, q_heads, size = q.shape
    k_heads = k.shape[1]
    if tokens * (q_heads + k_heads) * size:
        knobs = config or choose("rotary", (tokens, size), q.device, rule)
        heads = knobs["heads"]
        q_groups = -(-q_heads // heads)
        groups = q_groups - (-k_heads // heads)
        _rotary_kernel[(tokens * groups,)](
            q, k, cos, sin, q_out, k_out, q_heads, k_heads, size // 2,
            q.stride(0), q.stride(1), k.stride(0), k.stride(1), q_out.stride(0), k_out.stride(0),
            cos.stride(0), sin.stride(0), -1.0 if opposite else 1.0, q_groups, groups,
            HEADS=heads, PLANES=next_power_of_2(size // 2), DEPENDENT_LAUNCH=dependent_launch, num_warps=knobs["warps"],
            **({"launch_pdl": True} if dependent_launch else {}),
        )  # fmt: skip
    return q_out, k_out


def _heads_together(x: Tensor) -> bool:
    """Return True if the heads ``[H, d]`` of each token of ``x`` are contiguous."""
    return x.numel() == 0 or x[0].is_contiguous()


@torch.library.custom_op("transect::rotary", mutates_args=())
def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Run the operator for autograd and ``torch.compile``: the Triton kernel where it can run, else the
    reference."""
    return triton_rotary(q, k, cos, sin) if runs_triton(q, k, cos, sin) else reference(q, k, cos, sin)


@torch.library.custom_op("transect::rotary_backward", mutates_args=())
def rotary_backward(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Compute (dL/dq, dL/dk) from the upstream gradients of both: the rotation by the opposite angle."""
    if runs_triton(q, k, cos, sin):
        return triton_rotary(q, k, cos, sin, opposite=True)
    return reference(q, k, cos, -sin)


def _empty(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty(q.shape, device=q.device, dtype=q.dtype), torch.empty(k.shape, device=k.device, dtype=k.dtype)


rotary.register_fake(_empty)
rotary_backward.register_fake(_empty)


def _setup(ctx: Any, inputs: tuple[Tensor, ...], output: Any) -> None:
    ctx.save_for_backward(inputs[2], inputs[3])


def _backward(ctx: Any, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, None, None]:
    return *rotary_backward(q, k, *ctx.saved_tensors), None, None


rotary.register_autograd(_backward, setup_context=_setup)


def cost(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Cost:
    """Count 3 FLOPs an element: two products and a sum."""
    heads = q.nbytes + k.nbytes
    return Cost(3 * (q.numel() + k.numel()), heads + cos.nbytes + sin.nbytes, heads)


def _examples() -> Sequence[dict[str, Any]]:
    examples = []
    for tokens, heads, kv_heads, size in ((1, 9, 3, 64), (7, 4, 4, 6), (5, 3, 1, 2), (0, 2, 1, 4)):
        angles = 10 * sample(tokens, size // 2, seed=2)
        q, k = sample(tokens, heads, size), sample(tokens, kv_heads, size, seed=1)
        examples.append({"q": q, "k": k, "cos": angles.cos(), "sin": angles.sin()})
    return examples


def joined_projection(
    model: shapes.ModelShape, tokens: int, device: torch.device, seed: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Generate q, k, v as views of one ``[T, (H + 2K) d]`` projection, and cos, sin for random angles."""
    generator = torch.Generator(device).manual_seed(seed)
    heads, kv_heads, size = model.n_heads, model.n_kv_heads, model.head_dim
    joined = torch.randn(tokens, heads + 2 * kv_heads, size, device=device, dtype=torch.bfloat16, generator=generator)
    angle = 100 * torch.rand(tokens, size // 2, device=device, generator=generator)
    q, k, v = joined.split((heads, kv_heads, kv_heads), dim=1)
    return {"q": q, "k": k, "v": v}, {"cos": angle.cos(), "sin": angle.sin()}


EAGER = ("triton", "torch")


def _cases() -> Sequence[Case]:
    def case(name: str, model: shapes.ModelShape, tokens: int, directions: tuple[str, ...], only: Any) -> Case:
        def make(device: torch.device, seed: int) -> Mapping[str, Any]:
            heads, angles = joined_projection(model, tokens, device, seed)
            return {"q": heads["q"], "k": heads["k"], **angles}

        return Case(f"{name}, {tokens} tokens", make, directions=directions, only=only)

    made = []
    for name, model in shapes.by_size(lambda model: (model.n_heads, model.n_kv_heads, model.head_dim)):
        many = shapes.rows_for_bytes(2 * (model.n_heads + model.n_kv_heads) * model.head_dim)
        made.append(case(name, model, many, (), () if model is shapes.LLAMA_8B else EAGER))
        made += [case(name, model, tokens, (), EAGER) for tokens in shapes.PREFILL_ROWS]
        made += [case(name, model, tokens, ("forward",), EAGER) for tokens in shapes.DECODE_ROWS]
    return made


def _kernels() -> Sequence[Kernel]:
    tensors = {**dict.fromkeys(("q_ptr", "k_ptr", "q_out_ptr", "k_out_ptr"), "*bf16"), "cos_ptr": "*fp32"}
    strides = ("q_token", "q_head", "k_token", "k_head", "q_out_token", "k_out_token", "cos_token", "sin_token")
    numbers = dict.fromkeys(("q_heads", "k_heads", "n_planes", *strides, "q_groups", "groups"), "i32")
    arguments = {**tensors, "sin_ptr": "*fp32", **numbers, "sign": "fp32"}
    tile = {"HEADS": 16, "PLANES": 64, "DEPENDENT_LAUNCH": False}
    return [Kernel("both directions", _rotary_kernel, arguments, tile, ("n_planes", *strides))]


def _gradient_cost(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Cost:
    return cost(q, k, cos, sin)


CHOICES = {"heads": (2, 4, 8, 16, 32), "warps": (1, 2, 4, 8)}

register(
    Op(
        name="rotary",
        reference=reference,
        cost=cost,
        implementations={
            "torch": in_torch(reference, batch_invariant=True),
            "cpu": gradients.implementation(gradients.rotary, reference),
            "triton": in_triton(triton_rotary, batch_invariant=True, autograd=rotary),
        },
        examples=_examples,
        peers={"torch": reference, "torch.compile": compiled(reference)},
        differentiable=("q", "k"),
        keeps_dtype=("cos", "sin"),
        gradient_cost=_gradient_cost,
        cases=_cases,
        kernels=_kernels,
        knobs=lambda: [Knobs("rotary", CHOICES, rule, triton_rotary, dict, lambda inputs: inputs["q"].shape[::2])],
    )
)
