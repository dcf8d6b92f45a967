"""A run's directory as data for pages."""

import json

import pytest
from training_runs import tiny_run

from transect.train.loop import overview
from transect.train.loop.overview import runs_in
from transect.train.loop.report import RunLog
from transect.train.loop.trainer import Trainer


def trained(tmp_path):
    """The directory of a run of a few steps."""
    samples = {"prompts": ["The cat"], "every": 2, "max_tokens": 4}
    config = tiny_run(tmp_path, steps=4, run_dir=str(tmp_path / "runs" / "a"), samples=samples)
    log = RunLog(config.run_dir, tensorboard=False)
    Trainer(config).run([log])
    log.close()
    return tmp_path / "runs" / "a"


def test_a_run_is_described_with_its_settings_samples_and_memory(tmp_path):
    run = trained(tmp_path)
    found = json.loads(json.dumps(overview.overview(run)))
    assert [line["step"] for line in found["steps"]] == [1, 2, 3, 4] and found["every"] == 1
    assert [line["step"] for line in found["others"] if line["kind"] == "sample"] == [2, 4]
    assert found["config"]["steps"] == 4 and found["checkpoints"][-1] == 4 and found["layout"]["words"] == "one device"
    (account,) = found["memory"]
    assert account["peak"] == max(phase["bytes"] for phase in account["phases"]) > 0
    assert any(term["name"] == "optimizer state" and term["bytes"] for term in account["terms"])


def test_a_run_without_a_checkpoint_and_a_long_log_is_described_too(tmp_path, monkeypatch):
    monkeypatch.setattr(overview, "MOST_STEPS", 10)
    (tmp_path / "b").mkdir()
    lines = [{"kind": "step", "step": step, "loss": 1.0} for step in range(1, 26)]
    (tmp_path / "b" / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"kind": "st')
    found = overview.overview(tmp_path / "b")
    assert found["every"] == 3 and [line["step"] for line in found["steps"]] == [*range(1, 25, 3), 25]
    assert found["config"] is None and found["memory"] is None and found["checkpoints"] == []


def test_a_folder_of_runs_and_what_is_none(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "log.jsonl").write_text("")
    assert {path.name for path in runs_in(tmp_path)} == {"a", "b"} and runs_in(tmp_path / "a") == [tmp_path / "a"]
    (tmp_path / "c").mkdir()
    with pytest.raises(ValueError, match="holds no run: name a directory that transect train wrote"):
        runs_in(tmp_path / "c")
