"""Attention over packed documents against dense attention of each document on its own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from transect.ops.attention.packed.attention import by_document, reference
from transect.ops.numerics import sample

LENGTHS = (5, 1, 37, 70)


def inputs(heads: int, kv_heads: int, size: int = 16) -> tuple[torch.Tensor, ...]:
    tokens = sum(LENGTHS)
    shapes = ((tokens, heads, size), (tokens, kv_heads, size), (tokens, kv_heads, size))
    return tuple(sample(*shape, seed=seed).double() for seed, shape in enumerate(shapes))


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None) -> torch.Tensor:
    """Each document through torch's attention with an explicit mask and repeated key heads."""
    group = q.shape[1] // k.shape[1]
    parts = []
    for q_d, k_d, v_d in zip(q.split(LENGTHS), k.split(LENGTHS), v.split(LENGTHS), strict=True):
        length = q_d.shape[0]
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        if window is not None:
            mask &= torch.ones(length, length, dtype=torch.bool).triu(1 - window)
        k_h, v_h = (x.transpose(0, 1).repeat_interleave(group, dim=0) for x in (k_d, v_d))
        parts.append(F.scaled_dot_product_attention(q_d.transpose(0, 1), k_h, v_h, mask, scale=scale).transpose(0, 1))
    return torch.cat(parts)


@pytest.mark.parametrize("function", [reference, by_document])
@pytest.mark.parametrize("window", [None, 1, 6, 37, 100])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
def test_against_dense(function, window: int | None, heads: int, kv_heads: int) -> None:
    q, k, v = (x.requires_grad_(True) for x in inputs(heads, kv_heads))
    cu_seqlens = torch.tensor([0, *LENGTHS]).cumsum(0, dtype=torch.int32)
    upstream = sample(*q.shape, seed=7).double()
    ours = function(q, k, v, cu_seqlens, 0.3, window)
    right = dense(q, k, v, 0.3, window)
    torch.testing.assert_close(ours, right, rtol=0, atol=1e-12)
    for got, want in zip(
        torch.autograd.grad(ours, (q, k, v), upstream), torch.autograd.grad(right, (q, k, v), upstream), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-11)


def test_a_document_does_not_see_its_neighbours() -> None:
    """NaN in one document stays there."""
    q, k, v = inputs(2, 1)
    k[5] = v[5] = torch.nan
    out = by_document(q, k, v, torch.tensor([0, 5, 6, 43, 113], dtype=torch.int32), 1.0)
    assert out[5].isnan().all()
    assert not torch.cat((out[:5], out[6:])).isnan().any()
