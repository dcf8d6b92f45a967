"""Curves of runs: drawn from their logs, whatever they are drawn over."""

import json

import pytest

pytest.importorskip("matplotlib")

from transect.train.curves import draw, smoothed


def write_run(folder, losses):
    folder.mkdir()
    with (folder / "log.jsonl").open("w") as file:
        for step, loss in enumerate(losses, 1):
            line = {"kind": "step", "step": step, "loss": loss, "tokens": 10, "seconds": 0.5, "tokens_per_second": 20.0}
            file.write(json.dumps(line) + "\n")
        file.write(json.dumps({"kind": "evaluation", "step": len(losses), "loss": 1.25}) + "\n")
    return folder


@pytest.mark.parametrize("by", ["step", "tokens", "time"])
def test_draws_several_runs(tmp_path, by: str) -> None:
    runs = [write_run(tmp_path / "a", [3.0, 2.0, 1.0]), write_run(tmp_path / "b", [2.0, 1.5])]
    lines = draw(runs, tmp_path / "curves.png", by=by)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert lines == [
        "a: 3 steps, loss 1.0000, validation 1.2500, 20 tokens/s",
        "b: 2 steps, loss 1.5000, validation 1.2500, 20 tokens/s",
    ]


def test_a_directory_without_a_log_is_named(tmp_path) -> None:
    with pytest.raises(ValueError, match="has no log of steps"):
        draw([tmp_path], tmp_path / "x.png")
    with pytest.raises(ValueError, match="by step, tokens or time"):
        draw([tmp_path], tmp_path / "x.png", by="moon")


def test_smoothing_averages_what_came_before() -> None:
    assert smoothed([4.0, 2.0, 0.0], 2) == [4.0, 3.0, 1.0]
