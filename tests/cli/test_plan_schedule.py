"""``transect plan schedule``."""

import json

import pytest

from transect.cli import main


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as stopped:
        main(["plan", "schedule", *arguments])
    said = capsys.readouterr()
    return stopped.value.code, said.out, said.err


def test_schedules_are_drawn_with_their_bubbles(capsys):
    code, out, _ = run(capsys, "--pp", "4", "--microbatches", "8")
    assert code == 0 and "1f1b: 33 forward passes long, 27.3% of it waiting, at most 4 activations kept" in out
    assert "interleaved: 28.5 forward passes long, 15.8% of it waiting" in out and "of 1/2 of a stage each" in out


def test_a_schedule_comes_as_json_and_one_that_is_none_is_refused(capsys):
    code, out, err = run(capsys, "--pp", "2", "--microbatches", "3", "--json")
    assert code == 0 and json.loads(out)["gpipe"]["bubbles"] == pytest.approx([0.25, 0.25])
    assert "take 4" in err
    assert run(capsys, "--backward", "-1")[0] == run(capsys, "--link", "-1")[0] == 2
    code, _, err = run(capsys, "--pp", "2", "--microbatches", "3", "--schedule", "interleaved")
    assert code and "take 4" in err
