"""The fleet in ``/metrics``, in ``/v1/fleet``, and on its Grafana board."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from transect.cluster import metrics
from transect.cluster.scaling import Decision, write

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "monitoring" / "grafana" / "dashboards"
BOARD = json.loads((FOLDER / "fleet.json").read_text())
REPLICA = {"name": "r0", "generation": 1, "state": "ready", "queued_tokens": 7, "streams": 2, "tokens_per_s": 50.0}


@pytest.fixture
def fleet(tmp_path):
    scaling = SimpleNamespace(interval_s=5.0)
    settings = SimpleNamespace(place=tmp_path, scaling=scaling, name="chat")
    replicas = [REPLICA, REPLICA | {"name": "r1", "state": "leaving"}, REPLICA | {"name": "r2", "state": "gone"}]
    return SimpleNamespace(settings=settings, replicas=lambda: replicas, handed_over=3, refused=1, rate=0.5, began=-1e9)


def shown(fleet):
    registry = CollectorRegistry()
    registry.register(metrics.FleetCollector(fleet))
    return generate_latest(registry).decode()


def test_each_replica_has_its_load_and_those_that_are_gone_have_none(fleet):
    write(fleet.settings.place, Decision(1e12, 3, 2, "why", False, {}))
    text = shown(fleet)
    assert 'transect_fleet_replicas{state="ready"} 1.0' in text and 'state="leaving"} 1.0' in text
    assert 'transect_fleet_queued_tokens{replica="r0"} 7.0' in text and "r2" not in text
    assert "transect_fleet_wanted_replicas 3.0" in text and "transect_fleet_handed_over_total 3.0" in text
    assert 'transect_fleet_alarm{name="AutoscalerBlind"} 0.0' in text
    state = metrics.state_of(fleet)
    assert state["decisions"][0]["reason"] == "why" and state["alarms"] == []


def test_an_autoscaler_without_decisions_raises_the_alarm_but_not_at_the_start(fleet):
    assert 'transect_fleet_alarm{name="AutoscalerBlind"} 1.0' in shown(fleet)
    assert metrics.state_of(fleet)["alarms"] == ["AutoscalerBlind"]
    fleet.began = float("inf")
    assert metrics.state_of(fleet)["alarms"] == []


def test_the_board_asks_for_what_the_router_shows(fleet):
    write(fleet.settings.place, Decision(1e12, 3, 2, "why", False, {}))
    text = shown(fleet)
    there = {re.split(r"[{ ]", line)[0] for line in text.splitlines() if not line.startswith("#")}
    labels = set(re.findall(r'(\w+)="', text))
    asked = set()
    for panel in BOARD["panels"]:
        for target in panel["targets"]:
            names = set(re.findall(r"transect_\w+", target["expr"]))
            assert names and names <= there, target["expr"]
            assert set(re.findall(r"by \((\w+)\)", target["expr"])) <= labels
            asked |= names
    assert asked == {name for name in there if not name.endswith("_created")}


def test_grafana_reads_the_board():
    dashboard = pytest.importorskip("grafana_foundation_sdk.models.dashboard")
    encoder = pytest.importorskip("grafana_foundation_sdk.cog.encoder")
    again = json.loads(encoder.JSONEncoder(sort_keys=True).encode(dashboard.Dashboard.from_json(BOARD)))
    assert set(BOARD) <= set(again) and again["uid"] == "transect-fleet"
    for panel, kept in zip(BOARD["panels"], again["panels"], strict=True):
        assert kept["targets"] == panel["targets"] and panel["description"]
