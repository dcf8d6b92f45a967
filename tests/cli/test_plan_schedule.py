"""``transect plan schedule``."""

import json

import pytest

from transect.cli import main


def test_schedules_are_drawn_with_their_bubbles(capsys):
    assert main(["plan", "schedule", "--pp", "4", "--microbatches", "8"]) == 0
    out = capsys.readouterr().out
    assert "1f1b: 33 forward passes long, 27.3% of it waiting, at most 4 activations kept" in out
    assert "interleaved: 28.5 forward passes long, 15.8% of it waiting" in out and "of 1/2 of a stage each" in out


def test_a_schedule_comes_as_json_and_one_that_is_none_is_refused(capsys):
    assert main(["plan", "schedule", "--pp", "2", "--microbatches", "3", "--json"]) == 0
    written = capsys.readouterr()
    assert json.loads(written.out)["gpipe"]["bubbles"] == pytest.approx([0.25, 0.25])
    assert "take 4" in written.err
    assert main(["plan", "schedule", "--pp", "2", "--microbatches", "3", "--schedule", "interleaved"]) != 0
    assert "take 4" in capsys.readouterr().err
