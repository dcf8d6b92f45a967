"""What an ``EngineConfig`` says about the machine that it runs on; its switches for a GPU."""

import os

import pytest

from transect.cli.engine_options import engine_config
from transect.engine import config
from transect.engine.config import EngineConfig
from transect.engine.executors.gpu.options import GPUOptions


def test_threads_are_the_cores_and_never_more(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = len(os.sched_getaffinity(0))
    assert EngineConfig(model="x", threads=cores).cpu_threads() == cores
    monkeypatch.setattr(config, "usable_cores", lambda: 1)
    assert EngineConfig(model="x").cpu_threads() == 1
    assert EngineConfig(model="x", threads=1).cpu_threads() == 1
    with pytest.raises(ValueError, match=f"threads is {cores + 1}, but this process may use {cores} cores"):
        EngineConfig(model="x", threads=cores + 1).cpu_threads()


@pytest.mark.parametrize(("said", "threads"), [("1", 1), ("2,4", 2), ("0", 1), ("99", 3), ("", 3), ("all", 3)])
def test_no_more_threads_than_the_environment_says(monkeypatch, said, threads):
    monkeypatch.setattr(config, "usable_cores", lambda: 3)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(4))
    monkeypatch.setenv("OMP_NUM_THREADS", said)
    assert EngineConfig(model="x").cpu_threads() == threads
    assert EngineConfig(model="x", threads=4).cpu_threads() == 4


def test_switches_for_a_gpu_are_options_of_their_own():
    made = EngineConfig(model="x", gpu=GPUOptions(dependent_launch=False, copy_kernels=False))
    assert (
        str(made) == "model=x, dependent_launch=False, copy_kernels=False" and str(EngineConfig(model="x")) == "model=x"
    )
    with pytest.raises(TypeError, match="copy_kernels"):
        EngineConfig(model="x", copy_kernels=False)
    with pytest.raises(ValueError, match=r"gpu must be GPUOptions\(...\), not {'copy_kernels': False}"):
        EngineConfig(model="x", gpu={"copy_kernels": False})
    with pytest.raises(ValueError, match="copy_kernels must be True or False, not 'off'"):
        GPUOptions(copy_kernels="off")


def test_flags_of_commands_reach_the_switches(monkeypatch):
    monkeypatch.setattr("transect.checkpoints.resolve.resolve", lambda model, **settings: None)
    made = engine_config("x", fused_operators=False, dependent_launch=True, threads=None, seed=3)
    assert made == EngineConfig(model="x", seed=3, gpu=GPUOptions(fused_operators=False))


def test_the_target_of_steps_is_milliseconds_auto_or_off():
    """The command line gives a text; a number will do too. A server sizes steps by time unless something else does."""
    found = [EngineConfig(model="x", itl_target=each).step_seconds for each in ("12.5", 12.5, "auto", "off", None)]
    assert found == [0.0125, 0.0125, 0.0, None, None]
    assert EngineConfig(model="x").for_server().itl_target == "auto"
    for kept in ({"itl_target": "off"}, {"itl_target": 8.0}, {"max_mixed_tokens": 384}, {"fill_steps": True}):
        assert EngineConfig(model="x", **kept).for_server() == EngineConfig(model="x", **kept)
    for wrong in ("soon", "-1", 0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="itl_target must be a number of milliseconds, auto or off, got"):
            EngineConfig(model="x", itl_target=wrong)
