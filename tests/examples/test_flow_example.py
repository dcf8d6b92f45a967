"""The whole story of ``examples/flow``, and its files."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from transect.flow.rows.reading import prompts_in
from transect.flow.settings import FlowConfig
from transect.train.config import TrainConfig

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "flow"


@pytest.mark.parametrize("name", ["first", "second", "broken", "sneaky"])
def test_a_flow_can_be_read_and_names_files_that_exist(name: str) -> None:
    config = FlowConfig.from_toml(FOLDER / f"{name}.toml")
    run = TrainConfig.from_toml(
        FOLDER / config.tables["train"].run, ["data.train=['x']", *config.tables["train"].settings]
    )
    assert run.task == "lora" and config.name == "capitals"
    made = {"pairs.jsonl"}  # by the users' feedback
    for file in (*config.tables["data"].files, *config.tables["gate"].files()):
        assert file in made or prompts_in(FOLDER / file)


@pytest.mark.prove
def test_the_story_comes_true(smollm2, tmp_path) -> None:
    """It checks each of its claims, and ends at the first that is not so."""
    command = [sys.executable, FOLDER / "run.py", "--dir", tmp_path / "flow"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2400)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    states = json.loads((tmp_path / "flow" / "registry" / "capitals.json").read_text())
    assert states["current"] == "capitals-v2"
    assert [entry["state"] for entry in states["history"] if entry["version"] == "capitals-v3"] == [
        "candidate",
        "rejected",
    ]
