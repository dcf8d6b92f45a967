"""Parameters that cannot work, or that would cost others much, are refused; what is left disturbs nobody."""

import numpy as np
import pytest
import torch
from small_engine import make, recorded_batches, request

from transect.engine.executors import penalties
from transect.engine.executors.penalties import LogitAdjuster, Pick
from transect.engine.executors.sampler import NOT_FINITE, NOTHING_LEFT, Sampler
from transect.engine.frontends.inputs import check_token_ids
from transect.engine.scheduling.batch import Draw, StepResult
from transect.engine.scheduling.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"stop": ["x" * 100 + str(i) for i in range(400)]}, "stop holds 400 entries: give at most 128"),
        ({"stop": ["x" * 5000]}, "stop holds 5000 characters in all: give at most 4096"),
        ({"stop_token_ids": list(range(129))}, "stop_token_ids holds 129 entries: give at most 128"),
        ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "logit_bias holds 1025 entries: give at most 1024"),
        ({"repetition_penalty": 1e-300}, r"repetition_penalty must be in \[0.01, 100\], got 1e-300"),
    ],
)
def test_bounds(changes, words):
    with pytest.raises(ValueError, match=words):
        SamplingParams(**changes)


def test_what_the_bounds_allow():
    SamplingParams(
        stop=["x" * 32] * 128,
        stop_token_ids=list(range(128)),
        logit_bias=dict.fromkeys(range(1024), 1.0),
        repetition_penalty=0.01,
    )


def test_the_least_repetition_penalty_leaves_something_to_draw():
    """Logits of a hundred thousand are far over what any model gives."""
    draw = one_draw(SamplingParams(temperature=0, repetition_penalty=0.01))
    samples = Sampler().sample(torch.full((1, 8), 1e5), [Pick(draw, 2, 0)])
    assert not samples.errors


def test_min_tokens_where_every_token_ends_the_answer():
    params = SamplingParams(min_tokens=1, stop_token_ids=[0, 1, 2])
    with pytest.raises(ValueError, match=r"min_tokens masks .* all 4 of this model"):
        check_token_ids([1], params, 4, eos_token_ids=[3])
    check_token_ids([1], params, 4)
    check_token_ids([1], params.with_(ignore_eos=True), 4, eos_token_ids=[3])
    check_token_ids([1], params.with_(min_tokens=0), 4, eos_token_ids=[3])


def one_draw(params, seq_id=0, stop_ids=()):
    return Draw(seq_id, 0, 1, params, (1, 2), [], stop_ids, 100 if stop_ids else 0)


@pytest.mark.parametrize(("logits", "sound", "message"), [(1.0, {0}, NOTHING_LEFT), (float("nan"), set(), NOT_FINITE)])
def test_the_sampler_says_whose_fault_it_is(logits, sound, message):
    draw = one_draw(SamplingParams(temperature=0, min_tokens=1), stop_ids=tuple(range(8)))
    samples = Sampler().sample(torch.full((1, 8), logits), [Pick(draw, 2, 0)])
    assert samples.errors == {0: message} and samples.sound == sound


@pytest.mark.parametrize("sound", [True, False])
def test_only_bad_logits_cost_others_their_prefix(sound):
    """The second request fails at its first draw. What it shares with the first one is forgotten only where the model's
    own logits were bad."""
    core = make()
    core.add(request("a", prompt=12))
    recorded_batches(core)
    core.add(request("b", prompt=12))
    batch = core.scheduler.schedule()
    (row,) = batch.rows
    assert row.start == 8, "it found the first request's blocks"
    seq_id = row.draws[0].seq_id
    result = StepResult({}, errors={seq_id: "no"}, **({"sound": {seq_id}} if sound else {}))
    (output,) = core.scheduler.commit(batch, result)
    assert (output.finish_reason, output.error) == ("error", "no")
    core.add(request("c", prompt=12))
    (row,) = core.scheduler.schedule().rows
    assert row.start == (8 if sound else 0)


def test_biases_and_masks_become_arrays_once_for_each_request(monkeypatch):
    made = []

    class Counted(penalties.FixedTokens):
        def __init__(self, draw):
            made.append(draw.seq_id)
            super().__init__(draw)

    monkeypatch.setattr(penalties, "FixedTokens", Counted)
    adjuster = LogitAdjuster()
    bias = {token: token / 10 for token in range(20)}
    draws = [
        one_draw(SamplingParams(logit_bias=bias, min_tokens=50, max_tokens=None), seq_id, (30, 31)) for seq_id in (7, 8)
    ]
    for step in range(5):
        logits = torch.zeros(2, 40)
        adjuster.apply(logits, [Pick(draw, 2 + step, row) for row, draw in enumerate(draws)], {})
        assert torch.equal(logits[0], logits[1])
        np.testing.assert_allclose(logits[0, :20].numpy(), [bias[token] for token in range(20)], rtol=1e-6)
        assert torch.isinf(logits[0, 30:32]).all() and logits[0, 32:].abs().max() == 0
    assert made == [7, 8]
    other = one_draw(SamplingParams(temperature=0, logit_bias={1: 1.0}), 9)
    for step in range(2 * penalties.FORGET_AFTER_STEPS):
        adjuster.apply(torch.zeros(1, 40), [Pick(other, 2 + step, 0)], {})
    assert set(adjuster._fixed) == {9}, "those that have gone are forgotten"
