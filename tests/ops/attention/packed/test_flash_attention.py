"""The entry of flash attention: peers compute the same thing, ``exact`` is the reference, and the CUDA C++ version."""

import shutil

import pytest
import torch
from torch import Tensor

from transect.ops.attention.packed import flash_attention as fa
from transect.ops.registry import get

HAS_CUDA_COMPILER = torch.cuda.is_available() and shutil.which("nvcc") is not None


def made(
    lengths: tuple[int, ...], heads: int, kv_heads: int, d: int, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor, Tensor, float]:
    generator = torch.Generator().manual_seed(len(lengths))
    q, k, v = (
        torch.randn(sum(lengths), h, d, generator=generator).to(device, dtype) for h in (heads, kv_heads, kv_heads)
    )
    return q, k, v, torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32).to(device), d**-0.5


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", ["torch", "unfused"])
def test_peers_compute_the_same(name: str, causal: bool) -> None:
    inputs = made((9, 9, 9), 4, 2, 16)
    torch.testing.assert_close(get("flash_attention").peers[name](*inputs, causal), fa.reference(*inputs, causal))


def test_peers_that_need_equal_documents_say_so() -> None:
    for lengths, window in (((3, 4), None), ((4, 4), 2)):
        with pytest.raises(ValueError, match="documents of one length and no window"):
            get("flash_attention").peers["unfused"](*made(lengths, 1, 1, 8), True, window)


@pytest.mark.parametrize(("causal", "window"), [(True, None), (False, 3)])
def test_exact_is_the_reference_with_its_gradient(causal: bool, window: int | None) -> None:
    q, k, v, cu, scale = made((5, 11, 1), 4, 2, 8, torch.float64)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    upstream = torch.randn(q.shape, dtype=torch.float64)
    results = []
    for compute in (fa.exact, fa.reference):
        out = compute(*leaves, cu, scale, causal, window)
        results.append((out, *torch.autograd.grad(out, leaves, upstream)))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_every_model_has_cases() -> None:
    names = [case.name for case in get("flash_attention").cases()]
    assert len(set(names)) == len(names)
    for part in ("llama-3.1-8b", "llama-3.2-1b", "qwen3-0.6b", "qwen3-8b", "1 x 16384, full", "4 x 4096, causal"):
        assert any(part in name for name in names), part


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_CUDA_COMPILER, reason="needs a CUDA GPU and nvcc")
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize(("causal", "window"), [(True, None), (False, None), (True, 50), (False, 90), (True, 1)])
def test_cuda_source_is_right(d: int, causal: bool, window: int | None) -> None:
    q, k, v, cu, scale = made((130, 1, 64, 300), 6, 2, d, torch.bfloat16, "cuda")
    exact = fa.reference(q.double(), k.double(), v.double(), cu, scale, causal, window)
    both = torch.stack((k, v), 1)
    runs = [fa.by_cuda(q, both[:, 0], both[:, 1], cu, scale, causal, window) for _ in range(4)]
    other = fa.portable(q, k, v, cu, scale, causal, window)
    error = [float((out.double() - exact).norm() / exact.norm()) for out in (runs[0], other)]
    assert error[0] <= 1.2 * error[1]
    assert all(torch.equal(run, runs[0]) for run in runs)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_CUDA_COMPILER, reason="needs a CUDA GPU and nvcc")
def test_cuda_source_says_what_it_takes() -> None:
    for d, dtype, message in ((96, torch.bfloat16, "heads of 64 or 128"), (64, torch.float16, "takes bfloat16")):
        q, k, v, cu, scale = made((5,), 1, 1, d, dtype, "cuda")
        with pytest.raises(ValueError, match=message):
            fa.by_cuda(q, k, v, cu, scale)
