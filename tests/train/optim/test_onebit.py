"""Optimizers whose ranks exchange signs: against the formulas in plain torch, and what they send."""

import itertools
import math

import pytest
import torch
from thread_group import on_threads

from transect.parallel.compressed import CHUNK, SignSums, decode, encode, full_sum_bytes
from transect.train.config import OptimizerConfig
from transect.train.optim import build
from transect.train.optim.zero_one import VARIANCE_STEPS, learns_variance

SHAPES = {"layers.0.mlp.up.weight": (24, 40), "norm.weight": (33,)}
CPU = torch.device("cpu")


def gradients_of(steps, ranks):
    generator = torch.Generator().manual_seed(1)
    return [
        [
            {name: torch.randn(shape, generator=generator) / ranks for name, shape in SHAPES.items()}
            for _ in range(ranks)
        ]
        for _ in range(steps)
    ]


def first_weights():
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def trained(group, config, every, owned=None, dtype=torch.float32):
    """Weights of one rank after all steps; ``owned``: names that it updates (ZeRO 1)."""
    parameters = {name: torch.nn.Parameter(weight.to(dtype)) for name, weight in first_weights().items()}
    mine = {n: p for n, p in parameters.items() if owned is None or n in owned[group.rank]}
    made = build(config, mine, shapes=SHAPES, master_weights=dtype != torch.float32)
    made.connect(group, parameters)
    for ranks in every:
        own = ranks[group.rank]
        if made.compresses:
            made.give(own)
        else:  # what the trainer's sum gives
            whole = {name: group.all_reduce(own[name].clone()) for name in own}
            made.give({name: whole[name] for name in mine})
        made.step()
        for name in parameters if owned is not None else ():  # weights travel whole
            who = next(rank for rank, names in enumerate(owned) if name in names)
            parameters[name].data = group.all_gather(parameters[name].data)[who]
    made.settle()
    return {name: p.detach().float() for name, p in parameters.items()}, made


# The plain reference: lists of ranks, one loop, nothing shared with the code


def plain_signs(x):
    """Each chunk's signs times its mean magnitude."""
    out = torch.empty_like(x)
    for start in range(0, len(x), CHUNK):
        part = x[start : start + CHUNK]
        out[start : start + CHUNK] = torch.where(part >= 0, 1.0, -1.0) * part.abs().mean()
    return out


class PlainSums:
    def __init__(self, numbers, ranks):
        self.numbers, self.ranks = numbers, ranks
        self.each = math.ceil(numbers / (ranks * CHUNK)) * CHUNK
        self.owed = [torch.zeros(self.each * ranks) for _ in range(ranks)]
        self.owed_sum = [torch.zeros(self.each) for _ in range(ranks)]

    def sum(self, xs):
        sent = []
        for rank, x in enumerate(xs):
            whole = torch.cat([x, torch.zeros(self.each * self.ranks - self.numbers)]) + self.owed[rank]
            sent.append(plain_signs(whole))
            self.owed[rank] = whole - sent[-1]
        parts = []
        for rank in range(self.ranks):
            part = sum(c[rank * self.each : (rank + 1) * self.each] for c in sent) + self.owed_sum[rank]
            parts.append(plain_signs(part))
            self.owed_sum[rank] = part - parts[-1]
        return torch.cat(parts)[: self.numbers]


def plain_onebit_adam(config, every):
    ranks, names = len(every[0]), list(SHAPES)
    flat = torch.cat([w.reshape(-1) for w in first_weights().values()])
    decays = torch.cat([torch.full((math.prod(s),), config.weight_decay * (len(s) > 1)) for s in SHAPES.values()])
    m, v = torch.zeros_like(flat), torch.zeros_like(flat)
    sums = PlainSums(len(flat), ranks)
    for t, step in enumerate(every, 1):
        gs = [torch.cat([g[name].reshape(-1) for name in names]) for g in step]
        flat *= 1 - config.learning_rate * decays
        if t <= config.freeze_step:
            g = sum(gs)
            m = config.beta1 * m + (1 - config.beta1) * g
            v = config.beta2 * v + (1 - config.beta2) * g * g
        root = (v / (1 - config.beta2 ** min(t, config.freeze_step))).sqrt() + config.eps
        if t > config.freeze_step:
            m = root * sums.sum([(config.beta1 * m / ranks + (1 - config.beta1) * g) / root for g in gs])
        flat -= config.learning_rate * m / (1 - config.beta1**t) / root
    return {name: part.view(SHAPES[name]) for name, part in zip(names, flat.split([960, 33]), strict=True)}


def settings(name, **changes):
    return OptimizerConfig(name=name, learning_rate=0.01, freeze_step=4, **changes)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_onebit_adam_is_its_formula(ranks):
    config, every = settings("onebit_adam"), gradients_of(12, ranks)
    expected = plain_onebit_adam(config, every)
    results = on_threads(ranks, lambda group: trained(group, config, every)[0])
    for found in results:
        for name, weight in expected.items():
            torch.testing.assert_close(found[name], weight, rtol=1e-4, atol=1e-5)
    assert all(torch.equal(results[0][name], found[name]) for found in results for name in SHAPES)


