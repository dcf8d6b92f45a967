"""Decisions about the number of replicas, their reasons, and the alarm of an autoscaler that cannot see."""

import json
import logging
from types import SimpleNamespace

import pytest

from transect.cluster import scaling
from transect.cluster.ray_policy import FleetPolicy, seen_of
from transect.cluster.scaling import Decider, is_blind, newest
from transect.engine.scheduling.policies.scaling import Backlog, Seen


def arguments(folder=None, **changes):
    made = {"policy": "backlog", "target_s": 10.0, "tokens_per_s": None, "each": 8.0, "interval_s": 5.0}
    made |= {"patience_s": 60.0, "least": 1, "most": 8, "folder": None if folder is None else str(folder)}
    return made | changes


def seen(at, queued=0, rate=100.0, ready=2, waiting=0, running=0):
    return Seen(at, ready, 0, waiting, running, 0.5, 1.0, queued, rate)


def test_queued_tokens_over_the_rate_stay_within_the_target():
    policy = Backlog(target_s=10.0)
    assert policy.wanted(seen(0, queued=3500)) == 3.5
    assert policy.wanted(seen(0, queued=3500, rate=0.0)) == 2
    assert Backlog(10.0, tokens_per_s=35.0).wanted(seen(0, queued=3500, rate=0.0)) == 10.0


def test_more_come_at_once_and_fewer_after_a_while():
    decider = Decider(**arguments())
    assert decider.decide(0, seen(0, queued=4500), 2).replicas == 5
    assert decider.decide(30, seen(30, ready=5), 5).replicas == 5
    decision = decider.decide(100, seen(100, ready=5), 5)
    assert decision.replicas == 1 and not decision.blind
    assert decider.decide(105, seen(105, queued=50_000, ready=1), 1).replicas == 8


@pytest.mark.parametrize(
    ("policy", "state", "reason"),
    [
        ("backlog", seen(0, queued=4000), "4000 queued tokens at 100 tokens/s keep 2 replicas busy for 20.0 s"),
        ("backlog", seen(0, rate=0.0), "the rate of a replica is not known yet"),
        ("backlog", seen(0, queued=99_000), "max is 8"),
        ("concurrency", seen(0, waiting=10, running=14), "24 requests, 8 for each replica"),
        ("fixed", seen(0), "the number is fixed"),
    ],
)
def test_every_decision_has_its_reason_in_the_log(tmp_path, policy, state, reason):
    decider = Decider(**arguments(tmp_path, policy=policy))
    decider.decide(7.0, state, 2)
    (line,) = newest(tmp_path)
    assert reason in line["reason"] and line["before"] == 2 and line["seen"]["queued_tokens"] == state.queued_tokens


def test_without_metrics_the_number_stays_and_says_so(tmp_path):
    decider = Decider(**arguments(tmp_path))
    decision = decider.decide(0, None, 3, missing=3)
    assert (decision.replicas, decision.blind) == (3, True) and "no metrics of any replica" in decision.reason
    decider = Decider(**arguments(tmp_path, patience_s=0.0))
    decision = decider.decide(0, seen(0, ready=3), 3, missing=1)
    assert (decision.replicas, decision.blind) == (3, True) and "no metrics of 1 replicas" in decision.reason
    assert decider.decide(5, seen(5, queued=9000), 3, missing=1).replicas == 8  # it may grow
    assert not decider.decide(10, None, 3).blind  # no replica is ready: nothing is missing


def test_the_alarm_is_raised_within_two_intervals():
    line = {"at": 100.0, "blind": False}
    assert not is_blind(line, 5.0, now=109.0) and is_blind(line, 5.0, now=111.0)
    assert is_blind(line | {"blind": True}, 5.0, now=101.0) and is_blind(None, 5.0)


def test_the_log_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(scaling, "MOST_LOG_BYTES", 2000)
    decider = Decider(**arguments(tmp_path))
    for at in range(40):
        decider.decide(at, seen(at), 2)
    sizes = {file.name: file.stat().st_size for file in tmp_path.iterdir()}
    assert set(sizes) == {"decisions.jsonl", "decisions.old.jsonl"} and max(sizes.values()) < 3000
    assert newest(tmp_path)[0]["at"] == 39
    (tmp_path / "decisions.jsonl").write_text('{"at": 1}\n{"at": 2, "rep')  # killed while writing
    assert newest(tmp_path, 2) == [{"at": 1}]


def context(metrics, running=2, target=2):
    by_name = {name: {f"r{n}": value for n, value in enumerate(values)} for name, values in metrics.items()}
    return SimpleNamespace(
        aggregated_metrics=by_name, running_replicas=[f"r{n}" for n in range(running)], target_num_replicas=target
    )


METRICS = {"queued_tokens": [3000.0, 500.0], "waiting": [3, 0], "running": [8, 2], "kv": [0.5, 0.1]}
METRICS |= {"tokens_per_s": [100.0, 0.0], "rate": [2.0, 2.0]}


def test_ray_metrics_become_a_state_of_the_fleet():
    found, missing = seen_of(context(METRICS, running=3, target=4))
    assert missing == 1 and (found.ready, found.starting) == (3, 1)
    assert (found.queued_tokens, found.waiting, found.running, found.tokens_per_s) == (3500, 3, 10, 100.0)
    assert seen_of(context({}, running=2)) == (None, 2)
    assert seen_of(context({}, running=0)) == (None, 0)


def test_rays_policy_decides_once_in_an_interval(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("ray.serve"), "propagate", True)
    caplog.set_level(logging.WARNING, logger="ray.serve")
    policy = FleetPolicy(**json.loads(json.dumps(arguments(tmp_path, interval_s=1000.0))))
    assert policy(context(METRICS)) == (4, {})
    assert policy(context({})) == (4, {}) and len(newest(tmp_path, 9)) == 1
    assert "from 2 to 4 replicas: 3500 queued tokens" in caplog.text
    policy._decider.interval_s = 0.0
    assert policy(context({}, target=4)) == (4, {}) and "the autoscaler is blind" in caplog.text
