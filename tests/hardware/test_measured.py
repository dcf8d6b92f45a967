"""Measured ceilings: kept for a device, driver and torch, and measured again when what was kept is of no use."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from transect.hardware import cpu, measured
from transect.hardware.ceilings import Ceilings
from transect.hardware.device import Device, detect

HERE = Device("cpu", "cpu", "A Processor (TM)", "", "2.0", 2, 10**9)
LIMITS = Ceilings("A Processor (TM), 2 threads", 1e10, 2e10, {"float32": 1e11}, 1e-6, memory_bytes=10**9)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Ceilings]:
    """Measurements taken so far."""
    taken: list[Ceilings] = []

    def measure() -> Ceilings:
        taken.append(LIMITS)
        return LIMITS

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


GOOD = {"format": measured.FORMAT, "key": HERE.key, "ceilings": asdict(LIMITS)}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        json.dumps(GOOD | {"format": 0}),
        json.dumps(GOOD | {"key": "another"}),
        json.dumps(GOOD | {"ceilings": {"device": "x"}}),
        json.dumps(GOOD | {"ceilings": asdict(LIMITS) | {"copy_bytes_per_second": 0}}),
        json.dumps(GOOD | {"ceilings": asdict(LIMITS) | {"flops_per_second": {"float32": "fast"}}}),
    ],
    ids=["empty", "cut off", "no object", "old format", "other device", "fields missing", "zero", "no number"],
)
def test_a_damaged_file_means_measuring_again(runs: list[Ceilings], text: str) -> None:
    path = measured.cache_file(HERE)
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert measured.ceilings(HERE) == LIMITS
    assert len(runs) == 1
    assert json.loads(path.read_text()) == GOOD


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
