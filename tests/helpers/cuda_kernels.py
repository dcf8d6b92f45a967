"""What the tests of the CUDA C++ products share: loading a kernel or skipping, inputs, what every kernel must do."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest
import torch
import torch.nn.functional as F

from transect.ops import int4_matmul
from transect.ops.int4_packing import pack
from transect.ops.registry import Unavailable

Kernel = TypeVar("Kernel")
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def loaded(make: Callable[[], Kernel], *, hopper: bool = False) -> Kernel:
    """``make()``; skips the test where there is no NVIDIA GPU (with ``hopper``, none of that kind), or no compiler."""
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    if hopper and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    try:
        return make()
    except Unavailable as error:
        pytest.skip(str(error))


def product_inputs(m: int, n: int, k: int) -> Inputs:
    """x ``[m, k]`` whose rows are apart, weight ``[n, k]``, bias ``[n]``: bfloat16, on the GPU."""
    generator = torch.Generator("cuda").manual_seed(m + n + k)
    x, weight, bias = (
        torch.randn(shape, device="cuda", generator=generator, dtype=torch.bfloat16)
        for shape in ((m, k + 8), (n, k), n)
    )
    torch.cuda.synchronize()
    return x[:, :k], weight * k**-0.5, bias


def int4_weight(n: int, k: int, group: int, device: str = "cpu") -> Inputs:
    """Packed codes, scales and zeros of a weight ``[n, k]``."""
    generator = torch.Generator().manual_seed(n + k)
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, generator=generator)
    scale = ((torch.rand(n, k // group, generator=generator) + 0.1) * k**-0.5 / 4).to(torch.bfloat16)
    zero = (-7.5 * scale).to(torch.bfloat16)
    return pack(codes, group).to(device), scale.to(device), zero.to(device)


def check_int4_product(kernel: Any, m: int, n: int, k: int, group: int, *, pdl: bool, repeats: int) -> None:
    """At most twice the error of torch's product with the weight in bfloat16, and the same bits in every run."""
    weight = int4_weight(n, k, group, "cuda")
    x, _, bias = product_inputs(m, n, k)
    want = int4_matmul.reference(x.double(), weight[0], *(t.double() for t in (*weight[1:], bias)))
    got = kernel(x, *weight, bias, pdl=pdl)
    of_torch = (int4_matmul._peer(x, *weight, bias).double() - want).norm()
    assert (got.double() - want).norm() <= 2 * of_torch
    for _ in range(repeats):
        assert torch.equal(got, kernel(x, *weight, bias, pdl=pdl))


def check_repacking(kernel: Any) -> None:
    """A weight whose codes change is repacked, and what is kept of one goes with it."""
    codes, scale, zero = int4_weight(64, 256, 128, "cuda")
    x = torch.ones(1, 256, device="cuda", dtype=torch.bfloat16)
    before = kernel(x, codes, scale, zero)
    codes.copy_(15 - codes % 16)
    assert not torch.equal(before, kernel(x, codes, scale, zero))
    del codes
    gc.collect()
    assert not kernel._repacked


def check_chain(kernel: Any, rows: int, options: Sequence[dict[str, Any]], error: float) -> None:
    """Launches that follow one another closely in a graph, three times with each of ``options``, read what the one
    before wrote, in every replay; ``error`` is what their rounding may add up to."""
    x, weight, _ = product_inputs(rows, 1024, 1024)
    weights = [weight, weight.flip(0).contiguous(), weight.flip(1).contiguous()]
    want = x
    for i in range(3 * len(options)):
        want = F.linear(want, weights[i % 3])
    kernel(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x
        for i in range(3 * len(options)):
            y = kernel(y, weights[i % 3], pdl=True, **options[i % len(options)])
    graph.replay()
    first = y.clone()
    for _ in range(20):
        graph.replay()
        assert torch.equal(y, first)
    assert (first.float() - want.float()).norm() <= error * want.float().norm()
