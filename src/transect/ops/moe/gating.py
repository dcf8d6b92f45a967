r"""Gating: the k experts of each token, and their weights, from the router's logits.

    s = softmax(l)  or  sigmoid(l)                     scores, one for each expert
    c = the k experts with the largest s + b           b: a correction that counts for the choice alone
    w_j = scale * s_cj      or, renormalized,      w_j = scale * s_cj / sum_i s_ci

With groups, a group's worth is the sum of its two best, and only experts of the best groups are candidates. Ties go to
the expert with the smaller number. Renormalized softmax over all is softmax over the chosen, so routers that choose
first are this too. The choice has no gradient, the weights have; with G = scale * dL/dw and n = w / scale:

    softmax          dL/dl_e = s_e (G_e [e chosen] - sum_j s_cj G_j)
    renormalized     dL/ds_cj = (G_j - sum_i n_i G_i) / sum_i s_ci         sigmoid: dL/dl = dL/ds s (1 - s)

Shapes: logits ``[T, E]``, bias ``[E]`` float32, weights ``[T, k]`` float32, experts ``[T, k]`` int32. float32 inside.
Source: Shazeer et al. 2017, arXiv:1701.06538; sigmoid, correction and groups: DeepSeek-V3, arXiv:2412.19437.

Bound by bytes, and small: some tens of FLOPs for each of T E logits, read once; a launch costs more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...costs.work import Cost
from ..lang.jit import in_triton, kernel, next_power_of_2, require, rows_of, runs_triton, tl
from ..numerics import compute_dtype, sample
from ..registry import Case, Kernel, Op, in_torch, register

EPSILON = 1e-20
"""Added to the sum that renormalizes sigmoid scores, which may all be 0."""


def reference(
    logits: Tensor,
    bias: Tensor | None,
    k: int,
    score: str = "softmax",
    renormalize: bool = True,
    scale: float = 1.0,
    groups: int = 1,
    groups_kept: int = 1,
) -> tuple[Tensor, Tensor]:
    """Choose experts from logits ``[T, E]`` -> (weights ``[T, k]`` float32 or float64, experts ``[T, k]`` int32)."""
    scores = _scores(logits, score)
    worth = scores.detach() if bias is None else scores.detach() + bias.to(scores.dtype)
    if groups > 1:
        worth = _best_groups(worth, groups, groups_kept)
    experts = worth.argsort(dim=-1, descending=True, stable=True)[:, :k]
    return _weights(scores.gather(1, experts), score, renormalize, scale), experts.to(torch.int32)


def sigmoid(x: Tensor) -> Tensor:
    """Compute the sigmoid in any shape and dtype. torch's CPU sigmoid rounds differently at the end of a tensor than
    inside it, so a token's would depend on the number of tokens. The clamp keeps exp and its gradient finite."""
    if x.is_cuda:
        return x.sigmoid()
    wide = x.to(compute_dtype(x.dtype))
    return (1 / (1 + torch.exp(-wide.clamp(min=-80)))).to(x.dtype)


def _scores(logits: Tensor, score: str) -> Tensor:
    wide = logits.to(compute_dtype(logits.dtype))
    return sigmoid(wide) if score == "sigmoid" else wide.softmax(-1)


def _best_groups(worth: Tensor, groups: int, kept: int) -> Tensor:
    """Set experts outside of the best groups to -inf."""
    grouped = worth.unflatten(1, (groups, -1))
    best_two = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
    chosen = best_two.argsort(dim=-1, descending=True, stable=True)[:, :kept]
    out = torch.ones_like(best_two, dtype=torch.bool).scatter(1, chosen, False)
    return grouped.masked_fill(out[:, :, None], -torch.inf).flatten(1)


def _weights(chosen: Tensor, score: str, renormalize: bool, scale: float) -> Tensor:
    if renormalize:
        chosen = chosen / (chosen.sum(-1, keepdim=True) + (EPSILON if score == "sigmoid" else 0.0))
    return chosen * scale


