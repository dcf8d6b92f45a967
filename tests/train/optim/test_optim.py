"""Optimizers against torch's, against their formulas, and their state in and out."""

import pytest
import torch
from torch import nn

from transect.ops.lang.jit import INTERPRETED
from transect.ops.optim.adamw import AdamWStep, FusedAdamW
from transect.train.config import OptimizerConfig
from transect.train.optim import build
from transect.train.optim.adamw import AdamW
from transect.train.optim.adamw8bit import AdamW8bit, decode_positive, decode_signed, encode_positive, encode_signed
from transect.train.optim.muon import Muon, orthogonal


def parameters(dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embed.weight": (30, 20), "layers.0.q.weight": (96, 64), "layers.0.norm.weight": (20,)}
    return {n: nn.Parameter(torch.randn(*s, generator=generator).to(dtype)) for n, s in shapes.items()}


def give_gradients(params, step):
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in params.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.device, parameter.dtype)


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_adamw_is_torch_s(decay: float) -> None:
    ours, theirs = parameters(), parameters()
    config = OptimizerConfig(learning_rate=0.01, weight_decay=decay)
    optimizer = AdamW(config, ours)
    matrices = [p for p in theirs.values() if p.ndim > 1]
    vectors = [p for p in theirs.values() if p.ndim == 1]
    reference = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=0.01, betas=(0.9, 0.95), eps=1e-8, foreach=False,
    )  # fmt: skip
    for step in range(20):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        optimizer.step()
        reference.step()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["adamw", "adamw8bit", "lamb", "muon"])
def test_master_weights_are_a_float32_run_rounded(name: str) -> None:
    config = OptimizerConfig(name=name, learning_rate=1e-4, muon_learning_rate=1e-4)
    half, full = parameters(torch.bfloat16), parameters(torch.bfloat16)
    full = {n: nn.Parameter(p.detach().float()) for n, p in full.items()}
    mixed, plain = build(config, half, master_weights=True), build(config, full)
    for step in range(10):
        give_gradients(half, step)
        for n, p in full.items():
            p.grad = half[n].grad.float()
        mixed.step()
        plain.step()
    for n, p in full.items():
        assert torch.equal(half[n], p.to(torch.bfloat16))


def test_eight_bit_codes_keep_small_and_large_numbers() -> None:
    x = torch.cat([torch.logspace(-4, 0, 128), -torch.logspace(-4, 0, 128)])[None]
    scale = torch.zeros(1, 1)
    codes = encode_signed(x.clone(), scale)
    back = decode_signed(codes, scale)
    assert codes.dtype == torch.int8 and float(scale) == 1
    large = x.abs() > 0.01
    assert float(((back - x) / x)[large].abs().max()) < 0.1
    v = torch.logspace(-8, 0, 256)[None]
    v[0, 0] = 0
    back = decode_positive(encode_positive(v, scale), scale)
    assert float(back[0, 0]) == 0 and bool((back[0, 1:] > 0).all())
    assert float(((back - v) / v)[v > 1e-4].abs().max()) < 0.1
    zeros = torch.zeros(1, 256)
    assert bool((decode_signed(encode_signed(zeros, scale), scale) == 0).all())
    assert bool((decode_positive(encode_positive(zeros, scale), scale) == 0).all())


def test_eight_bit_adamw_follows_adamw_with_a_quarter_of_the_state() -> None:
    ours, full = parameters(), parameters()
    config = OptimizerConfig(learning_rate=0.01, weight_decay=0.0)
    small, large = AdamW8bit(config, ours), AdamW(config, full)
    start = {n: p.detach().clone() for n, p in full.items()}
    for step in range(30):
        give_gradients(ours, step)
        give_gradients(full, step)
        small.step()
        large.step()
    name = "layers.0.q.weight"
    moved = full[name] - start[name]
    assert float((ours[name] - full[name]).detach().norm() / moved.norm()) < 0.1
    state = small.state[name]
    assert sum(t.nbytes for t in state.values()) < 0.27 * sum(t.nbytes for t in large.state[name].values())
    assert small.state["layers.0.norm.weight"]["m"].dtype == torch.float32  # small ones stay exact


