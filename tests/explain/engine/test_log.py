"""A decision log as it is read: who kept the device waiting, and how steps were handed to it."""

from array import array

import pytest
from decision_logs import log_for
from small_engine import make, request

from transect.engine.scheduling.decisions import FORMAT, Added, Done, Header, Planned
from transect.explain.engine.bill import PARTS, bill
from transect.explain.engine.live import view
from transect.explain.engine.log import build
from transect.explain.engine.work import StepWork


class Ticking:
    """A clock on which every look takes a moment."""

    def __init__(self):
        self.time = 0.0

    def now(self):
        self.time += 0.01
        return self.time


CONFIG = {"num_blocks": 8}


def log_of(*steps, lag=1):
    """Steps of 10 ms, one after the other, each with the fields of its ``Done``."""
    records = [Header(FORMAT, CONFIG, lag, 0.0), Added(0.0, "a", 0, 4, 1, 8, 0, 0.0, False, False)]
    for number, fields in enumerate(steps, 1):
        at = 0.01 * number
        rows = array("I", [0, 3 + number, 1] if number > 1 else [0, 0, 4]).tobytes()
        records.append(Planned(number, at - 0.012, at - 0.011, rows, 0, "", 0, 1, 4))
        records.append(Done(number, fields.pop("waited", at - 0.005), at, at, **fields))
    return build(records)


@pytest.mark.parametrize(
    ("fields", "late"),
    [
        ({}, ""),
        ({"waited": 0.02 - 1e-5}, "host"),
        ({"drawn": 0.0198}, "grammar"),
        ({"drawn": 0.012}, ""),
        ({"ranks": 0.006}, "ranks"),
        ({"ranks": 0.004}, ""),
    ],
)
def test_who_kept_the_device_waiting(fields, late):
    log = log_of({}, dict(fields))
    assert [step.late for step in log.steps] == ["", late]
    found = view(log, StepWork.of(log.header, None))
    assert found.late == ({late: 0.5} if late else {})


def test_a_device_that_is_the_host_waits_for_nobody():
    assert [step.late for step in log_of({"waited": 0.01}, {"waited": 0.02}, lag=0).steps] == ["", ""]


def test_the_bill_names_what_ranks_cost():
    log = log_of({"ranks": 0.004}, {"ranks": 0.006}, {})
    found = bill(log, "a", StepWork.of(log.header, None))
    assert found.ttft.parts["ranks"] == pytest.approx(0.004) and found.decode.parts["ranks"] == pytest.approx(0.006)
    assert sum(found.decode.parts.values()) == pytest.approx(found.decode.seconds) and "ranks" in PARTS


def test_graph_or_eager_is_written_down():
    core = make()
    core.scheduler.clock = Ticking()
    core.decisions = log_for(core)
    core.add(request("a", max_tokens=5))
    for way in ("eager", "captured", "graph", "graph", "graph"):
        core.executor.launched = way
        core.step()
    log = build(core.decisions.ring.records())
    assert [step.launched for step in log.steps] == ["eager", "captured", "graph", "graph", "graph"]
    found = view(log, StepWork.of(log.header, None))
    assert found.launched == {"graph": 0.6, "eager": 0.2, "captured": 0.2}
    assert any("graph 60%" in line for line in found.lines())
