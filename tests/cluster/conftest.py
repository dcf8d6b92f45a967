"""Fleets of engines without a model: the shipping router, links, hosts and engine processes, and made-up tokens."""

import os
from pathlib import Path

import pytest
import stub_engine
from small_fleet import Small
from tiny_llm import save_tiny_llm

from transect.cluster import settings as fleet_settings


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_llm(folder)
    return folder


@pytest.fixture
def settings(model, tmp_path, monkeypatch):
    """Settings of a fleet of stub engines, whose steps take two milliseconds."""
    source = str(Path(__file__).resolve().parents[2] / "src")
    path = [str(Path(stub_engine.__file__).parent), source, *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    monkeypatch.setenv("STUB_STEP_S", "0.002")
    return fleet_settings.build(
        {
            "name": "test",
            "folder": str(tmp_path / "fleet"),
            "engine": {"model": str(model), "hung-after": 1.0},
            "server": {"port": 0},
            "replicas": {"max": 4, "engine_module": "stub_engine", "drain_timeout_s": 20},
            "links": {"port": 0, "lost_after_s": 1.0, "wait_s": 30},
            "scaling": {"interval_s": 0.2},
            "ray": {"address": "local"},
        }
    )


@pytest.fixture
def held(settings, monkeypatch, tmp_path):
    """File that the first engine with some tokens of an answer makes, and then no more tokens."""
    monkeypatch.setenv("STUB_HOLD", str(tmp_path / "held"))
    return tmp_path / "held"


@pytest.fixture
async def small(settings):
    """Make a fleet in this process; it is closed at the end."""
    made = Small(settings)
    yield made
    await made.close()
