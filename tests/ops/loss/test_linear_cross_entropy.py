"""The fused loss: upstream gradients in place, only what is asked for, one backward pass a graph."""

from __future__ import annotations

import pytest
import torch
from effort import quick_first
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from transect.ops.lang.jit import INTERPRETED
from transect.ops.loss import linear_cross_entropy as module
from transect.ops.numerics import sample
from transect.ops.registry import get
from transect.ops.tools import search

pytestmark = [
    pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs the interpreter or a GPU"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
DEVICE = "cpu" if INTERPRETED else "cuda"


def inputs(tokens: int = 20, vocab: int = 150, dim: int = 16) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    target = torch.randint(0, vocab, (tokens,), generator=torch.Generator().manual_seed(1))
    target[::5] = module.IGNORE
    return sample(tokens, dim).to(DEVICE), sample(vocab, dim, seed=1).to(DEVICE), target.to(DEVICE)


def gradients(loss: torch.Tensor, scale: float, leaves: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(loss * scale, leaves)


@pytest.mark.parametrize("scale", quick_first([-3.0, 0.0, 0.125, 1.0], 1))
def test_upstream_gradient(scale: float) -> None:
    x, weight, target = inputs()
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    ours = gradients(module.linear_cross_entropy_autograd(x, weight, target), scale, leaves)
    theirs = gradients(module.reference(x, weight, target), scale, leaves)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("of_x", "of_weight"), [(True, False), (False, True)])
def test_only_the_gradients_that_are_wanted(of_x: bool, of_weight: bool) -> None:
    x, weight, target = inputs()
    x.requires_grad_(of_x)
    weight.requires_grad_(of_weight)
    leaf = x if of_x else weight
    (ours,) = gradients(module.linear_cross_entropy_autograd(x, weight, target), 0.5, [leaf])
    (theirs,) = gradients(module.reference(x, weight, target), 0.5, [leaf])
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    _, dx, dw = module.loss_and_gradients(x, weight, target, module.IGNORE, of_x, of_weight)
    assert (dx.numel() > 0, dw.numel() > 0) == (of_x, of_weight)


def test_chunks_add_up_and_may_be_uneven() -> None:
    x, weight, target = inputs(tokens=23)
    whole = module.loss_and_gradients(x, weight, target, module.IGNORE, True, True)
    parts = module.loss_and_gradients(x, weight, target, module.IGNORE, True, True, module.LossTiling(chunk=8))
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("library", quick_first(["z dx dw", "z", "dx", "dw"], 1))
def test_products_may_be_left_to_torch(library: str) -> None:
    x, weight, target = inputs(tokens=23)
    whole = module.loss_and_gradients(x, weight, target, module.IGNORE, True, True, module.LossTiling())
    tiling = module.LossTiling(chunk=8, library=library)
    for one, other in zip(
        whole, module.loss_and_gradients(x, weight, target, module.IGNORE, True, True, tiling), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dim", quick_first([2048, 1024, 4096], 1))
def test_knobs(dim: int) -> None:
    (knobs,) = get("linear_cross_entropy").knobs()
    size = (8192, 128256, dim)
    default, others = search.configurations(knobs, size)
    assert knobs.valid is not None
    assert knobs.valid(default, size)
    assert len(others) > 20
    x, weight, target = inputs(tokens=23)
    given = {"x": x, "weight": weight, "target": target}
    whole = module.loss_and_gradients(x, weight, target, module.IGNORE, True, True)
    for config in (default, others[0]):
        for one, other in zip(whole, knobs.launch(**given, config=config), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_no_token_and_no_token_that_counts() -> None:
    x, weight, target = inputs()
    for part in (slice(0, 0), slice(0, 1)):  # the first target is ignored
        loss, dx, dw = module.loss_and_gradients(x[part], weight, target[part], module.IGNORE, True, True)
        assert float(loss) == 0.0
        assert not dx.any() and not dw.any()


def test_a_second_backward_pass_is_refused() -> None:
    x, weight, target = inputs()
    loss = module.linear_cross_entropy_autograd(x.requires_grad_(), weight, target) * 2.0
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="used up by the first backward pass"):
        loss.backward()


def test_autograd_takes_the_gradients_over_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """``weight.grad`` is the memory that the forward pass filled: a copy would be the largest tensor of the step."""
    x, weight, target = inputs()
    made = []
    scale = module.scale_in_place
    monkeypatch.setattr(
        module, "scale_in_place", lambda values, g: (made.append(values.data_ptr()), scale(values, g))[1]
    )
    module.linear_cross_entropy_autograd(x.requires_grad_(), weight.requires_grad_(), target).backward()
    assert x.grad is not None and weight.grad is not None
    assert made == [x.grad.data_ptr(), weight.grad.data_ptr()]


def test_the_backward_pass_makes_no_tensor_as_large_as_a_gradient() -> None:
    """Not even the zeros that autograd hands in for outputs that have no gradient of their own."""

    class Sizes(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.bytes: list[int] = []

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = function(*args, **(kwargs or {}))
            before = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
            if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() not in before:
                self.bytes.append(out.nbytes)
            return out

    x, weight, target = inputs()
    loss = module.linear_cross_entropy_autograd(x.requires_grad_(), weight.requires_grad_(), target)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "scale_in_place", lambda values, g: None)  # the interpreter copies what a kernel is given
        with Sizes() as made:
            torch.autograd.grad(loss, [x, weight])
    assert max(made.bytes, default=0) < x.nbytes
