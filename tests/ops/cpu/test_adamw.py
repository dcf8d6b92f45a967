"""AdamW on states in host memory: against float64, for any cut and team; gradients taken in."""

import math

import pytest
import torch

from transect.ops.cpu.adamw import HostKernels, HostStep, TorchKernels, corrections, host_kernels

SIZES = (1, 15, 16, 37, 16384, 16384 * 3 + 7)


@pytest.fixture(scope="module")
def kernels(library):
    return HostKernels(library)


def numbers(size, seed, dtype=torch.float32):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def a_step(steps=3, scale=0.7):
    return HostStep(0.01, 0.9, 0.95, 1e-8, *corrections(0.9, 0.95, steps), scale)


def in_float64(g, w, m, v, step, decay):
    g, w, m, v = (t.double() for t in (g, w, m, v))
    g = g * step.scale
    m = m + (1 - step.beta1) * (g - m)
    v = step.beta2 * v + (1 - step.beta2) * g * g
    w = w * (1 - step.rate * decay) - step.rate / step.correction1 * m / (v.sqrt() / step.correction2 + step.eps)
    return w, m, v


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", SIZES)
def test_a_step_is_that_of_float64(kernels, size, kind):
    for made in (kernels, TorchKernels()):
        g, w, m, v = numbers(size, 0, kind), numbers(size, 1), numbers(size, 2), numbers(size, 3).square()
        expected = in_float64(g, w, m, v, a_step(), 0.1)
        out = torch.empty(size, dtype=kind)
        made.step(g, w, m, v, out, a_step(), 0.1)
        for ours, exact in zip((w, m, v), expected, strict=True):
            torch.testing.assert_close(ours.double(), exact, rtol=4e-7, atol=6e-7)
        assert torch.equal(out, w.to(kind))


def test_results_do_not_depend_on_how_numbers_are_cut_or_on_the_team():
    size = SIZES[-1]
    whole, cut = ([numbers(size, seed) for seed in range(3)] + [numbers(size, 3).square()] for _ in range(2))
    host_kernels(1).step(*whole, None, a_step(), 0.1)
    team = host_kernels(3)
    for begin, end in ((0, 5), (5, 20001), (20001, size)):
        team.step(*(t[begin:end] for t in cut), None, a_step(), 0.1)
    assert all(torch.equal(one, other) for one, other in zip(whole, cut, strict=True))


def test_infinite_and_missing_numbers_stay_visible(kernels):
    g = torch.tensor([math.nan, math.inf, 1.0])
    w, m, v, out = torch.ones(3), torch.zeros(3), torch.zeros(3), torch.empty(3, dtype=torch.bfloat16)
    kernels.step(g, w, m, v, out, a_step(), 0.0)
    assert w[0].isnan() and not w[1].isfinite() and w[2].isfinite()
    assert math.isnan(kernels.take_in(g, torch.zeros(3), False))


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("into", [torch.float32, torch.bfloat16])
def test_gradients_are_taken_in(kernels, source, into):
    for size in SIZES:
        first, second = numbers(size, 0, source), numbers(size, 1, source)
        for made in (kernels, TorchKernels()):
            held = torch.full((size,), 9.0, dtype=into)
            square = made.take_in(first, held, False)
            assert torch.equal(held, first.to(into)) or into == torch.bfloat16
            if source == into:
                assert square == pytest.approx(float(first.double().square().sum()), rel=1e-6)
            made.take_in(second, held, True)
            expected = (first.to(into).float() + second.float()).to(into)
            assert torch.equal(held, expected)


def test_the_sum_of_squares_is_the_same_for_any_team():
    g = numbers(SIZES[-1], 0, torch.bfloat16)
    assert len({host_kernels(team).take_in(g, torch.empty_like(g), False) for team in (1, 2, 3)}) == 1


def test_what_it_cannot_take_is_refused(kernels):
    w = torch.zeros(8)
    with pytest.raises(ValueError, match="float32 or bfloat16, not"):
        kernels.step(torch.zeros(8, dtype=torch.float16), w, w, w, None, a_step(), 0.0)
    with pytest.raises(ValueError, match="contiguous tensors of one size"):
        kernels.step(torch.zeros(7), w, w, w, None, a_step(), 0.0)
    with pytest.raises(ValueError, match="contiguous tensors of one size"):
        kernels.take_in(torch.zeros(16)[::2], w, False)
    with pytest.raises(ValueError, match="float32 states"):
        kernels.step(w, w.bfloat16(), w, w, None, a_step(), 0.0)
