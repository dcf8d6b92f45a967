"""The log of a fuzzed run, replayed through the shipping scheduler, reproduces every decision."""

import msgspec
import pytest
from decision_logs import log_for
from effort import examples, proving
from engine_workloads import Run, Workload, workloads
from grammar_fakes import Steps
from hypothesis import given
from kv_checker import VOCAB
from small_engine import make, recorded_batches, request

from transect.engine.scheduling.decisions import Added, Done, Planned, read_records
from transect.explain.engine.log import build
from transect.explain.engine.replay import replay

SEEN: list[int] = []
"""The decisions of each run."""


def logged(workload: Workload):
    """Run a workload with a log beside it; the log as it is read."""
    run = Run(workload)
    run.core.decisions = log_for(run.core)
    run.finish()
    return build(run.core.decisions.ring.records())


def check(workload: Workload) -> None:
    log = logged(workload)
    found = replay(log)
    assert found.difference is None, str(found.difference)
    assert found.decisions == sum(isinstance(event, Planned) for event in log.events)
    SEEN.append(found.decisions)


@examples(20, 300)
@given(workloads(lag=0))
def test_every_decision_again(workload: Workload):
    check(workload)


@examples(20, 300)
@given(workloads(lag=1))
def test_every_decision_again_with_tokens_one_step_late(workload: Workload):
    check(workload)


@examples(15, 200)
@given(workloads(lag=1, storm=True))
def test_every_decision_again_in_a_preemption_storm(workload: Workload):
    check(workload)


@examples(8, 50)
@given(workloads(lag=0, policy="static"))
def test_every_decision_of_static_batches_again(workload: Workload):
    check(workload)


@examples(30, 300, print_blob=True)
@given(workloads(lag=1, drafting=True))
def test_every_decision_about_drafts_again(workload: Workload):
    check(workload)


def test_enough_decisions_were_compared():
    """After the tests above, in this process: hundreds, and ten thousand with --prove."""
    if len(SEEN) < (850 if proving() else 63):
        pytest.skip("some of the tests above ran elsewhere")
    assert sum(SEEN) >= (10_000 if proving() else 300)


@pytest.mark.parametrize("lag", [0, 1])
def test_jumps_over_forced_tokens_again(lag):
    """A log holds how far each went; the replay has no grammar."""
    core = make(lag, num_blocks=12)
    core.decisions = log_for(core)
    for kind in range(4):
        grammar = Steps(kind, VOCAB, 24, forcing=5)
        core.add(msgspec.structs.replace(request(str(kind), max_tokens=26, n=1 + kind % 2), constraint=grammar))
    recorded_batches(core)
    log = build(core.decisions.ring.records())
    assert sum(len(event.jumps) for event in log.events if isinstance(event, Done)) > 10
    difference = replay(log).difference
    assert difference is None, str(difference)


def test_a_changed_decision_is_found():
    """The comparison can fail: another budget plans other steps."""
    core = make()
    core.decisions = log_for(core)
    for name in "abc":
        core.add(request(name, prompt=14, first=ord(name)))
    recorded_batches(core)
    log = build(core.decisions.ring.records())
    assert replay(log).difference is None
    log.header.scheduler["max_num_batched_tokens"] = 12
    found = replay(log).difference
    assert found is not None and "recorded" in str(found)


def test_a_ring_that_lost_its_beginning_is_refused():
    core = make()
    core.decisions = log_for(core)
    core.decisions.ring.limit = 500
    for name in "abc":
        core.add(request(name, prompt=14, first=ord(name)))
    recorded_batches(core)
    ring = core.decisions.ring
    assert ring.lost and len(bytes(ring)) < 500 + len(ring.header)
    with pytest.raises(ValueError, match="beginning of this log is missing"):
        replay(build(ring.records(), complete=not ring.lost))


@pytest.mark.parametrize("kind", [Planned, Added])
def test_a_log_with_holes_says_so(kind):
    """A file that was cut together has ends without plans, or requests that follow on none."""
    core = make(max_num_seqs=2)
    core.decisions = log_for(core)
    for name in "ab":
        core.add(request(name, max_tokens=4))
    recorded_batches(core)
    header, *events = core.decisions.ring.records()
    events.remove(next(event for event in events if isinstance(event, kind)))
    with pytest.raises(ValueError, match="missing or damaged"):
        replay(build([header, *events]))


def test_a_damaged_text_in_a_log_is_a_damaged_log():
    core = make()
    core.decisions = log_for(core)
    core.add(request("abcdef", max_tokens=4))
    ring = bytes(core.decisions.ring)
    with pytest.raises(ValueError, match="is damaged"):
        list(read_records(ring.replace(b"abcdef", b"abc\xff\xffe")))
