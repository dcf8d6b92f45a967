"""Given the step times of a recorded run, the simulated engine decides in every step what the real one decided.

Compared are rows, copies, free blocks and reasons. The run has prefixes found in the cache, preemption, grammars,
several choices and an abort.
"""

import time
from collections.abc import Mapping
from types import MappingProxyType

import pytest
from decision_logs import log_for
from tiny_llm import save_tiny_llm

from transect import LLM, SamplingParams
from transect.engine.scheduling.decisions import Aborted, Added, Done, Planned
from transect.engine.scheduling.scheduler_config import SchedulerConfig
from transect.engine.scheduling.simulation import SimulatedEngine
from transect.explain.engine.log import build, load
from transect.explain.engine.replay import RecordedDrafts, ReplayScript
from transect.explain.engine.simulate import acceptance_of

SETTINGS = {"dtype": "float32", "native": False, "threads": 1, "num_kv_blocks": 20, "block_size": 8, "max_num_seqs": 6}
FORM = {"regex": "[a-z]{3} is (one|two|three) of them"}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tiny")
    save_tiny_llm(directory)
    return str(directory)


def recorded(tiny, path, temperature=1.0, **settings):
    """A run of an engine in this process, to which requests come while it is at work; its log."""
    llm = LLM(tiny, decision_log=str(path), max_num_batched_tokens=32, mixed_step_limit="auto", **SETTINGS | settings)
    system = list(range(40, 64))
    work = []
    for number in range(14):
        params = SamplingParams(max_tokens=10 + 3 * number, ignore_eos=True, seed=number, temperature=temperature)
        if number % 4 == 1:
            params = SamplingParams(max_tokens=40, structured_outputs=FORM, seed=number, temperature=1.0)
        if number % 5 == 3:
            params = params.with_(n=2)
        work.append(([*system[: 8 * (number % 4)], *range(70 + number, 80 + 4 * number)], params))
    names = []
    for number, (prompt, params) in enumerate(work):
        names.append(llm.submit(prompt, params))
        for _ in range(number % 3 * 2):
            llm.step()
        if number == 9:
            llm._core.abort(llm._core.scheduler.running[-1].request_id)
        time.sleep(0.001)
    while llm.has_work:
        llm.step()
    llm.close()
    return load(path)


class AcceptedAgain(RecordedDrafts):
    """Drafts as many tokens as were drafted, of which as many are right."""

    accepted: Mapping[int, int] = MappingProxyType({})
    device = None

    def drafts(self, sequences, room, *, known=True):
        found = super().drafts(sequences, room, known=known)
        for seq_id, tokens in found.items():
            right = self.device.outputs[seq_id].peek(self.accepted.get(seq_id, 0))
            found[seq_id] = (*right, *[-1] * (len(tokens) - len(right)))
        return found


def simulated(log):
    """The decisions of a simulated engine whose steps take the recorded times."""
    script, lives = ReplayScript(log), iter(log.lives)
    taken = {event.step: event for event in log.events if isinstance(event, Done)}
    engine = SimulatedEngine(
        SchedulerConfig(**log.header.scheduler),
        lambda batch: taken[batch.step].learned,
        lag=log.header.lag,
        now=log.header.began,
    )
    engine.core.decisions = log_for(engine.core)
    speculation = engine.scheduler.speculation
    if speculation is not None:
        speculation = engine.scheduler.speculation = AcceptedAgain(speculation.config, engine.scheduler.times)
        speculation.device = engine.device
    rows = {step.number: {seq_id: count for seq_id, _, count in step.rows} for step in log.steps}

    def step():
        """Take one step of the engine loop; as many tokens are forced as were."""
        done = taken.get(engine.scheduler.blocks.committed_step + 1)
        jumps, outputs = dict(done.jumps if done else ()), engine.device.outputs
        engine.scheduler.jumps.forced = lambda seq, token, least, most: [
            next(outputs[seq.seq_id]) for _ in range(jumps.get(seq.seq_id, 0))
        ]
        if speculation is not None:
            coming = engine.scheduler._step + 1
            speculation.rows = rows.get(coming, {})
            speculation.accepted = dict(taken[coming].accepted) if coming in taken else {}
        engine.step()

    for event in log.events:
        match event:
            case Added():
                life = next(lives)
                engine.add(script.request(life), [script.output(life, choice) for choice in range(event.n)])
                if event.grammar:
                    for choice in engine.scheduler.requests[event.request_id].choices:
                        choice.plain = False
            case Aborted():
                engine.core.abort(event.request_id, event.choice)
            case Planned():
                engine.clock.advance(max(0.0, event.began - engine.clock.time))
                step()
            case Done() if event.step > engine.scheduler.blocks.committed_step:
                step()
    return build(engine.core.decisions.ring.records())


def decisions(log):
    found = []
    for event, step in zip((e for e in log.events if isinstance(e, Planned) and e.step), log.steps, strict=True):
        counts = (event.copies, event.held_back, event.waiting, event.running, event.free_blocks)
        found.append((event.step, step.rows, counts))
    return found


@pytest.mark.parametrize("settings", [{}, {"async_scheduling": True}, {"jump_ahead": False}], ids=str)
def test_a_simulated_engine_decides_as_the_real_one(tiny, tmp_path, settings):
    log = recorded(tiny, tmp_path / "run.log", **settings)
    expected, found = decisions(log), decisions(simulated(log))
    assert len(expected) > 60
    for real, again in zip(expected, found, strict=True):
        assert real == again
    # All that the run was to meet was met.
    assert any(life.added.grammar for life in log.lives) and any(life.added.n > 1 for life in log.lives)
    assert any(isinstance(event, Aborted) for event in log.events)
    started = [row for _, rows, _ in expected for row in rows]
    assert any(start and count > 1 and start % 8 == 0 for _, start, count in started)  # a prefix was found
    ends, again = {}, 0
    for seq, start, count in started:
        again += start < ends.get(seq, 0)
        ends[seq] = start + count
    assert again  # a sequence was preempted, and computed anew


def test_a_simulated_engine_decides_about_drafts_as_the_real_one(tiny, tmp_path):
    """With every token known before each step: an engine that plans ahead waits for tokens as soon as drafts would pay,
    which a log does not say."""
    drafts = {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 3, "adaptive": False}
    log = recorded(tiny, tmp_path / "run.log", 0.0, speculative_config=drafts, max_num_seqs=16, async_scheduling=False)
    expected, found = decisions(log), decisions(simulated(log))
    assert expected == found and len(expected) > 40
    assert sum(step.drafted(row) for step in log.steps for row in step.rows) > 10
    share = acceptance_of(log)
    assert share is not None and 0.0 < share < 1.0
