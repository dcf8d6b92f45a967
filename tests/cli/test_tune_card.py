"""``transect tune`` without names: which card, which kernels, and the report."""

import json
from pathlib import Path

import pytest
import torch

from transect.cli import main, tune_card
from transect.costs.ceilings import Ceilings
from transect.hardware import device, gpu
from transect.hardware.cores import usable_cores
from transect.hardware.device import Device
from transect.hardware.targets import TARGETS
from transect.ops import tuning
from transect.ops.registry import all_ops, get
from transect.ops.tools import search, search_worker
from transect.ops.tools.search import Found, Trial


def test_its_units_are_launchers_with_such_a_case() -> None:
    all_ops()
    for name, launcher, part in tune_card.UNITS:
        op = get(name)
        assert launcher in [knobs.name for knobs in op.knobs()]
        assert any(part in case.name for case in op.cases()), part


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((), "torch finds none here"), (("--rows", "8"), "are for an operator or a model"),
     (("softmax", "--report", "x.json"), "--report is of a card")],
)  # fmt: skip
def test_what_a_user_can_get_wrong(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["tune", *arguments])
    assert stop.value.code == 2 and message in capsys.readouterr().err


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """An Ada card, as far as the command sees; searches find a configuration twice as fast as the rule's."""
    monkeypatch.setenv("TRANSECT_CACHE", str(tmp_path))
    tuning.choices.cache_clear()
    here = Device("cuda", "sm_89", "NVIDIA GeForce RTX 4090", "570", torch.__version__, 128, 24 << 30, uuid="GPU-1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: here.name)
    monkeypatch.setattr(device, "detect", lambda which: here)
    monkeypatch.setattr(device, "own_target", lambda which: TARGETS["sm_89"])
    monkeypatch.setattr(gpu, "measure", lambda: Ceilings(here.name, 9e11, 8e11, {"bfloat16": 1.5e14}))
    monkeypatch.setattr(search, "cases_of", lambda knobs, cases, device, part: [c for c in cases if part in c.name])
    monkeypatch.setattr(search_worker, "start", lambda *_: None)
    searched: list[str] = []

    def found(knobs: object, case: object, *, seconds: float, in_use: object) -> Found:
        searched.append(case.name)
        assert seconds > 0 and in_use(knobs.name, (64, 64)) is None
        slow, quick = Trial({"bn": 64}, 2e-5), Trial({"bn": 128}, 1e-5)
        return Found(knobs.name, case.name, f"bucket {len(searched)}", slow.config, [slow, quick], 3, [slow, quick])

    monkeypatch.setattr(search, "search", found)
    yield searched
    tuning.choices.cache_clear()


def test_a_card_is_tuned_kept_and_reported(card: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "card.json"
    with pytest.raises(SystemExit) as stop:
        main(["tune", "--report", str(report), "--seconds", "5"])
    assert not stop.value.code and usable_cores() > 0
    said = capsys.readouterr().out
    assert "RTX 4090 (sm_89): not measured by this project" in said.splitlines()[0]
    assert "reads 900 GB/s, multiplies bfloat16 at 150 TFLOP/s" in said
    assert len(card) == len(tune_card.UNITS)
    kept = json.loads((tmp_path / "tuned" / "nvidia_geforce_rtx_4090.json").read_text())
    assert kept["choices"]["matmul"] == {"bucket 4": {"bn": 128}}
    told = json.loads(report.read_text())
    assert told["device"]["name"] == "NVIDIA GeForce RTX 4090" and "uuid" not in told["device"]
    assert told["target"] == "sm_89" and told["ceilings"]["read_bytes_per_second"] == 9e11
    assert [each["gain"] for each in told["searches"]] == [2.0] * len(card)


def test_a_measured_card_is_said() -> None:
    assert "its choices are shipped" in tune_card.state("NVIDIA H200", "sm_90")
