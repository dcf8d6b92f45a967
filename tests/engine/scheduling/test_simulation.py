"""A simulated engine: steps that are leapt over leave what the same steps one by one leave."""

import random
from itertools import repeat

import pytest
from effort import examples
from hypothesis import given
from hypothesis import strategies as st

from transect.costs.steps import StepLoad
from transect.costs.warmth import Slowdown
from transect.engine.scheduling.request import Request
from transect.engine.scheduling.sampling_params import SamplingParams
from transect.engine.scheduling.scheduler_config import SchedulerConfig
from transect.engine.scheduling.simulation import SimulatedEngine


def seconds(load):
    return 2e-3 + 1e-4 * load.tokens + 1e-6 * (load.keys + load.pairs)


def windowed(load):
    """A law that is no line in the keys: half of the layers read 64 positions of a sequence at most."""
    return 2e-3 + 1e-4 * load.tokens + 5e-7 * (load.keys + min(load.keys, 64 * load.rows)) + 1e-6 * load.pairs


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


def known(times, law):
    """Let step times be those of ``law``, and no step change them."""
    for rows in (1, 2, 4, 6, 12, 24) * 5:
        for load in (StepLoad(rows, 60 * rows, 0, rows, 0, rows), StepLoad(rows, 60, 30 * rows, 2, 1, rows)):
            times.learn(load, law(load))
    times.learn = lambda *lesson: None


def run(work, config, lag, host, leaps, law=seconds, clients=1, warming=None):
    def of(batch):
        return law(StepLoad.of(batch.spans()))

    engine = SimulatedEngine(config, of, lag=lag, host=host, decodes=law if leaps else None, warming=warming)
    if config.itl_target is not None:
        known(engine.scheduler.times, law)
    for number, (at, prompt, outputs, token) in enumerate(work):
        engine.run(at)
        params = SamplingParams(max_tokens=outputs, ignore_eos=True, n=1 + (number % 5 == 4))
        client = str(number * number % clients)
        engine.add(Request(str(number), prompt, params, arrival_time=at, client=client), [repeat(token)] * params.n)
        if number % 9 == 8:  # a client leaves
            engine.core.abort(str(number - 1))
    engine.run()
    return engine


def outcome(engine):
    lines = {(line.request_id, line.index): line for line in engine.done}
    cache, stats = engine.scheduler.cache, engine.scheduler.stats()
    state = (list(cache._unused), cache._blank, cache._hash_of, cache._refs, stats.steps, stats.preemptions)
    moments = {name: line.moments for name, line in lines.items()}
    counted = {name: (line.cached, line.reason) for name, line in lines.items()}
    return moments, (counted, state, stats.generation_tokens, stats.prefix_hit_tokens)


@examples(25, 600)
@given(
    st.integers(0, 10**6),
    st.sampled_from((5.0, 50.0, 400.0)),
    st.integers(0, 1),
    st.sampled_from((0.0, 1e-4)),
    st.sampled_from((1, 4, 16)),
    st.sampled_from((1, 1.5, 4)),
    st.booleans(),
    st.sampled_from((None, 0.0, 4e-3)),
    st.sampled_from((1, 3)),
    st.sampled_from((seconds, windowed)),
    st.sampled_from((None, Slowdown(0.3, 4000.0))),
)
def test_leaps_change_nothing(seed, rate, lag, host, block_size, room, caching, target, clients, law, warming):
    """Decisions, times and prefix cache, also where steps are sized by time: then with step times that are known."""
    work = workload(seed, 25, rate)
    config = SchedulerConfig(
        num_blocks=int(room * -(-200 // block_size)), block_size=block_size, max_num_seqs=6, max_model_len=200,
        max_num_batched_tokens=24, enable_prefix_caching=caching, itl_target=target, seed=0,
    )  # fmt: skip
    stepped, leapt = (run(work, config, lag, host, leaps, law, clients, warming) for leaps in (False, True))
    (moments, counted), (moments_leapt, counted_leapt) = outcome(stepped), outcome(leapt)
    assert counted == counted_leapt
    for name, times in moments.items():
        assert moments_leapt[name] == pytest.approx(times, rel=1e-9)
    assert leapt.device.busy == pytest.approx(stepped.device.busy)


def test_steps_that_are_leapt_over_teach_their_times():
    """Steps sized by time come out alike, though like steps are learned from together."""
    work = workload(3, 150, 50.0)
    config = SchedulerConfig(
        num_blocks=400, block_size=4, max_num_seqs=6, max_model_len=200, max_num_batched_tokens=64, itl_target=0.0,
        enable_prefix_caching=False, seed=0,
    )  # fmt: skip
    ends = []
    for leaps in (False, True):
        engine = SimulatedEngine(config, of_batch, lag=1, decodes=seconds if leaps else None)
        for number, (at, prompt, outputs, token) in enumerate(work):
            engine.run(at)
            params = SamplingParams(max_tokens=outputs, ignore_eos=True)
            engine.add(Request(str(number), prompt, params, arrival_time=at), [repeat(token)])
        engine.run()
        firsts = {line.request_id: line.moments[0] for line in engine.done}
        ends.append(sum(firsts[str(number)] - each[0] for number, each in enumerate(work)) / len(work))
        known = engine.scheduler.times
        assert known.predict(StepLoad(6, 600, 0, 6, 0, 6)) == pytest.approx(seconds(StepLoad(6, 600)), rel=0.01)
    assert ends[1] == pytest.approx(ends[0], rel=0.02)


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
        assert len(calls) < 10 < engine.device.steps


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