def test_onebit_adam_with_a_cut_state_is_the_same():
    """ZeRO 1: each rank has the state of one parameter."""
    config, every = settings("onebit_adam"), gradients_of(10, 2)
    owned = [{"layers.0.mlp.up.weight"}, {"norm.weight"}]
    whole = on_threads(2, lambda group: trained(group, config, every)[0])[0]
    for found, made in on_threads(2, lambda group: trained(group, config, every, owned)):
        assert len(made.state) == 1
        for name in SHAPES:
            torch.testing.assert_close(found[name], whole[name], rtol=1e-5, atol=1e-6)


def test_onebit_adam_in_bfloat16_follows_float32():
    config, every = settings("onebit_adam"), gradients_of(10, 2)
    wide = on_threads(2, lambda group: trained(group, config, every)[0])[0]
    narrow = on_threads(2, lambda group: trained(group, config, every, dtype=torch.bfloat16)[0])[0]
    for name in SHAPES:
        torch.testing.assert_close(narrow[name], wide[name], rtol=2e-2, atol=2e-2)


def test_a_number_without_gradients_is_left_alone():
    config, every = settings("onebit_adam", weight_decay=0.0), gradients_of(8, 2)
    for step in every:
        for given in step:
            given["norm.weight"][:5] = 0
    found = on_threads(2, lambda group: trained(group, config, every)[0])[0]
    assert torch.equal(found["norm.weight"][:5], first_weights()["norm.weight"][:5])


