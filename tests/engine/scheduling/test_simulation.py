"""A simulated engine: steps that are leapt over leave what the same steps one by one leave."""

import random
from itertools import repeat

import pytest
from effort import examples
from hypothesis import given
from hypothesis import strategies as st

from transect.costs.steps import StepLoad
from transect.engine.scheduling.request import Request
from transect.engine.scheduling.sampling_params import SamplingParams
from transect.engine.scheduling.scheduler_config import SchedulerConfig
from transect.engine.scheduling.simulation import SimulatedEngine


def seconds(load):
    return 2e-3 + 1e-4 * load.tokens + 1e-6 * (load.keys + load.pairs)


def of_batch(batch):
    return seconds(StepLoad.of(batch.spans()))


def workload(seed, count, rate):
    """Requests that come at random; some begin with an answer that somebody else got."""
    rng, at, found = random.Random(seed), 0.0, []
    for number in range(count):
        at += rng.expovariate(rate)
        shared = (rng.randrange(3),) * rng.randrange(0, 24)
        prompt = (*shared, *(1000 + number,) * rng.randrange(1, 40))
        found.append((at, prompt, rng.randrange(1, 90), rng.randrange(3)))
    return found


def run(work, config, lag, host, leaps):
    engine = SimulatedEngine(config, of_batch, lag=lag, host=host, decodes=seconds if leaps else None)
    for number, (at, prompt, outputs, token) in enumerate(work):
        engine.run(at)
        params = SamplingParams(max_tokens=outputs, ignore_eos=True, n=1 + (number % 5 == 4))
        engine.add(Request(str(number), prompt, params, arrival_time=at), [repeat(token)] * params.n)
    engine.run()
    return engine


def outcome(engine):
    lines = {(line.request_id, line.index): line for line in engine.done}
    cache, stats = engine.scheduler.cache, engine.scheduler.stats()
    state = (list(cache._unused), cache._blank, cache._hash_of, cache._refs, stats.steps, stats.preemptions)
    moments = {name: line.moments for name, line in lines.items()}
    counted = {name: (line.cached, line.reason) for name, line in lines.items()}
    return moments, (counted, state, stats.generation_tokens, stats.prefix_hit_tokens)


@examples(40, 600)
@given(
    st.integers(0, 10**6),
    st.sampled_from((5.0, 50.0, 400.0)),
    st.integers(0, 1),
    st.sampled_from((0.0, 1e-4)),
    st.sampled_from((1, 4, 16)),
    st.sampled_from((1, 1.5, 4)),
    st.booleans(),
)
def test_leaps_change_nothing(seed, rate, lag, host, block_size, room, caching):
    work = workload(seed, 25, rate)
    config = SchedulerConfig(
        num_blocks=int(room * -(-200 // block_size)), block_size=block_size, max_num_seqs=6, max_model_len=200,
        max_num_batched_tokens=24, enable_prefix_caching=caching, seed=0,
    )  # fmt: skip
    stepped, leapt = (run(work, config, lag, host, leaps) for leaps in (False, True))
    (moments, counted), (moments_leapt, counted_leapt) = outcome(stepped), outcome(leapt)
    assert counted == counted_leapt
    for name, times in moments.items():
        assert moments_leapt[name] == pytest.approx(times, rel=1e-9)
    assert leapt.device.busy == pytest.approx(stepped.device.busy)


def test_leaps_are_taken():
    work = [(0.0, (5,) * 20, 150, 1), (0.1, (6,) * 20, 150, 2)]
    config = SchedulerConfig(num_blocks=100, max_num_seqs=6, max_model_len=200, max_num_batched_tokens=64, seed=0)
    for lag in (0, 1):
        engine = SimulatedEngine(config, of_batch, lag=lag, decodes=seconds)
        calls = []
        step = engine.core.step
        engine.core.step = lambda step=step, calls=calls: calls.append(0) or step()
        for number, (at, prompt, outputs, token) in enumerate(work):
            engine.run(at)
            engine.add(
                Request(str(number), prompt, SamplingParams(max_tokens=outputs, ignore_eos=True)), [repeat(token)]
            )
        engine.run()
        assert len(engine.done) == 2 and all(len(line.moments) == 150 for line in engine.done)
        assert len(calls) < 30 < engine.device.steps


@pytest.mark.parametrize("lag", [0, 1])
def test_planned_acceptance_is_what_comes_out(lag):
    """All requests get their tokens, sooner with drafts; the acceptance is the planned one."""
    ends = {}
    for acceptance in (None, 0.0, 0.8, 1.0):
        drafts = None if acceptance is None else {"method": "ngram", "num_speculative_tokens": 4}
        config = SchedulerConfig(num_blocks=512, max_num_seqs=32, max_model_len=1024, seed=0, speculation=drafts)
        engine = SimulatedEngine(config, of_batch, lag=lag, acceptance=acceptance)
        for number in range(2):
            params = SamplingParams(max_tokens=600, ignore_eos=True)
            engine.add(Request(str(number), (number + 1,) * 9, params), [repeat(5)])
        engine.run()
        assert [len(line.moments) for line in engine.done] == [600, 600]
        ends[acceptance] = engine.clock.time
        stats = engine.scheduler.stats()
        if acceptance:
            counts = list(stats.accepted_at.values())
            assert counts[1] / counts[0] == pytest.approx(acceptance, abs=0.08)
    assert ends[1.0] < ends[0.8] < 0.8 * ends[None]
    assert ends[0.0] < 1.03 * ends[None]