@kernel
def _gating(  # type: ignore[no-untyped-def]
    logits, bias, weights, experts, E, row_stride, scale,
    K: tl.constexpr, SIGMOID: tl.constexpr, RENORMALIZE: tl.constexpr, BIAS: tl.constexpr,
    CHOICES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Process one token: k times the best of the remaining experts."""
    row = tl.program_id(0)
    e = tl.arange(0, BLOCK)
    inside = e < E
    l = tl.load(logits + row.to(tl.int64) * row_stride + e, inside, float("-inf")).to(tl.float32)
    if SIGMOID:
        s = 1.0 / (1.0 + tl.exp(-l))
    else:
        p = tl.exp(l - tl.max(l, 0))
        s = p / tl.sum(p, 0)
    worth = s
    if BIAS:
        worth = s + tl.load(bias + e, inside, 0.0)
    worth = tl.where(inside, worth, float("-inf"))
    choice = tl.arange(0, CHOICES)
    w = tl.zeros([CHOICES], tl.float32)
    chosen = tl.zeros([CHOICES], tl.int32)
    for j in tl.static_range(K):
        best = tl.argmax(worth, 0)
        w = tl.where(choice == j, tl.sum(tl.where(e == best, s, 0.0), 0), w)
        chosen = tl.where(choice == j, best, chosen)
        worth = tl.where(e == best, float("-inf"), worth)
    if RENORMALIZE:
        total = tl.sum(w, 0)
        if SIGMOID:
            total += 1e-20
        w = w / total
    tl.store(weights + row * K + choice, w * scale, choice < K)
    tl.store(experts + row * K + choice, chosen, choice < K)


def refusal(groups: int = 1, **_: Any) -> str | None:
    """Return the reason why the kernel does not take these arguments; None if it does."""
    return "groups of experts are chosen by torch alone" if groups > 1 else None


def triton_gating(
    logits: Tensor,
    bias: Tensor | None,
    k: int,
    score: str = "softmax",
    renormalize: bool = True,
    scale: float = 1.0,
    groups: int = 1,
    groups_kept: int = 1,
) -> tuple[Tensor, Tensor]:
    """Compute ``reference`` in Triton; groups of experts by torch."""
    if groups > 1:
        return reference(logits, bias, k, score, renormalize, scale, groups, groups_kept)
    require("expert_gating", logits)
    logits = rows_of(logits)
    tokens, n = logits.shape
    weights = torch.empty(tokens, k, dtype=torch.float32, device=logits.device)
    experts = torch.empty(tokens, k, dtype=torch.int32, device=logits.device)
    if tokens:
        _gating[(tokens,)](
            logits, logits if bias is None else bias.contiguous(), weights, experts, n, logits.stride(0), scale,
            K=k, SIGMOID=score == "sigmoid", RENORMALIZE=renormalize, BIAS=bias is not None,
            CHOICES=next_power_of_2(k), BLOCK=next_power_of_2(n), num_warps=1,
        )  # fmt: skip
    return weights, experts


@torch.library.custom_op("transect::expert_gating", mutates_args=())
def expert_gating(
    logits: Tensor,
    bias: Tensor | None,
    k: int,
    score: str = "softmax",
    renormalize: bool = True,
    scale: float = 1.0,
    groups: int = 1,
    groups_kept: int = 1,
) -> tuple[Tensor, Tensor]:
    """Run the operator for autograd and ``torch.compile``: the Triton kernel where it can run, else the
    reference."""
    call = triton_gating if runs_triton(logits) else reference
    weights, experts = call(logits, bias, k, score, renormalize, scale, groups, groups_kept)
    return weights.contiguous(), experts.contiguous()


def gradient(grad: Tensor, logits: Tensor, experts: Tensor, score: str, renormalize: bool, scale: float) -> Tensor:
    """Compute dL/dlogits from the weights' gradient ``[T, k]``, by torch: T E numbers are few."""
    s = _scores(logits, score)
    index = experts.long()
    chosen = s.gather(1, index)
    g = grad.to(s.dtype) * scale
    if renormalize:
        total = chosen.sum(-1, keepdim=True) + (EPSILON if score == "sigmoid" else 0.0)
        g = (g - (chosen / total * g).sum(-1, keepdim=True)) / total
    ds = torch.zeros_like(s).scatter(1, index, g)
    if score == "sigmoid":
        return (ds * s * (1 - s)).to(logits.dtype)
    return (s * (ds - (s * ds).sum(-1, keepdim=True))).to(logits.dtype)


@expert_gating.register_fake
def _(
    logits: Tensor,
    bias: Tensor | None,
    k: int,
    score: str = "softmax",
    renormalize: bool = True,
    scale: float = 1.0,
    groups: int = 1,
    groups_kept: int = 1,
) -> tuple[Tensor, Tensor]:
    shape = (logits.shape[0], k)
    return logits.new_empty(shape, dtype=compute_dtype(logits.dtype)), logits.new_empty(shape, dtype=torch.int32)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs[0], output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.how = inputs[3:6]


def _backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
    logits, experts = ctx.saved_tensors
    return gradient(grad, logits, experts, *ctx.how), *(None,) * 7


expert_gating.register_autograd(_backward, setup_context=_setup)


def cost(logits: Tensor, bias: Tensor | None, k: int, **options: Any) -> Cost:
    """Count 5 FLOPs a logit for the scores, one for each choice."""
    tokens = logits.shape[0]
    read = logits.nbytes + (0 if bias is None else bias.nbytes)
    return Cost((5 + k) * logits.numel(), read, 8 * tokens * k)


def _examples() -> Sequence[dict[str, Any]]:
    def example(tokens: int, experts: int, k: int, **options: Any) -> dict[str, Any]:
        how = {"score": "softmax", "renormalize": True, "scale": 1.0, "groups": 1, "groups_kept": 1}
        return {"logits": 2 * sample(tokens, experts), "bias": None, "k": k, **how, **options}

    return [
        example(7, 8, 2),
        example(5, 60, 4, renormalize=False),
        example(3, 24, 3, score="sigmoid", scale=2.5, bias=0.3 * sample(24, seed=1)),
        example(4, 16, 4, score="sigmoid", groups=4, groups_kept=2, bias=0.3 * sample(16, seed=1)),
        example(0, 8, 2),
    ]


def cases(*counts: int) -> Sequence[Case]:
    """Return a case for each count of tokens."""

    def case(tokens: int) -> Case:
        def make(device: torch.device, seed: int) -> Mapping[str, Any]:
            generator = torch.Generator(device).manual_seed(seed)
            return {"logits": torch.randn(tokens, 128, device=device, generator=generator), "bias": None, "k": 8}

        return Case(f"qwen3-30b-a3b, {tokens} tokens", make, dtype="float32")

    return [case(tokens) for tokens in counts]


def _kernels() -> Sequence[Kernel]:
    types = {"logits": "*fp32", "bias": "*fp32", "weights": "*fp32", "experts": "*i32", "E": "i32"}
    types |= {"row_stride": "i32", "scale": "fp32"}
    softmax = {"K": 8, "SIGMOID": False, "RENORMALIZE": True, "BIAS": False, "CHOICES": 8, "BLOCK": 128}
    sigmoid = {"K": 8, "SIGMOID": True, "RENORMALIZE": True, "BIAS": True, "CHOICES": 8, "BLOCK": 256}
    return [
        Kernel("softmax", _gating, types, softmax, ("E", "row_stride"), 1),
        Kernel("sigmoid", _gating, types, sigmoid, ("E", "row_stride"), 1),
    ]


register(
    Op(
        name="expert_gating",
        reference=reference,
        cost=cost,
        implementations={
            "torch": in_torch(reference, batch_invariant=True),
            "triton": in_triton(triton_gating, batch_invariant=True, autograd=expert_gating, refusal=refusal),
        },
        examples=_examples,
        peers={"torch": reference},
        differentiable=("logits",),
        keeps_dtype=("logits", "bias"),
        cases=partial(cases, 1, 64, 8192),
        kernels=_kernels,
    )
)
