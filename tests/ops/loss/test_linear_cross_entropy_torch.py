"""The chunked loss in plain torch is torch's own, with its gradients, for every chunk size and frozen part."""

import pytest
import torch
import torch.nn.functional as F

from transect.ops.loss import linear_cross_entropy_torch as module


@pytest.mark.parametrize("chunk", [1, 37 * 4, 2**20])
@pytest.mark.parametrize(("x_grad", "weight_grad"), [(True, True), (True, False), (False, True), (False, False)])
def test_loss_and_gradients(monkeypatch, chunk: int, x_grad: bool, weight_grad: bool) -> None:
    monkeypatch.setattr(module, "LOSS_ELEMENTS", chunk)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(23, 8, generator=generator, dtype=torch.float64, requires_grad=x_grad)
    weight = torch.randn(37, 8, generator=generator, dtype=torch.float64, requires_grad=weight_grad)
    target = torch.randint(0, 37, (23,), generator=generator)
    target[::4] = -100
    ours = module.linear_cross_entropy(x, weight, target)
    theirs = F.cross_entropy(x @ weight.T, target)
    torch.testing.assert_close(ours, theirs)
    wanted = [tensor for tensor in (x, weight) if tensor.requires_grad]
    if wanted:
        scale = 0.37
        ours_grad = torch.autograd.grad(ours * scale, wanted)
        theirs_grad = torch.autograd.grad(theirs * scale, wanted)
        for a, b in zip(ours_grad, theirs_grad, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("chunk", [37 * 4, 2**20])
def test_capped_logits(monkeypatch, chunk: int) -> None:
    """The caps bend most logits: their slopes show in both gradients."""
    monkeypatch.setattr(module, "LOSS_ELEMENTS", chunk)
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 8, generator=generator, dtype=torch.float64, requires_grad=True) for n in (23, 37))
    target = torch.randint(0, 37, (23,), generator=generator)
    target[::4] = -100
    ours = module.linear_cross_entropy(x, weight, target, softcap=2.0)
    theirs = F.cross_entropy(2 * torch.tanh(x @ weight.T / 2), target)
    torch.testing.assert_close(ours, theirs)
    for a, b in zip(*(torch.autograd.grad(0.37 * loss, (x, weight)) for loss in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b)


def test_nothing_to_learn_from_is_nan() -> None:
    loss = module.linear_cross_entropy(torch.ones(2, 3), torch.ones(4, 3), torch.full((2,), -100))
    assert loss.isnan()
