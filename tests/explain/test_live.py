"""The live view: its shares add up, and it says who waits and why."""

import json

import pytest
from commands import run_here
from decision_logs import log_for
from small_engine import make, recorded_batches, request

from transect.explain.live import view
from transect.explain.log import build
from transect.explain.work import StepWork


class Ticking:
    def __init__(self):
        self.time = 0.0

    def now(self):
        self.time += 0.01
        return self.time


@pytest.fixture
def core(tmp_path):
    core = make(max_num_seqs=2)
    core.scheduler.clock = Ticking()
    core.decisions = log_for(core, file=tmp_path / "log.bin")
    for name in "abcd":
        core.add(request(name, first=ord(name), max_tokens=12))
    return core


def test_who_waits_and_why(core):
    for _ in range(4):
        core.step()
    log = build(core.decisions.ring.records())
    found = view(log, StepWork.of(log.header, None))
    assert sum(found.parts.values()) == pytest.approx(1.0)
    assert (found.running, found.waiting) == (2, 2) and 0 < found.kv_used < 1
    assert [each.request_id for each in found.waiters] == ["c", "d"]
    assert "max_num_seqs" in found.waiters[0].reason and list(found.reasons) == ["places"]
    assert any("max_num_seqs" in line for line in found.lines())


def test_only_the_window_counts(core, tmp_path):
    recorded_batches(core)
    core.decisions.close()
    log = build(core.decisions.ring.records())
    work = StepWork.of(log.header, None)
    assert view(log, work, window=0.1).steps < view(log, work).steps == len(log.steps)
    idle = view(log, work, now=core.scheduler.clock.now() + 50)
    assert idle.steps == 0 and idle.parts["idle"] == 1.0 and not idle.waiters
    file = str(tmp_path / "log.bin")
    assert run_here("top", file, "--once").stdout.startswith("last ")
    assert json.loads(run_here("top", file, "--json").stdout)["waiting"] == 0
    assert "does not answer" in run_here("top", "http://127.0.0.1:9", "--once").stderr
