"""Softmax over rows that are split between programs: only there is waiting for one another."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from transect.ops.first.softmax import ONE_PASS, reference, reference_backward, triton_backward, triton_softmax

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [ONE_PASS + 1, 128256, 151936])
def test_many_rows_in_every_run_the_same(width: int, dtype: torch.dtype) -> None:
    """More parts than the device runs at once, with rows of -inf and of large numbers among them."""
    x = 4 * torch.randn(700, width, device="cuda", dtype=dtype)
    x[3, : width // 2] = -float("inf")
    x[5, 17] = 1e4
    x[7] -= 1e4
    grad = torch.randn_like(x)
    y = triton_softmax(x)
    dx = triton_backward(grad, y)
    torch.testing.assert_close(y, reference(x), rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-12)
    expected = reference_backward(grad, y)
    assert float((dx.float() - expected.float()).norm() / expected.float().norm()) < 3e-3
    for _ in range(5):
        assert torch.equal(triton_softmax(x), y) and torch.equal(triton_backward(grad, y), dx)
    assert torch.equal(triton_softmax(x[5:6]), y[5:6])
    x[11] = -float("inf")
    assert triton_softmax(x)[11].isnan().all() and torch.equal(triton_softmax(x)[12], y[12])


def test_replayed_graph() -> None:
    x = torch.randn(64, 128256, device="cuda", dtype=torch.bfloat16)
    triton_softmax(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = triton_softmax(x)
    for _ in range(3):
        x.normal_()
        graph.replay()
        assert torch.equal(y, triton_softmax(x))
