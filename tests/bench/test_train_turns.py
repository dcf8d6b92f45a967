"""Contenders of a training race are timed in turns."""

import threading

from benchmarks.train.gpu import WARMING, Turns, next_of


def test_nobody_goes_first_in_every_round_and_nobody_waits_for_one_that_failed(tmp_path):
    path = Turns.begin(tmp_path / "turns", ["a", "b", "failed"])
    seen, timed = [], 0

    def race(name):
        nonlocal timed
        turns = Turns(path, name)
        for number in range(3):
            with turns.turn(number):
                timed += 1
                assert timed == 1  # alone
                seen.append((number, name))
                timed -= 1
        turns.leave()

    threads = [threading.Thread(target=race, args=(name,), daemon=True) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    assert not seen  # one still warms up
    Turns(path, "failed").leave()
    for thread in threads:
        thread.join(200)
    assert seen == [(0, "a"), (0, "b"), (1, "b"), (1, "a"), (2, "a"), (2, "b")]


def test_whose_turn_it_is():
    assert next_of({"a": 0, "b": WARMING}) == ""
    assert next_of({"a": 1, "b": 1, "late": 0}) == "late"
    with Turns("").turn(0):  # without others nobody waits
        pass