def test_lamb_is_its_formula() -> None:
    """Beside the paper's algorithm in float64, with weights and gradients that are nought among them."""
    ours = parameters()
    ours["layers.0.q.weight"].data[0] = 0
    exact = {n: p.detach().double().clone() for n, p in ours.items()}
    m, v = ({n: torch.zeros_like(p) for n, p in exact.items()} for _ in range(2))
    rate, b1, b2, eps, decay = 0.01, 0.9, 0.95, 1e-8, 0.1
    optimizer = build(OptimizerConfig(name="lamb", learning_rate=rate, weight_decay=decay), ours)
    for step in range(1, 21):
        give_gradients(ours, step)
        for n, w in exact.items():
            g = ours[n].grad.double()
            m[n] = b1 * m[n] + (1 - b1) * g
            v[n] = b2 * v[n] + (1 - b2) * g * g
            r = (m[n] / (1 - b1**step)) / ((v[n] / (1 - b2**step)).sqrt() + eps)
            if w.ndim < 2:
                exact[n] = w - rate * r
                continue
            r = r + decay * w
            trust = w.norm() / r.norm() if w.norm() > 0 and r.norm() > 0 else 1.0
            exact[n] = w - rate * trust * r
        optimizer.step()
    for n in exact:
        torch.testing.assert_close(ours[n].detach().double(), exact[n], rtol=1e-4, atol=1e-6)


def test_lamb_moves_each_matrix_in_proportion_to_it() -> None:
    """However large its gradient; a matrix of noughts moves all the same."""
    moved = []
    for size, gradient in ((1.0, 1e-3), (100.0, 1e3), (0.0, 1.0)):
        weight = nn.Parameter(torch.full((8, 8), size))
        weight.grad = torch.full((8, 8), gradient)
        build(OptimizerConfig(name="lamb", learning_rate=0.01, weight_decay=0.0), {"w": weight}).step()
        moved.append(float((size - weight.detach()).mean()))
    assert moved == pytest.approx([0.01, 1.0, 0.01], rel=1e-4)


def test_muon_orthogonalizes() -> None:
    for shape in ((40, 64), (64, 40), (32, 32)):
        x = torch.randn(*shape, generator=torch.Generator().manual_seed(1))
        values = torch.linalg.svdvals(orthogonal(x))
        assert float(values.min()) > 0.3 and float(values.max()) < 1.3
    params = parameters()
    optimizer = Muon(OptimizerConfig(name="muon"), params)
    assert set(optimizer.state["layers.0.q.weight"]) == {"momentum"}
    assert set(optimizer.state["embed.weight"]) == {"m", "v"}


def test_norm_and_clipping_are_torch_s() -> None:
    ours, theirs = parameters(), parameters()
    give_gradients(ours, 0)
    give_gradients(theirs, 0)
    optimizer = AdamW(OptimizerConfig(weight_decay=0.0), ours)
    norm = optimizer.gradient_norm()
    expected = torch.nn.utils.clip_grad_norm_(theirs.values(), 1.5)
    torch.testing.assert_close(norm, expected)
    optimizer.step(1.0, optimizer.clip_scale(norm, 1.5))
    for name in ours:
        torch.testing.assert_close(ours[name].grad, theirs[name].grad)
    assert float(optimizer.clip_scale(torch.tensor(0.5), 1.5)) == 1.0


ONE_PLACE = 2**-7 * 10 * 0.005
"""One place of eight bits of what ten steps of 0.005 add up to: a weight that ends near zero was so much larger when it
was rounded."""


