"""Measured ceilings: kept for a device, driver and torch, and measured again when what was kept is of no use."""

import json
import os
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from transect.costs.ceilings import Ceilings
from transect.hardware import cpu, measured
from transect.hardware import load as load_module
from transect.hardware.device import Device, detect
from transect.hardware.load import wait_until_quiet

HERE = Device("cpu", "cpu", "A Processor (TM)", "", "2.0", 2, 10**9)
LIMITS = Ceilings("A Processor (TM), 2 threads", 1e10, 2e10, {"float32": 1e11}, 1e-6, memory_bytes=10**9)


AT = "2026-01-02T03:04:05+00:00"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How busy the machine is; a test may put another number in."""
    now = [0.0]
    monkeypatch.setattr(measured, "cpu_load", lambda: now[0])
    monkeypatch.setattr("transect.hardware.load.PATIENCE_S", 0.0)
    monkeypatch.setattr(measured, "wait_until_quiet", lambda load: wait_until_quiet(load, 0.0))
    return now


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, load: list[float]) -> list[Ceilings]:
    """Measurements taken so far."""
    taken: list[Ceilings] = []

    def measure() -> Ceilings:
        slower = 1 - load[0]
        rates = {"float32": LIMITS.flops_per_second["float32"] * slower}
        taken.append(replace(LIMITS, flops_per_second=rates) if load[0] else LIMITS)
        return taken[-1]

    monkeypatch.setenv("TRANSECT_CACHE", str(tmp_path))
    monkeypatch.setattr(cpu, "measure", measure)
    return taken


def test_measured_once(runs: list[Ceilings]) -> None:
    assert measured.ceilings(HERE) == LIMITS
    assert measured.ceilings(HERE) == LIMITS
    assert len(runs) == 1
    measured.ceilings(HERE, again=True)
    assert len(runs) == 2
    assert [path.suffix for path in measured.cache_file(HERE).parent.iterdir()] == [".json"]


@pytest.mark.parametrize("other", [{"torch": "2.1"}, {"driver": "600"}, {"units": 4}, {"name": "B"}], ids=str)
def test_another_key_is_measured_anew(runs: list[Ceilings], other: dict) -> None:
    measured.ceilings(HERE)
    measured.ceilings(replace(HERE, **other))
    assert len(runs) == 2


GOOD = {
    "format": measured.FORMAT,
    "key": HERE.key,
    **asdict(measured.Measurement(LIMITS, AT, 0.0, "2.0")),
}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        json.dumps(GOOD | {"format": 0}),
        json.dumps(GOOD | {"key": "another"}),
        json.dumps(GOOD | {"ceilings": {"device": "x"}}),
        json.dumps(GOOD | {"load": 7}),
        json.dumps({name: value for name, value in GOOD.items() if name != "at"}),
        json.dumps(GOOD | {"ceilings": asdict(LIMITS) | {"copy_bytes_per_second": 0}}),
        json.dumps(GOOD | {"ceilings": asdict(LIMITS) | {"flops_per_second": {"float32": "fast"}}}),
    ],
    ids=[
        "empty",
        "cut off",
        "no object",
        "old format",
        "other device",
        "fields missing",
        "load",
        "no date",
        "zero",
        "no number",
    ],
)
def test_a_damaged_file_means_measuring_again(runs: list[Ceilings], text: str) -> None:
    path = measured.cache_file(HERE)
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert measured.ceilings(HERE) == LIMITS
    assert len(runs) == 1
    written = json.loads(path.read_text())
    assert datetime.now(UTC) - datetime.fromisoformat(written["at"]) < timedelta(minutes=5)
    assert written | {"at": AT} == GOOD


def test_what_a_busy_machine_shows_is_kept_until_it_is_quieter(
    runs: list[Ceilings], load: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    load[0] = 0.8
    first = measured.measurement(HERE)
    assert first.busy and first.ceilings.flops_per_second["float32"] == pytest.approx(2e10)
    assert "80% busy with other work" in caplog.text and "while the machine was 80% busy" in str(first)
    load[0] = 0.7
    assert measured.measurement(HERE) == first and len(runs) == 1, "not much quieter"
    load[0] = 0.0
    second = measured.measurement(HERE)
    assert not second.busy and second.ceilings == LIMITS and str(second).endswith("with torch 2.0 on a quiet machine")
    load[0] = 0.9
    assert measured.measurement(HERE) == second and len(runs) == 2


def test_a_second_look_never_lowers_a_ceiling(runs: list[Ceilings], load: list[float]) -> None:
    load[0] = 0.5
    measured.measurement(HERE)
    load[0] = 0.2
    better = replace(LIMITS, flops_per_second={"float32": 1e9}, read_bytes_per_second=5e10, launch_seconds=2e-6)
    cpu.measure = lambda: better  # type: ignore[assignment]  # the fixture puts it back
    found = measured.measurement(HERE)
    assert found.load == 0.2
    assert found.ceilings.flops_per_second["float32"] == pytest.approx(5e10)
    assert (found.ceilings.read_bytes_per_second, found.ceilings.launch_seconds) == (5e10, 1e-6)


def test_multiply_adds_raise_the_rate_and_are_kept(runs: list[Ceilings]) -> None:
    assert measured.measurement(HERE).multiply_adds is None
    found = measured.measurement(HERE, multiply_adds=lambda: 3e11)
    assert len(runs) == 1 and found.ceilings.rate("float32") == found.multiply_adds == 3e11
    assert measured.measurement(HERE, multiply_adds=lambda: 1 / 0) == found
    assert measured.ceilings(HERE) == found.ceilings, "the same everywhere"
    slower = measured.measurement(HERE, again=True, multiply_adds=lambda: 1e10)
    assert slower.ceilings.rate("float32") == LIMITS.flops_per_second["float32"]


def test_halves_can_be_computed_as_floats() -> None:
    limits = replace(LIMITS, flops_per_second={"float32": 1e11, "bfloat16": 2e10})
    assert limits.rate("bfloat16") == 1e11
    assert replace(limits, flops_per_second={"float32": 1e11, "bfloat16": 8e11}).rate("bfloat16") == 8e11


def test_load_of_the_cores_that_are_ours(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    ours = next(iter(os.sched_getaffinity(0)))
    lines = ["cpu 9 9 9 9 9 9 9 9\ncpu{} 10 0 0 90 0 0 0 0 0 0\n", "cpu 9 9 9 9\ncpu{} 35 0 0 165 0 0 0 0 0 0\n"]

    def sleep(seconds: float) -> None:
        stat.write_text(lines[1].format(ours))

    stat.write_text(lines[0].format(ours))
    monkeypatch.setattr(load_module, "STAT", stat)
    monkeypatch.setattr(load_module.time, "sleep", sleep)
    assert load_module.cpu_load() == pytest.approx(0.25)
    stat.write_text("intr 1")
    lines[1] = "intr 2"
    assert load_module.cpu_load() == 0.0


def test_load_of_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\n[ $2 = GPU-1 ] && echo 37\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert load_module.gpu_load("GPU-1") == 0.37 and load_module.gpu_load("GPU-2") == 0.0


def test_waiting_for_quiet_ends_either_way() -> None:
    seen = iter([0.9, 0.5, 0.05, 0.9])
    assert wait_until_quiet(lambda: next(seen), 60.0) == 0.05
    assert wait_until_quiet(lambda: 0.6, 0.0) == 0.6


def test_this_processor_is_found() -> None:
    found = detect("cpu")
    assert found.kind == "cpu" and found.name and found.memory_bytes > 2**28


@pytest.mark.parametrize("name", ["tpu", "mps", "cuda:99"])
def test_unknown_device(name: str) -> None:
    with pytest.raises(ValueError, match=r"use auto, cpu|use --device cpu|there is no"):
        detect(name)


def test_processor_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "PROBE_BYTES", 2**20)
    monkeypatch.setattr(cpu, "MATRIX", 64)
    monkeypatch.setattr(cpu, "LAUNCHES", 10)
    limits = cpu.measure()
    assert set(limits.flops_per_second) == {"float32", "bfloat16"}
    assert min(limits.read_bytes_per_second, limits.copy_bytes_per_second, *limits.flops_per_second.values()) > 1e6
    assert limits.host_to_device_bytes_per_second is None
