"""``transect sweep``: a run for each point of a grid, a table, and going on after an interruption."""

import pytest
from commands import run_here
from training_runs import tiny_run

from transect.train.loop.checkpoint import newest
from transect.train.loop.report import read_log
from transect.train.loop.sweep import read_grid, sweep


def write(tmp_path, grid, **base):
    tiny_run(tmp_path)
    lines = {"model": f"{tmp_path}/model", "run_dir": f"{tmp_path}/runs/s", "steps": 2, "device": "cpu", "threads": 1}
    text = "".join(f"{key} = {value!r}\n" for key, value in {**lines, **base}.items())
    data = f'train = ["{tmp_path}/text.txt"]\nvalidation = ["{tmp_path}/few.txt"]\nseq_len = 32\nmicro_batch = 64\n'
    (tmp_path / "run.toml").write_text(f"{text}[data]\n{data}")
    (tmp_path / "grid.toml").write_text(f'base = "run.toml"\n[grid]\n{grid}')
    return tmp_path / "grid.toml"


def test_every_point_is_trained_and_the_best_comes_first(tmp_path) -> None:
    grid = write(tmp_path, '"optimizer.learning_rate" = [1e-9, 1e-2]\nseed = [0, 1]\n')
    done = run_here("sweep", str(grid))
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if "runs" in line or "0.01" in line or "1e-09" in line]
    assert "0.01" in rows[0] and len(list((tmp_path / "runs" / "s").iterdir())) == 4
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("step-*")}
    again = run_here("sweep", str(grid))
    assert again.returncode == 0
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("step-*")} == stamps


def test_an_interrupted_sweep_goes_on_in_the_middle_of_a_run(tmp_path) -> None:
    points = read_grid(write(tmp_path, "seed = [0, 1]\n", steps=4))
    calls = iter([False, False, False, True, True, True, True])
    assert not list(sweep(points, lambda line: None, lambda: next(calls)))  # two steps of the first run
    assert len(read_log(points[0].config.run_dir)) == 2
    base = tmp_path / "run.toml"
    base.write_text(base.read_text().replace("threads = 1", "threads = 1\nkeep = 3"))  # nothing of what it finds
    points = read_grid(tmp_path / "grid.toml")
    outcomes = list(sweep(points, lambda line: None))
    assert newest(points[0].config.run_dir).state["config"]["keep"] == 3
    assert [found.steps for found in outcomes] == [4, 4]
    assert [line["step"] for line in read_log(points[0].config.run_dir) if line["kind"] == "step"] == [1, 2, 3, 4]


def test_runs_of_other_settings_are_not_taken_for_those_of_the_sweep(tmp_path) -> None:
    grid = write(tmp_path, "seed = [0]\n", epochs=0.01, steps=0)
    (first,) = sweep(read_grid(grid), lambda line: None)
    (same,) = sweep(read_grid(grid), lambda line: None)
    assert same == first and not first.problem
    base = tmp_path / "run.toml"
    base.write_text(base.read_text().replace("threads = 1", "threads = 1\nkeep = 3\nsave_every = 7"))
    assert not next(sweep(read_grid(grid), lambda line: None)).problem  # nothing that counts
    base.write_text(base.read_text().replace("epochs = 0.01", "epochs = 5"))
    problem = next(sweep(read_grid(grid), lambda line: None)).problem
    assert "holds a run with steps = 4, and this sweep asks for epochs = 5: move it" in problem
    base.write_text(base.read_text().replace("seq_len = 32", "seq_len = 16"))
    assert "holds a run with data.seq_len = 32, and this sweep asks for 16" in next(sweep(read_grid(grid))).problem


def test_torchrun_starts_no_sweep(tmp_path, monkeypatch) -> None:
    """Its ranks would each take another run, and meet in the first that has several."""
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "localhost")):
        monkeypatch.setenv(name, value)
    done = run_here("sweep", str(write(tmp_path, "seed = [0]\n")))
    assert done.returncode == 2 and "without torchrun" in done.stderr


@pytest.mark.prove
def test_runs_of_a_sweep_may_have_several_ranks(tmp_path) -> None:
    outcomes = list(sweep(read_grid(write(tmp_path, '"parallel.data" = [1, 2]\n', accumulate=2))))
    assert not any(found.problem for found in outcomes)
    assert outcomes[0].validation == pytest.approx(outcomes[1].validation, abs=1e-5)


def test_a_point_that_cannot_be_trained_keeps_no_other_from_it(tmp_path) -> None:
    grid = write(tmp_path, '"data.seq_len" = [32, 128]\n')  # the second does not fit into micro_batch
    with pytest.raises(ValueError, match=r"data\.micro_batch"):
        read_grid(grid)
    outcomes = list(sweep(read_grid(write(tmp_path, 'task = ["finetune", "lora"]\n"lora.targets" = [["q"]]\n'))))
    assert [bool(found.problem) for found in outcomes] == [False, False]
    grid = write(tmp_path, 'model = ["none", "MODEL"]\n'.replace("MODEL", f"{tmp_path}/model"))
    first, second = sweep(read_grid(grid), lambda line: None)
    assert "none" in first.problem and not second.problem and second.rank < first.rank
    assert run_here("sweep", str(grid)).returncode == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "needs base"),
        ('base = "run.toml"\n', r"needs base = .* \[grid\]"),
        ('base = "run.toml"\ngird = 1\n', "gird is not known"),
        ('base = "run.toml"\n[grid]\nseed = 3\n', "seed must be a list"),
        ('base = "run.toml"\n[grid]\nseeed = [3]\n', r"did you mean seed\?"),
        ('base = "run.toml"\n[grid]\nseed = [3, 3]\n', "are the same"),
    ],
)
def test_mistakes_are_named(tmp_path, text, message) -> None:
    grid = write(tmp_path, "")
    grid.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_grid(grid)
