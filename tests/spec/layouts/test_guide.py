"""The guide's pipeline schedule, added in one file to a copy of the package: planned with, trained by, and used."""

import json

import pytest
from tiny_llm import save_tiny_llm

RUN = """
model = "model"
steps = 3
accumulate = 4
device = "cpu"
threads = 1
log_to = []
data = {train = ["text.txt"], seq_len = 32, micro_batch = 64}
"""


@pytest.fixture(scope="module")
def package(changed_packages):
    """A copy of the package with the change that the guide shows, a model and a text."""
    made = changed_packages("docs/extend/layout.md")
    (made / "model").mkdir()
    save_tiny_llm(made / "model", num_hidden_layers=4)
    (made / "text.txt").write_text("The cat sat on the mat. " * 200)
    (made / "run.toml").write_text(RUN)
    return made


def transect(package, *arguments, code=0):
    done = package.transect(*arguments, code=code)
    return done.stdout + done.stderr


def losses(package, name, *changes):
    settings = [word for change in (f'run_dir="{name}"', *changes) for word in ("--set", change)]
    transect(package, "train", "run.toml", *settings)
    lines = [json.loads(line) for line in (package / name / "log.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "step"]


def test_it_is_planned_drawn_and_accounted_for(package):
    drawn = transect(package, "plan", "schedule", "--pp", "4", "--microbatches", "16", "--link", "0.5", "--json")
    found = json.loads(drawn[: drawn.rindex("}") + 1])
    assert found["eager"]["length"] < found["1f1b"]["length"]
    assert found["eager"]["kept"] == [7, 5, 3, 1] and found["1f1b"]["kept"] == [4, 3, 2, 1]
    asked = ("memory", "run.toml", "--train", "--pp", "2", "--device-memory", "8GB", "--json", "--set", "accumulate=8")
    peaks = [
        json.loads(transect(package, *asked, "--set", f'parallel.schedule="{name}"'))["ranks"][0]["peak"]
        for name in ("1f1b", "eager")
    ]
    assert peaks[0] < peaks[1]


def test_two_ranks_train_by_it_as_one_does(package):
    one = losses(package, "alone")
    two = losses(package, "staged", "parallel.pipeline=2", 'parallel.schedule="eager"')
    assert len(one) == 3 and two == pytest.approx(one, abs=1e-5)
    assert package.answer("staged/last", "The", 4)


def test_a_name_that_is_none_is_refused_with_all_there_are(package):
    told = transect(
        package, "train", "run.toml", "--set", "parallel.pipeline=2", "--set", "parallel.schedule=lazy", code=2
    )
    assert "1f1b, eager, gpipe, interleaved" in told