def rounded_once(weights, m, v, step, rate, clip):
    """One step in float64 from what is stored; weight and moments rounded to bfloat16 at its end alone."""
    generator = torch.Generator().manual_seed(100 + step)
    for name, weight in weights.items():
        g = torch.randn(weight.shape, generator=generator).bfloat16().double() * clip
        new_m = 0.9 * m[name].double() + (1 - 0.9) * g
        new_v = 0.95 * v[name].double() + (1 - 0.95) * g * g
        change = new_m / (1 - 0.9 ** (step + 1)) / ((new_v / (1 - 0.95 ** (step + 1))).sqrt() + 1e-8)
        decay = 1 - rate * 0.1 if weight.ndim > 1 else 1.0
        weights[name] = (weight.double() * decay - rate * change).bfloat16()
        m[name], v[name] = new_m.bfloat16(), new_v.bfloat16()


@pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(
        not torch.cuda.is_available(), reason="the fused launch needs a GPU")])],
)  # fmt: skip
def test_in_16_bits_a_step_rounds_once(device: str) -> None:
    config = OptimizerConfig(learning_rate=0.01, weight_decay=0.1, rounding="nearest")
    ours = {n: nn.Parameter(p.detach().to(device)) for n, p in parameters(torch.bfloat16).items()}
    optimizer = AdamW(config, ours)
    expected = {n: p.detach().cpu().clone() for n, p in ours.items()}
    m = {n: torch.zeros_like(p) for n, p in expected.items()}
    v = {n: torch.zeros_like(p) for n, p in expected.items()}
    for step in range(10):
        give_gradients(ours, step)
        optimizer.step(0.5, torch.tensor(0.3, device=device))  # a clipped gradient is rounded by no one
        rounded_once(expected, m, v, step, 0.005, 0.3)
    for name, weight in expected.items():
        # In float32 a sum may fall on the other side of a rounding's border: rarely, by one place of eight bits.
        found = ours[name].detach().cpu()
        assert (found != weight).float().mean() < 0.01, name
        torch.testing.assert_close(found, weight, rtol=2**-7, atol=ONE_PLACE)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="the fused launch needs a GPU")
@pytest.mark.parametrize(("dtype", "master"), [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)])
def test_the_fused_launch_is_the_loop(dtype, master: bool) -> None:
    config = OptimizerConfig(learning_rate=0.01, weight_decay=0.1, rounding="nearest")
    on_cpu = parameters(dtype)
    on_gpu = {name: nn.Parameter(p.detach().cuda()) for name, p in on_cpu.items()}
    loop, fused = (AdamW(config, p, master_weights=master) for p in (on_cpu, on_gpu))
    for step in range(10):
        give_gradients(on_cpu, step)
        for name, p in on_gpu.items():
            p.grad = on_cpu[name].grad.cuda()
        loop.step(0.5, torch.tensor(0.5))
        fused.step(0.5, torch.tensor(0.5, device="cuda"))
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2**-7, "atol": ONE_PLACE}
    for name in on_cpu:
        torch.testing.assert_close(on_gpu[name].cpu(), on_cpu[name], **tolerance)


@pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs Triton's interpreter or a GPU")
def test_a_scale_that_is_not_a_number_changes_nothing() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    weight, m, v = (torch.full((40,), value, device=device) for value in (1.0, 0.5, 0.25))
    fused = FusedAdamW([weight], [m], [v], [0.1])
    numbers = AdamWStep(0.01, 0.9, 0.95, 1e-8, 0.1, 0.2)
    fused.step([torch.full_like(weight, float("inf"))], numbers, torch.tensor(float("nan"), device=device))
    assert (weight == 1.0).all() and (m == 0.5).all() and (v == 0.25).all()
    fused.step([torch.ones_like(weight)], numbers, torch.tensor(1.0, device=device))
    assert (weight < 1.0).all() and (m > 0.5).all()


@pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs Triton's interpreter or a GPU")
def test_the_norm_of_one_launch_is_that_of_all_gradients() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(*shape, generator=generator).to(device) for shape in ((30, 200), (7,), (4096,))]
    likes = [torch.zeros_like(g) for g in gradients]
    fused = FusedAdamW(likes, [g.clone() for g in likes], [g.clone() for g in likes], [0.0] * 3)
    expected = torch.cat([g.flatten() for g in gradients]).norm()
    torch.testing.assert_close(fused.norm(gradients), expected)
    gradients[1][3] = float("inf")
    assert not fused.norm(gradients).isfinite()


@pytest.mark.parametrize("name", ["adamw", "adamw8bit", "muon"])
def test_steps_too_small_for_16_bits_are_kept_on_average(name: str) -> None:
    moved = {}
    for rounding in ("stochastic", "nearest"):
        weight = nn.Parameter(torch.full((64, 128), 1.5, dtype=torch.bfloat16))
        config = OptimizerConfig(
            name=name, learning_rate=2e-5, muon_learning_rate=2e-5, weight_decay=0.0, rounding=rounding
        )
        optimizer = build(config, {"layers.0.q.weight": weight}, seed=4)
        generator = torch.Generator().manual_seed(0)
        for _ in range(20):
            weight.grad = (1 + 0.1 * torch.randn(weight.shape, generator=generator)).bfloat16()
            optimizer.step()
        moved[rounding] = float((1.5 - weight.detach().float()).mean())
    assert moved["nearest"] == 0  # what every step would lose
    if name != "muon":  # AdamW's step is its learning rate; a draw is 2**-7 or 0, so the mean has this deviation
        assert moved["stochastic"] == pytest.approx(20 * 2e-5, abs=5 * (20 * 2e-5 * 2**-7 / 8192) ** 0.5)
    else:
        assert moved["stochastic"] > 0


def test_gradients_of_micro_batches_add_up_in_float32() -> None:
    weight = nn.Parameter(torch.zeros(2, 2, dtype=torch.bfloat16))
    optimizer = AdamW(OptimizerConfig(), {"w": weight})
    for value in [1.0, *[2.0**-9] * 256]:  # in bfloat16, 1 + 2**-9 is 1
        weight.grad = torch.full_like(weight, value)
        optimizer.gather()
    (total,) = optimizer.gradients().values()
    assert total.dtype == torch.float32 and torch.equal(total, torch.full((2, 2), 1.5))
    assert float(optimizer.gradient_norm()) == 3.0 and weight.grad is None
    optimizer.zero_grad()
    assert not optimizer.gradients()


@pytest.mark.parametrize("name", ["adamw", "adamw8bit", "lamb", "muon"])
def test_state_comes_back(name: str) -> None:
    config = OptimizerConfig(name=name)
    one, two = parameters(), parameters()
    first, second = build(config, one), build(config, two)
    for step in range(3):
        give_gradients(one, step)
        first.step()
    for n in one:
        two[n].data.copy_(one[n].data)
    second.load_state_tensors({k: t.clone() for k, t in first.state_tensors().items()}, first.steps)
    give_gradients(one, 9)
    give_gradients(two, 9)
    first.step()
    second.step()
    assert all(torch.equal(one[n], two[n]) for n in one)


def test_a_foreign_state_is_refused() -> None:
    optimizer = AdamW(OptimizerConfig(), parameters())
    tensors = optimizer.state_tensors()
    with pytest.raises(ValueError, match="of another run"):
        optimizer.load_state_tensors({"x/m": torch.zeros(1)}, 1)
    name = next(iter(tensors))
    with pytest.raises(ValueError, match="this run's"):
        optimizer.load_state_tensors({**tensors, name: torch.zeros(1)}, 1)


def test_nothing_to_train_is_an_error() -> None:
    with pytest.raises(ValueError, match="every parameter is frozen"):
        AdamW(OptimizerConfig(), {})
