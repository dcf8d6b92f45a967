"""The guide's objective, added in one file to a copy of the package: trained by, continued, and used."""

import json

import pytest
from tiny_llm import save_tiny_llm

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
def package(changed_packages):
    """A copy of the package with the change that the guide shows, a model and pairs."""
    made = changed_packages("docs/extend/objective.md")
    (made / "model").mkdir()
    save_tiny_llm(made / "model")
    rows = [{"prompt": f"{i} + 1?", "chosen": f"It is {i + 1}.", "rejected": "No idea!"} for i in range(24)]
    (made / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (made / "run.toml").write_text(RUN)
    return made


def transect(package, *arguments, code=0):
    done = package.transect(*arguments, code=code)
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
    assert package.answer("run/last", "2 + 1?", 4)


def test_what_is_wrong_with_its_table_is_said(package):
    told = transect(package, "train", "run.toml", "--set", "simpo.gama=1", "--set", "run_dir=other", code=2)
    assert "the setting simpo.gama is not known; did you mean simpo.gamma?" in told
    told = transect(package, "train", "run.toml", "--set", "objective=simp", "--set", "run_dir=other", code=2)
    assert "grpo, distill, eagle3, simpo" in told
