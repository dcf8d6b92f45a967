"""Curves of runs: drawn from their logs, whatever they are drawn over."""

import json

import pytest

pytest.importorskip("matplotlib")

from transect.train.loop.curves import _bits_per_nat, draw, smoothed


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


def test_losses_can_be_bits_per_byte_beside_a_level(tmp_path) -> None:
    run = write_run(tmp_path / "a", [3.0, 2.0])
    with pytest.raises(ValueError, match="no validation in bits per byte"):
        draw([run], tmp_path / "x.svg", bits=True)
    with (run / "log.jsonl").open("a") as file:
        line = {"kind": "evaluation", "step": 2, "loss": 2.0, "bits_per_byte": 1.0}  # half a bit per byte for a nat
        file.write(json.dumps(line) + "\n")
    assert _bits_per_nat(run, [line]) == 0.5
    draw([run], tmp_path / "x.svg", bits=True, levels={"elsewhere": 1.25})
    assert (tmp_path / "x.svg").read_text().startswith("<?xml")


def test_a_directory_without_a_log_is_named(tmp_path) -> None:
    with pytest.raises(ValueError, match="has no log of steps"):
        draw([tmp_path], tmp_path / "x.png")
    with pytest.raises(ValueError, match="by step, tokens or time"):
        draw([tmp_path], tmp_path / "x.png", by="moon")


def test_smoothing_averages_what_came_before() -> None:
    assert smoothed([4.0, 2.0, 0.0], 2) == [4.0, 3.0, 1.0]
