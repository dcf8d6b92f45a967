"""The sampler: distributions, truncation against a full sort, penalties, logprobs, independence of rows, bad logits."""

import math

import numpy as np
import pytest
import torch

from transect.engine.executors import penalties
from transect.engine.executors.penalties import Pick
from transect.engine.executors.sampler import BARS, Sampler, _draw_truncated, group_mass, token_logprobs
from transect.engine.scheduling.batch import Draw
from transect.engine.scheduling.sampling_params import SamplingParams
from transect.ops.lang.philox import TOKEN_STREAM, gumbel


def pick(
    seq_id=0, *, row=0, choice=0, position=None, seed=1, prompt=(1, 2), output=(), masked=(), known=None, **params
):
    """A pick of one choice. ``known``: how many of ``output`` the scheduler has seen (one fewer under lag)."""
    params.setdefault("temperature", 1.0)
    position = len(prompt) + len(output) if position is None else position
    one = Draw(
        seq_id=seq_id,
        choice=choice,
        seed=seed,
        params=SamplingParams(**params),
        prompt_token_ids=tuple(prompt),
        output_token_ids=list(output[:known]),
        stop_ids=tuple(masked),
        min_position=position + 1 if masked else 0,
    )
    return Pick(one, position, row)


def logits_like_a_model(rows, vocab, seed=0, scale=3.0):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def sample_one(logits_V, one):
    samples = run(logits_V[None], [0], [one])
    assert not samples.errors
    return samples.tokens[one.draw.seq_id]


def run(logits, rows, picks, sampler=None):
    picks = [one._replace(row=row) for row, one in zip(rows, picks, strict=True)]
    return (sampler or Sampler()).sample(logits, picks)


