"""What an engine computes in C++ kernels and in graphs has no shapes in a trace: its decision log has the floors."""

import dataclasses
import time
from array import array

import pytest
import torch
from planted_faults import ceilings

from transect.costs.storage import Storage
from transect.engine.decision_setup import _plain
from transect.engine.scheduling.decisions import FORMAT, DecisionRing, Done, Header, Planned, _framed
from transect.explain.program.doing import doing_of
from transect.explain.program.explain import Explain
from transect.explain.program.sampler import Frame
from transect.explain.program.split import PARTS, Split
from transect.explain.program.trace import Trace
from transect.spec.shapes import PRESETS

LIMITS = {"num_blocks": 8}


def test_time_in_our_kernels_is_no_python():
    frame = Frame("/somewhere/transect/ops/cpu/library.py", "run", 283)
    assert doing_of((frame, Frame("user.py", "main", 3))).part == "unrated"
    assert doing_of((Frame("user.py", "main", 3), frame)).part == "host"


@pytest.mark.parametrize(("least", "floor"), [(0.2, 0.3), (0.9, 0.6)])
def test_floors_of_steps_divide_what_has_no_shapes(least, floor):
    """Never more than there is."""
    parts = dict.fromkeys(PARTS, 0.0) | {"unrated": 0.5, "floor": 0.1, "host": 0.4}
    split = Split(1.0, 0.0, parts, [], [], True, 0, Trace())
    split.rate(least)
    assert split.parts["floor"] == pytest.approx(floor) and split.parts["unrated"] == 0
    assert sum(split.parts.values()) == pytest.approx(1.0)


def test_only_the_steps_inside_count():
    """Two steps of the log end while it is explained, one did before."""
    config = dataclasses.replace(PRESETS["llama-3.1-8b"], n_layers=2)
    header = Header(FORMAT, LIMITS, 0, 0.0, _plain(config), _plain(Storage()), {"dtype": "float32"})
    ring = DecisionRing()
    ring.put(_framed(header))

    def step(number):
        rows = array("I", [0, number, 1]).tobytes()
        ring.put(_framed(Planned(number, time.monotonic(), time.monotonic(), rows, 0, "", 0, 1, 4)))
        ring.put(_framed(Done(number, time.monotonic(), time.monotonic(), time.monotonic())))

    step(1)
    with Explain(ceilings(), stacks=False, decisions=ring) as run:
        torch.ones(3).add(1)
        step(2)
        step(3)
    whole = run._steps_floor()
    run._steady.recording.span[0] = 0.0
    assert run.result is not None and run._steps_floor() == pytest.approx(1.5 * whole, rel=0.01) and whole > 0
    assert any("engine's steps" in note for note in run.result.split.notes)
