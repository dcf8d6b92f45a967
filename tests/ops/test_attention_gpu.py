"""Gradients of flash attention on a GPU: right, and the same bits in every run (a race shows as neither)."""

import pytest
import torch

from transect.ops import flash_attention as fa


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("size", [64, 96, 128])
@pytest.mark.parametrize("kv_heads", [4, 16])
@pytest.mark.parametrize("causal", [True, False])
def test_gradients_are_right_and_repeat(size: int, kv_heads: int, causal: bool) -> None:
    lengths = (300, 1, 699)
    tokens = sum(lengths)
    cu = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32).cuda()
    q, k, v, g = (torch.randn(tokens, h, size, device="cuda").bfloat16() for h in (16, kv_heads, kv_heads, 16))
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    want = torch.autograd.grad(fa.reference(*leaves, cu, size**-0.5, causal), leaves, g.double())
    out, lse = fa.forward(q, k, v, cu, size**-0.5, causal)
    runs = [fa.backward(g, q, k, v, out, lse, cu, size**-0.5, causal) for _ in range(8)]
    for i, exact in enumerate(want):
        assert float((runs[0][i].double() - exact).norm() / exact.norm()) < 5e-3
        assert all(torch.equal(run[i], runs[0][i]) for run in runs)