def test_what_is_sent_is_a_twenty_eighth_of_a_sum_in_float32():
    numbers = 64 * CHUNK

    def work(group):
        sums = SignSums(group, numbers, CPU)
        for _ in range(3):
            sums.sum(torch.randn(numbers))
        return sums.sent / 3

    for sent in on_threads(2, work):
        assert sent == 2 * (numbers // 8 + 4 * numbers // CHUNK) // 2
        assert full_sum_bytes(numbers, 2) / sent == pytest.approx(32 / 1.125)


def test_errors_are_made_good():
    """The mean of many sums of the same vectors comes as near to their sum as one pleases."""
    numbers = 2 * CHUNK + 17
    xs = [torch.randn(numbers, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]

    def work(group):
        sums = SignSums(group, numbers, CPU)
        return torch.stack([sums.sum(xs[group.rank]) for _ in range(400)])

    found = on_threads(2, work)
    assert torch.equal(found[0], found[1])
    wanted = xs[0] + xs[1]
    off = [(found[0][:steps].mean(0) - wanted).abs().mean() for steps in (1, 40, 400)]
    assert off[2] < off[1] / 3 < off[0] / 9


def test_codes_are_signs_and_scales():
    x = torch.randn(2 * CHUNK)
    codes, scales = encode(x)
    assert codes.dtype == torch.uint8 and codes.numel() == CHUNK // 4 and scales.numel() == 2
    torch.testing.assert_close(decode(codes, scales), plain_signs(x))


def test_onebit_lamb_is_its_formula():
    config, every = settings("onebit_lamb"), gradients_of(9, 2)
    name, c = "layers.0.mlp.up.weight", config
    w, shape = first_weights()[name], SHAPES[name]
    m, v, vector, v_vector = torch.zeros(shape), torch.zeros(shape), torch.zeros(33), torch.zeros(33)
    ratio, stretch, sums = 0.0, 1.0, PlainSums(993, 2)
    for t, step in enumerate(every, 1):
        before = m
        if t <= c.freeze_step:
            g = step[0][name] + step[1][name]
            m, v = c.beta1 * m + (1 - c.beta1) * g, c.beta2 * v + (1 - c.beta2) * g * g
            of_vector = step[0]["norm.weight"] + step[1]["norm.weight"]
            vector = c.beta1 * vector + (1 - c.beta1) * of_vector
            v_vector = c.beta2 * v_vector + (1 - c.beta2) * of_vector**2
            r = m / (1 - c.beta1**t) / ((v / (1 - c.beta2**t)).sqrt() + c.eps) + c.weight_decay * w
            now = w.norm() / r.norm()
            ratio = 0.9 * ratio + 0.1 * float(now)
            frozen = v.clone()
            w = w - c.learning_rate * now * r
            continue
        both = torch.cat([m.reshape(-1), vector])
        own = [torch.cat([g[n].reshape(-1) for n in SHAPES]) for g in step]
        roots = (torch.cat([frozen.reshape(-1), v_vector]) / (1 - c.beta2**c.freeze_step)).sqrt() + c.eps
        both = roots * sums.sum([(c.beta1 * both / 2 + (1 - c.beta1) * g) / roots for g in own])
        m, vector = both[:960].view(shape), both[960:]
        g = (m - c.beta1 * before) / (1 - c.beta1)
        v = c.beta2 * v + (1 - c.beta2) * g * g
        wanted = float(((frozen.sqrt() + c.eps) / (v.sqrt() + c.eps)).max())
        stretch = min(4.0, max(0.5, min(1.1 * stretch, max(0.9 * stretch, wanted))))
        root = (frozen / (1 - c.beta2**c.freeze_step)).sqrt() + c.eps
        r = m / (1 - c.beta1**t) / root + c.weight_decay * w
        w = w - c.learning_rate * ratio / (1 - 0.9**c.freeze_step) * stretch * r
    found = on_threads(2, lambda group: trained(group, config, every)[0])[0]
    torch.testing.assert_close(found[name], w, rtol=1e-3, atol=1e-4)


def test_variance_is_learned_at_doubling_intervals():
    steps = [step for step in range(7 * VARIANCE_STEPS) if learns_variance(step)]
    assert steps[:VARIANCE_STEPS] == list(range(VARIANCE_STEPS))
    gaps = [b - a for a, b in itertools.pairwise(steps)]
    assert gaps == sorted(gaps) and set(gaps) == {1, 2, 4}


def test_zero_one_adam_without_local_steps_is_onebit_adam_until_the_variance_learns_again():
    """With as many full steps as ``freeze_step`` they are one method."""
    every = gradients_of(20, 2)
    one = OptimizerConfig(name="onebit_adam", learning_rate=0.01, freeze_step=VARIANCE_STEPS)
    other = OptimizerConfig(name="zero_one_adam", learning_rate=0.01, freeze_step=VARIANCE_STEPS)
    first, second = (on_threads(2, lambda group, c=c: trained(group, c, every)[0])[0] for c in (one, other))
    for name in SHAPES:
        torch.testing.assert_close(first[name], second[name])


def test_local_steps_agree_now_and_then_and_send_less():
    config, every = settings("zero_one_adam", sync_every=4, weight_decay=0.0), gradients_of(22, 2)
    results = on_threads(2, lambda group: trained(group, config, every))
    (one, made), (two, _) = results
    for name in SHAPES:
        assert torch.equal(one[name], two[name])
    often = on_threads(2, lambda group: trained(group, settings("zero_one_adam"), every))[0][1]
    assert made.sums.sent < often.sums.sent / 3


def test_a_round_of_local_steps_is_its_formula():
    """Sixteen steps to learn the variance, then one round of three on two ranks."""
    c = OptimizerConfig(name="zero_one_adam", learning_rate=0.01, freeze_step=VARIANCE_STEPS, sync_every=3)
    every = gradients_of(VARIANCE_STEPS + 3, 2)
    start, made = on_threads(2, lambda group: trained(group, c, every[:VARIANCE_STEPS]))[0]
    flat = torch.cat([start[name].reshape(-1) for name in SHAPES])
    m, v = (torch.cat([made.state[name][kind].reshape(-1) for name in SHAPES]) for kind in ("m", "v"))
    root = (v / (1 - c.beta2**VARIANCE_STEPS)).sqrt() + c.eps
    own, moved = [m / root, m / root], [torch.zeros_like(m)] * 2
    for step in every[VARIANCE_STEPS:]:
        for rank, given in enumerate(step):
            g = torch.cat([given[name].reshape(-1) for name in SHAPES])
            own[rank] = c.beta1 * own[rank] + (1 - c.beta1) * 2 * g / root
            moved[rank] = moved[rank] + c.learning_rate * own[rank]
    together = PlainSums(len(flat), 2).sum([u / 2 for u in moved])
    decay = torch.cat([torch.full((math.prod(s),), c.weight_decay * (len(s) > 1)) for s in SHAPES.values()])
    expected = (1 - 3 * c.learning_rate * decay) * flat - together
    for found, _ in on_threads(2, lambda group: trained(group, c, every)):
        torch.testing.assert_close(torch.cat([found[n].reshape(-1) for n in SHAPES]), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["onebit_adam", "onebit_lamb", "zero_one_adam"])
def test_a_state_that_is_loaded_goes_on(name):
    """All but the errors that were owed: on one rank, that is what the first sum begins with anew."""
    config, every = settings(name), gradients_of(6, 1)

    def work(group):
        weights, made = trained(group, config, every)
        parameters = {n: torch.nn.Parameter(w.clone()) for n, w in weights.items()}
        other = build(config, parameters)
        other.load_state_tensors({n: t.clone() for n, t in made.state_tensors().items()}, made.steps)
        made.sums.owed.zero_(), made.sums.owed_sum.zero_()
        for one in (made, other):
            one.give(every[0][0])
            one.step()
        return [(made.parameters[n].detach(), other.parameters[n].detach()) for n in SHAPES]

    for one, other in on_threads(1, work)[0]:
        torch.testing.assert_close(one, other)
