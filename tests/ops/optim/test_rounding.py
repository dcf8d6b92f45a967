"""Rounding by chance: without bias, the same bits by every implementation, and sums of small steps that are kept."""

import numpy as np
import pytest
import torch

from transect.ops.lang.jit import INTERPRETED
from transect.ops.optim.adamw import AdamWStep, FusedAdamW
from transect.ops.optim.rounding import FIRST, SECOND, WEIGHT, Draws, reference, round_into, words

DRAWS = Draws(seed=3 + (7 << 40), step=5, tensor=2)


def numbers(count=5000, seed=0):
    x = torch.randn(count, generator=torch.Generator().manual_seed(seed)) * torch.logspace(-20, 20, count)
    x[:5] = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan")])
    return x


@pytest.mark.parametrize("shift", [WEIGHT, SECOND, FIRST])
def test_it_is_one_of_the_two_neighbours(shift) -> None:
    x = numbers()
    y = reference(x, DRAWS, shift=shift)
    assert y.dtype == torch.bfloat16
    below = (x.view(torch.int32) & -65536).view(torch.float32)
    above = ((x.view(torch.int32) & -65536) + 65536).view(torch.float32)
    finite = x.isfinite()
    assert ((y == below) | (y == above))[finite].all()
    assert torch.equal(y[~finite].isnan(), x[~finite].isnan()) and torch.equal(y[2:4].float(), x[2:4])
    exact = x.bfloat16().float()[finite]
    assert torch.equal(reference(exact, DRAWS, shift=shift).float(), exact)  # nothing to round: nothing changes


@pytest.mark.parametrize("share", [0.004, 0.3, 0.5, 0.97])
def test_it_has_no_bias(share) -> None:
    """The mean over n draws of chance p lies within five standard deviations sqrt(p (1 - p) / n) of p."""
    count, steps = 40_000, 5
    x = torch.full((count,), -(1.0 + share / 128))
    for shift in (WEIGHT, SECOND, FIRST):
        up = torch.stack([(reference(x, Draws(1, step, 0), shift=shift) < -1).float() for step in range(steps)])
        p, n = round(share * 65536) / 65536, count * steps
        assert abs(float(up.mean()) - p) < 5 * (p * (1 - p) / n) ** 0.5
        # neighbours, steps and tensors do not know of each other
        for a, b in ((up[0, 1:], up[0, :-1]), (up[0], up[1])):
            assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < 5 / count**0.5


@pytest.mark.parametrize("first", [0, 4, 4096])
@pytest.mark.parametrize("count", [1, 3, 128, 40_001])
def test_the_c_kernel_draws_the_same_bits(first, count) -> None:
    x = numbers(max(count, 8))[:count].contiguous()
    for shift in (WEIGHT, SECOND, FIRST):
        out = torch.empty(count, dtype=torch.bfloat16)
        round_into(out, x, DRAWS, first, shift)
        expected = reference(x, DRAWS, first, shift)
        assert torch.equal(out.isnan(), expected.isnan())
        assert torch.equal(out.nan_to_num(), expected.nan_to_num())


def test_the_words_are_those_of_the_sampler_s_generator() -> None:
    from transect.ops.lang.philox import random_words

    ids = torch.arange(40)[None]
    theirs = random_words([DRAWS.seed], [DRAWS.tensor], [DRAWS.step], ids, stream=2)
    assert np.array_equal(words(np.arange(40), DRAWS), theirs[0].numpy().astype(np.uint64))


@pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs Triton's interpreter or a GPU")
@pytest.mark.parametrize("gradients", [torch.bfloat16, torch.float32])
def test_the_fused_step_draws_the_same_bits(gradients) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(0)

    def some(size, dtype=torch.bfloat16):
        return torch.randn(size, generator=generator).to(dtype).to(device)

    sizes, own = (5000, 7), (4, 1)
    w, m, v = [some(n) for n in sizes], [some(n) for n in sizes], [some(n).square() for n in sizes]
    g = [some(n, gradients) for n in sizes]
    before = [[t.float().clone() for t in part] for part in (w, m, v)]
    fused = FusedAdamW(w, m, v, [0.1, 0.0], chance=True, numbers=own)
    rate = 0.01
    step = AdamWStep(rate, 0.9, 0.95, 1e-8, 0.1, 0.2, seed=DRAWS.seed, number=1)
    fused.step(g, step, torch.tensor(0.5, device=device))
    for i, (decay, tensor) in enumerate(zip((0.1, 0.0), own, strict=True)):
        old_w, old_m, old_v = (part[i] for part in before)
        gradient = g[i].float() * 0.5
        new_m = old_m + (1 - 0.9) * (gradient - old_m)
        new_v = 0.95 * old_v + (1 - 0.95) * gradient * gradient
        new_w = old_w * (1 - rate * decay) - rate / 0.1 * (new_m / (new_v.sqrt() / 0.2 + 1e-8))
        draws = Draws(DRAWS.seed, 1, tensor)
        for found, exact, shift in ((w[i], new_w, WEIGHT), (m[i], new_m, FIRST), (v[i], new_v, SECOND)):
            expected = reference(exact.cpu(), draws, shift=shift)
            # The float32 before rounding may differ in its last place, which turns few of the draws.
            assert (found.cpu() != expected).float().mean() < 0.01


def test_the_fused_step_refuses_what_cannot_be_rounded_so() -> None:
    if not INTERPRETED and not torch.cuda.is_available():
        pytest.skip("needs Triton's interpreter or a GPU")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    one = [torch.zeros(16, device=device)]
    with pytest.raises(ValueError, match="in bfloat16 without master copies"):
        FusedAdamW(one, one, one, [0.0], chance=True)
