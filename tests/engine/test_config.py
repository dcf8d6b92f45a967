"""What an ``EngineConfig`` says about the machine that it runs on."""

import os

import pytest

from transect.engine import config
from transect.engine.config import EngineConfig


def test_threads_are_the_cores_and_never_more(monkeypatch):
    cores = len(os.sched_getaffinity(0))
    assert EngineConfig(model="x", threads=cores).cpu_threads() == cores
    monkeypatch.setattr(config, "usable_cores", lambda: 1)
    assert EngineConfig(model="x").cpu_threads() == 1
    assert EngineConfig(model="x", threads=1).cpu_threads() == 1
    with pytest.raises(ValueError, match=f"threads is {cores + 1}, but this process may use {cores} cores"):
        EngineConfig(model="x", threads=cores + 1).cpu_threads()
