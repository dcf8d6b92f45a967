"""A run that hangs ends in time, and says where each rank is; one that is slow does not."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from training_runs import tiny_run

from transect.parallel import pulse
from transect.parallel.pulse import Pulse


class Store(dict):
    """A store in memory."""

    set = dict.__setitem__

    def check(self, keys):
        return all(key in self for key in keys)


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(pulse.time, "monotonic", lambda: now[0])
    return now


def ranks_of(size=2, timeout=60.0):
    store = Store()
    return [Pulse(store, rank, size, timeout) for rank in range(size)]


def look(ranks, clock, seconds):
    """What the first rank says when so much time has gone by, all ranks publishing meanwhile."""
    until = clock[0] + seconds
    while clock[0] < until:
        clock[0] = min(until, clock[0] + 10)
        said = [each.look() for each in reversed(ranks)][::-1]
        if said[0]:
            return said[0]
    return None


def test_a_hang_names_every_rank_with_its_step_and_place(clock):
    first, second = ranks_of()
    first.at(12, "the sums of gradients")
    second.at(11, "micro-batch 2 of 4")
    assert look([first, second], clock, 50) is None
    message = look([first, second], clock, 20)
    assert "rank 0 is at the sums of gradients of step 12 for 6" in message
    assert "rank 1 is at micro-batch 2 of 4 of step 11 for 6" in message and "parallel.timeout" in message


def test_a_rank_that_gets_on_or_works_alone_is_waited_for(clock):
    first, second = ranks_of()
    first.at(3, "the decision to continue")
    for step in range(20):
        second.at(2, f"micro-batch {step}")
        assert look([first, second], clock, 20) is None
    second.at(2, "a checkpoint", alone=True)
    assert look([first, second], clock, 1000) is None
    second.at(3, "its passes")
    assert "rank 1 is at its passes" in look([first, second], clock, 100)


def test_a_rank_that_is_gone_is_said_to_be(clock):
    first, second = ranks_of()
    first.at(3, "the sums of gradients")
    second.at(3, "a checkpoint", alone=True)
    assert look([first, second], clock, 100) is None
    assert "rank 1 sends no more signs of life" in look([first], clock, 200)


@pytest.mark.parametrize("began", [False, True])
def test_a_rank_that_stops_before_its_first_heartbeat_is_noticed_within_one_timeout(began, clock):
    first, second = ranks_of()
    first.at(1, "its passes")
    second.at(0, "its first step", alone=True)
    if began:  # it publishes once, and its thread never runs
        with second.watching():
            pass
    assert look([first], clock, 55) is None
    assert "rank 1 sends no more signs of life" in look([first], clock, first.interval)


def test_the_first_beat_is_there_as_soon_as_a_rank_watches():
    store = Store()
    with Pulse(store, 1, 2, 60.0).watching():
        assert json.loads(store["pulse/1"])["what"] == "its first step"


def test_the_end_is_asked_for_once_and_not_after_the_run():
    said = []
    one = Pulse(Store(), 0, 1, 0.05, said.append)
    with one.watching():
        one.at(1, "its passes")
        until = time.monotonic() + 200
        while not said and time.monotonic() < until:
            time.sleep(0.01)
    assert len(said) == 1 and "rank 0 is at its passes of step 1" in said[0]
    with one.watching():
        pass
    assert len(said) == 1


SLEEPER = """
import sys, time, json
from transect.parallel.launch import Ranks
from transect.train.loop.follow import Run
import sleeper

if __name__ == "__main__":
    run = Run(json.load(open(sys.argv[1])))
    ranks = Ranks.start(2)
    ranks.call("sleeper:follow", run)
    run.trainer(ranks.world).run()
"""
FOLLOWER = """
import time

def follow(world, run):
    trainer = run.trainer(world)
    step = trainer.step

    def slow():
        if trainer.steps_done == 2:
            trainer.crew.at("a long sleep", 3)
            time.sleep(600)
        return step()

    trainer.step = slow
    trainer.run()
"""


@pytest.mark.prove
def test_a_rank_that_sleeps_ends_the_run_with_one_message(tmp_path):
    config = tiny_run(tmp_path, steps=6, accumulate=2, parallel={"data": 2, "timeout": 3.0})
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    (tmp_path / "sleeper.py").write_text(FOLLOWER)
    (tmp_path / "main.py").write_text(SLEEPER)
    source = str(Path(pulse.__file__).resolve().parents[2])
    done = subprocess.run(
        [sys.executable, str(tmp_path / "main.py"), str(tmp_path / "config.json")],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{source}", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == pulse.HUNG, done.stderr
    assert done.stderr.count("no rank has made progress") == 1
    assert "rank 1 is at a long sleep of step 3" in done.stderr and "rank 0 is at" in done.stderr
