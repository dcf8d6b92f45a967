"""What the tests of the CUDA C++ products share: loading a kernel or skipping, inputs, what every kernel must do."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, TypeVar

import cuda_host
import pytest
import torch
import torch.nn.functional as F

from transect.ops.linear.packed import chain
from transect.ops.linear.packed.gguf import gguf_row
from transect.ops.linear.packed.int4 import int4_matmul
from transect.ops.linear.packed.int4.int4_packing import arrange_codes
from transect.ops.registry import Unavailable

Kernel = TypeVar("Kernel")
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def miss(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """How far a result is from the wanted one, as a share of that one's length."""
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


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


def row_on_host(
    monkeypatch: pytest.MonkeyPatch, instead: tuple[str, str] | None = None, multiprocessors: int = 3
) -> gguf_row.GGUFRow:
    """Return ``gguf_row.cu`` on this processor (``cuda_host``), with this number of multiprocessors."""
    monkeypatch.setattr(gguf_row, "multiprocessors", lambda device: multiprocessors)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
    kernel = object.__new__(gguf_row.GGUFRow)
    kernel._launch = cuda_host.Launcher("gguf_row", "transect_gguf_row", "ppf" + "iiiii" + "p", instead)
    return kernel


def chain_source(
    monkeypatch: pytest.MonkeyPatch, kind: type[Kernel],
    instead: tuple[str, str] | None = None, multiprocessors: int = 3,
) -> Kernel:  # fmt: skip
    """Return a kind of ``chain.Chain`` on this processor, with these multiprocessors."""
    monkeypatch.setattr(chain, "multiprocessors", lambda device: multiprocessors)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
    kernel: Any = object.__new__(kind)
    kernel._held = {}
    letters = f"{kind.signature}{chain.SHARED}"
    kernel._launch = cuda_host.Launcher(kind.source, f"transect_{kind.source}", letters, instead)
    return kernel


def product_inputs(m: int, n: int, k: int) -> Inputs:
    """x ``[m, k]`` whose rows are apart, weight ``[n, k]``, bias ``[n]``: bfloat16, on the GPU."""
    generator = torch.Generator("cuda").manual_seed(m + n + k)
    x, weight, bias = (
        torch.randn(shape, device="cuda", generator=generator, dtype=torch.bfloat16)
        for shape in ((m, k + 8), (n, k), n)
    )
    torch.cuda.synchronize()
    return x[:, :k], weight * k**-0.5, bias


def int4_weight(n: int, k: int, group: int, device: str = "cpu") -> torch.Tensor:
    """A weight ``[n, k]`` as ``int4_matmul`` takes it."""
    generator = torch.Generator(device).manual_seed(n + k)
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, generator=generator, device=device)
    scale = (torch.rand(n, k // group, generator=generator, device=device) + 0.1) * k**-0.5 / 4
    return arrange_codes(codes, scale, -7.5 * scale)


def check_int4_product(
    kernel: Any, m: int, n: int, k: int, group: int, *, dependent_launch: bool, repeats: int
) -> None:
    """At most twice the error of torch's product with the weight in bfloat16, and the same bits in every run."""
    weight = int4_weight(n, k, group, "cuda")
    x, _, bias = product_inputs(m, n, k)
    want = int4_matmul.reference(x.double(), weight, n, bias.double())
    of_torch = (F.linear(x, int4_matmul.dense(weight, n, x.dtype), bias).double() - want).norm()
    got = kernel(x, weight, n, bias, dependent_launch=dependent_launch)
    assert (got.double() - want).norm() <= 2 * of_torch
    for _ in range(repeats):
        assert torch.equal(got, kernel(x, weight, n, bias, dependent_launch=dependent_launch))


def check_int4_tilings(kernel: Any, tilings: Any, clusters: Mapping[int, int], m: int) -> None:
    """``check_int4_product`` for every cut that the module ``tilings`` offers for ``m`` rows. K fills every ring more
    than once."""
    n, k = 4000, 8192
    weight = int4_weight(n, k, 128, "cuda")
    x, *_ = product_inputs(m, n, k)
    want = int4_matmul.reference(x.double(), weight, n)
    of_torch = (F.linear(x, int4_matmul.dense(weight, n, x.dtype)).double() - want).norm()
    tried = 0
    for values in itertools.product(*tilings.CHOICES.values()):
        config = dict(zip(tilings.CHOICES, values, strict=True))
        if tilings.tiling_of(config, m, n, k, 128, clusters) is not None:
            got = kernel(x, weight, n, config=config, dependent_launch=True)
            assert (got.double() - want).norm() <= 2 * of_torch, config
            assert torch.equal(got, kernel(x, weight, n, config=config)), config
            tried += 1
    assert tried > 5


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
            y = kernel(y, weights[i % 3], dependent_launch=True, **options[i % len(options)])
    graph.replay()
    first = y.clone()
    for _ in range(20):
        graph.replay()
        assert torch.equal(y, first)
    assert (first.float() - want.float()).norm() <= error * want.float().norm()
