"""The guide's objective, added in one file to a copy of the package: trained by, continued, and used."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from shutil import copytree, ignore_patterns

import pytest
from tiny_llm import save_tiny_llm

ROOT = Path(__file__).parents[3]
RUN = """
model = "model"
objective = "simpo"
run_dir = "run"
steps = 4
device = "cpu"
log_to = []

[data]
train = ["pairs.jsonl"]
validation = ["pairs.jsonl"]
seq_len = 256
micro_batch = 1024

[simpo]
gamma = 0.5
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """A copy of the package with the change that the guide shows, a model and pairs."""
    folder = tmp_path_factory.mktemp("package")
    copytree(ROOT / "src", folder / "src", ignore=ignore_patterns("__pycache__"))
    (change,) = re.findall(r"```diff\n(.*?)```", (ROOT / "docs/extend/objective.md").read_text(), re.DOTALL)
    assert change.count("diff --git") == 1 and "new file" in change
    subprocess.run(["git", "apply", "-"], input=change, text=True, cwd=folder, check=True)
    (folder / "model").mkdir()
    save_tiny_llm(folder / "model")
    rows = [{"prompt": f"{i} + 1?", "chosen": f"It is {i + 1}.", "rejected": "No idea!"} for i in range(24)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "run.toml").write_text(RUN)
    return folder


def transect(package, *arguments, code=0):
    done = subprocess.run(
        [sys.executable, "-m", "transect", *arguments], cwd=package, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(package / "src")},
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


def steps(package):
    lines = [json.loads(line) for line in (package / "run" / "log.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "step"]


def test_a_run_by_an_objective_that_is_one_file(package):
    transect(package, "train", "run.toml")
    first = steps(package)
    assert len(first) == 4 and all(0 <= line["accuracy"] <= 1 for line in first)
    config = json.loads((package / "run" / "last" / "train_state.json").read_text())["state"]["config"]
    assert config["own"] == {"beta": 2.0, "gamma": 0.5} and config["optimizer"]["learning_rate"] == 1e-6
    transect(package, "train", "--resume", "--run", "run", "--steps", "6", "--set", "simpo.beta=2.5")
    assert len(steps(package)) == 6
    assert "tok/s" in transect(package, "generate", "run/last", "2 + 1?", "--max-tokens", "4")


def test_what_is_wrong_with_its_table_is_said(package):
    told = transect(package, "train", "run.toml", "--set", "simpo.gama=1", "--set", "run_dir=other", code=2)
    assert "the setting simpo.gama is not known; did you mean simpo.gamma?" in told
    told = transect(package, "train", "run.toml", "--set", "objective=simp", "--set", "run_dir=other", code=2)
    assert "grpo, distill, eagle3, simpo" in told