def kept_by_full_sort(logits_V, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Plain definition with one sort: min-p, then top-k (ties stay), then the smallest set that reaches top-p."""
    z = logits_V.double() / temperature
    p = torch.softmax(z, -1)
    keep = p >= min_p * p.max()
    if top_k > 0:
        keep &= p >= p.sort(descending=True).values[min(top_k, len(p)) - 1]
    p = torch.where(keep, p, 0.0)
    p = p / p.sum()
    sorted_p, order = p.sort(descending=True, stable=True)
    before = sorted_p.cumsum(-1) - sorted_p
    nucleus = torch.zeros_like(keep)
    nucleus[order] = (before < top_p) if top_p < 1.0 else True
    return keep & nucleus, p


# Greedy -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [1, 5, 128, 129, 1000])
def test_greedy_takes_the_argmax_and_the_lower_of_equals(vocab):
    logits = logits_like_a_model(3, vocab)
    logits[2] = 0.5
    samples = run(logits, [0, 1, 2], [pick(i, temperature=0.0) for i in range(3)])
    assert [samples.tokens[i] for i in range(3)] == [int(logits[0].argmax()), int(logits[1].argmax()), 0]


def test_greedy_leaves_the_logits_alone_and_shares_rows():
    logits = logits_like_a_model(1, 50)
    before = logits.clone()
    picks = [pick(0, temperature=0.0), pick(1, presence_penalty=1.0, output=[3]), pick(2, logit_bias={7: 100.0})]
    samples = run(logits, [0, 0, 0], picks)
    assert torch.equal(logits, before)
    assert samples.tokens[2] == 7


# Distribution -------------------------------------------------------------------------------------------------------


def chi_square(counts, expected):
    mask = expected > 5
    assert counts[~mask].sum() <= expected[~mask].sum() * 3 + 30
    return float((((counts - expected) ** 2) / np.where(mask, expected, 1.0))[mask].sum()), int(mask.sum())


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.7},
        {"temperature": 1.5, "top_k": 20},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"temperature": 1.3, "top_k": 50, "top_p": 0.9, "min_p": 0.01},
    ],
)
@pytest.mark.parametrize("vocab", [60, 300])
def test_picks_follow_the_distribution(params, vocab):
    """Chi-square over 10,000 picks at successive positions of one seed: the statistic must be within 5 sigma."""
    logits = logits_like_a_model(1, vocab, seed=3, scale=1.5)
    n = 10_000
    sampler = Sampler()
    counts = np.zeros(vocab)
    for start in range(0, n, 1000):
        picks = [pick(i, position=start + i, seed=99, **params) for i in range(1000)]
        for token in run(logits, [0] * 1000, picks, sampler).tokens.values():
            counts[token] += 1
    keep, p = kept_by_full_sort(logits[0], **params)
    p = torch.where(keep, p, 0.0)
    expected = (p / p.sum()).numpy() * n
    assert counts[~keep.numpy()].sum() == 0
    statistic, cells = chi_square(counts, expected)
    assert statistic < cells + 5 * math.sqrt(2 * cells)


def test_one_group_is_plain_gumbel_max_over_tokens():
    logits = logits_like_a_model(1, 100, seed=5)
    for position in range(50):
        one = pick(position=position, seed=4, choice=2)
        noise = gumbel([4], [2], [position], torch.arange(100)[None], TOKEN_STREAM)[0]
        assert sample_one(logits[0], one) == int((logits[0].double() + noise).argmax())


def test_draw_depends_on_seed_choice_and_position():
    logits = torch.zeros(1, 5000)
    keys = [(seed, choice, position) for seed in (1, 2) for choice in (0, 1) for position in (8, 9)]
    picks = [pick(i, seed=s, choice=c, position=p) for i, (s, c, p) in enumerate(keys)]
    tokens = run(logits, [0] * len(picks), picks).tokens
    assert len(set(tokens.values())) == len(picks)
    again = run(logits, [0] * len(picks), picks[::-1]).tokens
    assert again == tokens


def test_a_tiny_temperature_is_greedy_and_does_not_overflow():
    logits = logits_like_a_model(1, 1000) * 1e3
    for temperature in (1e-5, 1e-30, 1e-60):
        assert sample_one(logits[0], pick(temperature=temperature)) == int(logits.argmax())
        assert sample_one(logits[0], pick(temperature=temperature, top_p=0.9)) == int(logits.argmax())


# Truncation ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [0.01, 1.0, 4.0])
@pytest.mark.parametrize(
    "params",
    [
        {"top_k": 1},
        {"top_k": 7},
        {"top_k": 2500},
        {"top_p": 1e-6},
        {"top_p": 0.5},
        {"top_p": 0.999999},
        {"min_p": 0.3},
        {"min_p": 1.0},
        {"min_p": 1e-9},
        {"top_k": 40, "top_p": 0.95},
        {"top_k": 3000, "top_p": 0.3, "min_p": 1e-7},
        {"temperature": 5.0, "top_p": 0.99},
    ],
)
def test_the_draw_is_the_best_perturbed_token_of_the_full_sort(params, scale):
    """Whichever bar resolves the row, the kept set is that of the definition, and the draw its Gumbel-max."""
    vocab = 3001
    logits = logits_like_a_model(4, vocab, seed=8, scale=scale)
    picks = [pick(i, position=i, seed=i * 17, **params) for i in range(4)]
    tokens = run(logits, [0, 1, 2, 3], picks).tokens
    for i in range(4):
        keep, _ = kept_by_full_sort(logits[i], **params)
        z = (logits[i] - logits[i].max()) / params.get("temperature", 1.0)
        noise = gumbel([i * 17], [0], [i], torch.arange(vocab)[None], TOKEN_STREAM)[0]
        score = torch.where(keep, z.double() + noise, -math.inf)
        assert tokens[i] == int(score.argmax())


def test_flat_logits_need_the_lower_bars():
    z = torch.zeros(1, 20_000)
    total = group_mass(z).sum(-1)
    one = [pick(top_p=0.9)]
    assert _draw_truncated(torch.cat([z, z]), total.repeat(2), one * 2, BARS[1]) != [None, None]
    with_peak = z.clone()
    with_peak[0, 5] = 3.0
    assert _draw_truncated(with_peak - 3.0, group_mass(with_peak - 3.0).sum(-1), one, BARS[0]) == [None]
    assert 0 <= sample_one(with_peak[0], one[0]) < 20_000


def test_top_p_is_a_share_of_what_top_k_or_min_p_keep():
    """The kept set reaches below the first bar: its mass, not that of the vocabulary, is what top-p is a share of."""
    logits = torch.zeros(1, 20_000)
    logits[0, :10] = torch.arange(10, 0, -1) * 0.5 + 9.0
    for params in ({"top_k": 20, "top_p": 0.95}, {"min_p": 1e-5, "top_p": 0.95}, {"min_p": 2e-6, "top_p": 0.95}):
        keep, _ = kept_by_full_sort(logits[0], **params)
        picks = [pick(i, position=i, **params) for i in range(40)]
        tokens = run(logits.repeat(40, 1), range(40), picks).tokens
        z = (logits[0] - logits[0].max()).double()
        for i in range(40):
            noise = gumbel([1], [0], [i], torch.arange(20_000)[None], TOKEN_STREAM)[0]
            assert tokens[i] == int(torch.where(keep, z + noise, -math.inf).argmax())


def test_ties_with_the_kth_are_kept():
    logits = torch.tensor([5.0, 4.0, 4.0, 4.0, 1.0])
    seen = {sample_one(logits, pick(position=i, top_k=2, temperature=3.0)) for i in range(300)}
    assert seen == {0, 1, 2, 3}


def test_top_p_takes_equals_in_the_order_of_their_ids():
    logits = torch.zeros(10)
    seen = {sample_one(logits, pick(position=i, top_p=0.35)) for i in range(300)}
    assert seen == {0, 1, 2, 3}


def test_top_k_of_the_whole_vocabulary_is_no_truncation():
    logits = logits_like_a_model(1, 500)[0]
    for position in range(20):
        expected = sample_one(logits, pick(position=position))
        assert sample_one(logits, pick(position=position, top_k=500)) == expected
        assert sample_one(logits, pick(position=position, top_k=-1)) == expected


# Rows do not see each other -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [777, 4096, 49152])
def test_a_row_is_the_same_alone_and_in_any_batch(vocab):
    settings = [
        {"temperature": 0.0, "logprobs": 3},
        {"logprobs": 0},
        {"top_p": 0.9, "logprobs": 5},
        {"top_k": 30, "temperature": 0.8},
        {"min_p": 0.02, "frequency_penalty": 0.5, "output": (4, 4, 9), "logprobs": 20},
        {"top_p": 0.999, "temperature": 2.0, "repetition_penalty": 1.3},
        {"logit_bias": {3: 5.0}, "masked": (1,)},
    ]
    logits = logits_like_a_model(len(settings), vocab, seed=21)
    picks = [pick(i, seed=i, **s) for i, s in enumerate(settings)]
    together = run(logits, list(range(len(picks))), picks)
    backwards = run(logits.flip(0).contiguous(), list(range(len(picks))), picks[::-1])
    for i, one in enumerate(picks):
        alone = run(logits[i : i + 1].clone(), [0], [one])
        assert alone.tokens[i] == together.tokens[i] == backwards.tokens[i]
        assert alone.logprobs.get(i) == together.logprobs.get(i) == backwards.logprobs.get(i)


def test_group_mass_is_bitwise_the_same_for_any_number_of_rows():
    z = -logits_like_a_model(9, 5000, seed=2).abs()
    whole = group_mass(z)
    for rows in (1, 2, 5):
        for start in (0, 9 - rows):
            assert torch.equal(group_mass(z[start : start + rows].clone()), whole[start : start + rows])


# Penalties, bias, masks ---------------------------------------------------------------------------------------------


def adjusted_by_definition(logits_V, one):
    x = logits_V.clone()
    for token, bias in (one.draw.params.logit_bias or {}).items():
        x[token] += bias
    for token in one.draw.masked_at(one.position):
        x[token] = -math.inf
    for token in {*one.draw.prompt_token_ids, *one.draw.output_token_ids}:
        r = one.draw.params.repetition_penalty
        x[token] = x[token] / r if x[token] > 0 else x[token] * r
    for token in set(one.draw.output_token_ids):
        x[token] -= one.draw.params.presence_penalty
        x[token] -= one.draw.params.frequency_penalty * one.draw.output_token_ids.count(token)
    return x


def test_penalties_over_many_steps_match_the_definition():
    vocab, sequences = 200, 5
    generator = np.random.default_rng(0)
    adjuster = penalties.LogitAdjuster()
    settings = [
        {"repetition_penalty": 1.7},
        {"presence_penalty": 0.9, "frequency_penalty": -0.4},
        {"frequency_penalty": 1.1, "repetition_penalty": 0.6, "logit_bias": {5: -3.0, 199: 2.0}},
        {"masked": (3, 4), "presence_penalty": -1.0},
        {"logit_bias": {7: 1.0}},
    ]
    prompts = [tuple(generator.integers(0, vocab, size=n).tolist()) for n in (3, 30, 150, 1, 7)]
    outputs = [[] for _ in settings]
    for step in range(200):
        rows = [r for r in generator.permutation(sequences).tolist() if generator.random() < 0.8]
        logits = logits_like_a_model(len(rows), vocab, seed=step)
        previous = {}
        lagged, settled = [], []
        for r in rows:
            settled.append(pick(r, prompt=prompts[r], output=outputs[r], **settings[r]))
            known = None
            if outputs[r] and generator.random() < 0.5:
                previous[r] = outputs[r][-1]
                known = len(outputs[r]) - 1
            lagged.append(pick(r, prompt=prompts[r], output=outputs[r], known=known, **settings[r]))
            outputs[r].append(int(generator.integers(0, vocab)))
        expected = [adjusted_by_definition(logits[i], one) for i, one in enumerate(settled)]
        adjuster.apply(logits, lagged, previous)
        for row, wanted in zip(logits, expected, strict=True):
            torch.testing.assert_close(row, wanted, rtol=1e-6, atol=1e-5)


def test_counts_are_extended_not_rebuilt(monkeypatch):
    built = []

    class Counting(penalties.UsedTokens):
        def __init__(self, prompt):
            built.append(len(prompt))
            super().__init__(prompt)

    monkeypatch.setattr(penalties, "UsedTokens", Counting)
    adjuster = penalties.LogitAdjuster()
    output = []
    for step in range(300):
        adjuster.apply(torch.zeros(1, 50), [pick(1, output=output, frequency_penalty=1.0)], {})
        output.append(step % 50)
    assert built == [2]


def test_choices_that_went_away_are_forgotten():
    adjuster = penalties.LogitAdjuster()
    for seq_id in range(500):
        adjuster.apply(torch.zeros(1, 50), [pick(seq_id, output=(1,), presence_penalty=1.0)], {})
    assert len(adjuster._used) <= 2 * penalties.FORGET_AFTER_STEPS


def test_logit_bias_and_masks_decide_greedy_picks():
    logits = torch.tensor([[1.0, 2.0, 3.0, 0.0]])
    assert sample_one(logits[0], pick(temperature=0.0, masked=(2,))) == 1
    assert sample_one(logits[0], pick(temperature=0.0, logit_bias={3: 100.0})) == 3
    assert sample_one(logits[0], pick(temperature=0.0, logit_bias={2: -100.0})) == 1


# Logprobs -----------------------------------------------------------------------------------------------------------


def test_logprobs_are_of_the_raw_log_softmax():
    logits = logits_like_a_model(2, 1000, seed=9)
    one = pick(0, temperature=0.3, top_p=0.9, logit_bias={17: 100.0}, logprobs=4)
    entry = run(logits, [1], [one]).logprobs[0]
    expected = torch.log_softmax(logits[1].double(), -1)
    assert entry.token_id == 17
    assert entry.logprob == pytest.approx(float(expected[17]), abs=1e-5)
    assert entry.rank == int((logits[1] > logits[1, 17]).sum()) + 1
    top = expected.topk(4)
    assert [token for token, _ in entry.top] == top.indices.tolist()
    assert [value for _, value in entry.top] == pytest.approx(top.values.tolist(), abs=1e-5)


def test_logprobs_counts_differ_by_row_and_zero_gives_the_chosen_alone():
    logits = logits_like_a_model(3, 10)
    entries = token_logprobs(logits, [0, 1, 2], [0, 2, 20])
    assert [len(entry.top) for entry in entries] == [0, 2, 10]


def test_no_logprobs_unless_asked():
    assert not run(torch.zeros(1, 10), [0], [pick()]).logprobs


# Bad logits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"top_p": 0.9}, {}])
def test_a_row_that_is_not_finite_is_an_error_of_its_own(bad, params):
    logits = logits_like_a_model(3, 300)
    logits[1, 200] = bad
    picks = [pick(i, logprobs=1, **params) for i in range(3)]
    samples = run(logits, [0, 1, 2], picks)
    clean = run(logits_like_a_model(3, 300), [0, 1, 2], picks)
    assert set(samples.errors) == {1} and "not finite" in samples.errors[1]
    assert {i: samples.tokens[i] for i in (0, 2)} == {i: clean.tokens[i] for i in (0, 2)}
    assert set(samples.logprobs) == {0, 2}


def test_minus_infinity_in_a_row_is_a_token_that_cannot_come():
    logits = torch.zeros(1, 300)
    logits[0, 1:] = -math.inf
    for params in ({}, {"top_p": 0.5}, {"top_k": 20}, {"temperature": 0.0}):
        assert sample_one(logits[0], pick(**params)) == 0


def test_when_everything_is_masked_it_says_so():
    samples = run(torch.zeros(1, 4), [0], [pick(masked=(0, 1, 2, 3))])
    assert "no token may be drawn" in samples.errors[0]
