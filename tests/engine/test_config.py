"""What an ``EngineConfig`` says about the machine that it runs on; its switches for a GPU."""

import dataclasses
import os

import pytest

from transect.cli.engine_options import engine_config
from transect.engine import config
from transect.engine.config import EngineConfig, StepLimit
from transect.engine.executors.gpu.options import GPUOptions
from transect.engine.frontends.vllm_arguments import engine_settings
from transect.server.options import ServerOptions
from transect.spec.settings import meanings, settings_of


def test_threads_are_the_cores_and_never_more(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = len(os.sched_getaffinity(0))
    assert EngineConfig(model="x", threads=cores).cpu_threads() == cores
    monkeypatch.setattr(config, "usable_cores", lambda: 1)
    assert EngineConfig(model="x").cpu_threads() == 1
    assert EngineConfig(model="x", threads=1).cpu_threads() == 1
    with pytest.raises(ValueError, match=f"threads is {cores + 1}, but this process may use {cores} cores"):
        EngineConfig(model="x", threads=cores + 1).cpu_threads()


@pytest.mark.parametrize(
    ("cores", "ranks", "asked", "threads"),
    [(3, 1, "", 3), (4, 1, "", 3), (16, 1, "", 15), (4, 2, "", 4), (8, 2, "", 7), (8, 1, "2", 2), (8, 1, "8", 7)],
)
def test_a_server_has_a_core_beside_the_engine(monkeypatch, cores, ranks, asked, threads):
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    monkeypatch.setattr(config, "usable_cores", lambda: cores)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cores))
    made = EngineConfig(model="x", tensor_parallel_size=ranks)
    assert made.cpu_threads(served=True) == threads and made.cpu_threads() == min(cores, int(asked or cores))
    assert EngineConfig(model="x", threads=cores).cpu_threads(served=True) == cores


@pytest.mark.parametrize(("said", "threads"), [("1", 1), ("2,4", 2), ("0", 1), ("99", 3), ("", 3), ("all", 3)])
def test_no_more_threads_than_the_environment_says(monkeypatch, said, threads):
    monkeypatch.setattr(config, "usable_cores", lambda: 3)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(4))
    monkeypatch.setenv("OMP_NUM_THREADS", said)
    assert EngineConfig(model="x").cpu_threads() == threads
    assert EngineConfig(model="x", threads=4).cpu_threads() == 4


def test_switches_for_a_gpu_are_options_of_their_own():
    made = EngineConfig(model="x", gpu=GPUOptions(dependent_launch=False, peer_sums=False))
    assert str(made) == "model=x, dependent_launch=False, peer_sums=False" and str(EngineConfig(model="x")) == "model=x"
    with pytest.raises(TypeError, match="peer_sums"):
        EngineConfig(model="x", peer_sums=False)
    with pytest.raises(ValueError, match=r"gpu must be GPUOptions\(...\), not {'peer_sums': False}"):
        EngineConfig(model="x", gpu={"peer_sums": False})
    with pytest.raises(ValueError, match="peer_sums must be True or False, not 'off'"):
        GPUOptions(peer_sums="off")


def test_flags_of_commands_reach_the_switches(monkeypatch):
    monkeypatch.setattr("transect.checkpoints.resolve.resolve", lambda model, **settings: None)
    made = engine_config("x", fused_operators=False, dependent_launch=True, threads=None, seed=3)
    assert made == EngineConfig(model="x", seed=3, gpu=GPUOptions(fused_operators=False))


def test_one_setting_limits_steps_by_tokens_by_time_or_by_when_all_ends():
    """A server limits steps by time unless it is told otherwise."""
    limits = {
        None: StepLimit(),
        "full": StepLimit(),
        "auto": StepLimit(seconds=0.0),
        "12.5ms": StepLimit(seconds=0.0125),
        "512tokens": StepLimit(tokens=512),
        "512 tokens": StepLimit(tokens=512),
        "fill": StepLimit(fill=True),
    }
    for text, limit in limits.items():
        made = EngineConfig(model="x", mixed_step_limit=text)
        assert made.step_limit == limit
        assert made.for_server().mixed_step_limit == (text or "auto")
    assert EngineConfig(model="x", batching="static").for_server().mixed_step_limit is None
    for wrong in ("soon", "-1ms", "0ms", "infms", "nanms", "0tokens", "1.5tokens", "", 512, 12.5, True):
        with pytest.raises(ValueError, match="mixed_step_limit must be full, fill, auto, a time such as 30ms"):
            EngineConfig(model="x", mixed_step_limit=wrong)


def test_settings_of_earlier_versions_say_what_to_give_now():
    for old, words in (("max_mixed_tokens", "512tokens"), ("fill_steps", "fill or full"), ("itl_target", "30ms")):
        with pytest.raises(TypeError, match=f"{old} was removed: give mixed_step_limit.*{words}"):
            engine_settings({old: 1})


def test_every_setting_is_explained_checked_and_an_option_where_it_can_be():
    """The one place of a setting is its field: no entry of the docstring is for a field that is gone."""
    for kind in (EngineConfig, GPUOptions, ServerOptions):
        settings = settings_of(kind)
        assert set(meanings(kind)) == {each.name for each in dataclasses.fields(kind)}
        for each in settings:
            assert each.group and each.help.endswith((".", ")")) and len(each.help) < 190, each.name
    for field, value in (("port", 70000), ("keep_alive_s", -1), ("log_level", "loud"), ("request_log", "xml")):
        with pytest.raises(ValueError, match=f"{field} must be"):
            ServerOptions(model_names=("m",), **{field: value})
