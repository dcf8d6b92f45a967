"""Verifiers of the operator's: scores, limits, and ends of their processes."""

import os
import signal

import pytest

from transect.search.programs import Verifier, named_places

CODE = """
import os, time
def right(question, answer):
    return answer.strip() == str(eval(question))
def count(question, answer):
    print("noise on standard output")
    return len(answer)
def nothing(question, answer):
    return None
def fail(question, answer):
    raise RuntimeError("no idea")
def trouble(question, answer):
    if answer == "sleep":
        time.sleep(60)
    if answer == "memory":
        return len(bytearray(2**31))
    if answer == "exit":
        os._exit(1)
    return 1
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("verifiers") / "checks.py"
    path.write_text(CODE)
    return path


def test_scores_are_numbers_truth_values_or_none(file):
    for function, expected in (("right", 1.0), ("count", 1.0), ("nothing", None), ("fail", None)):
        verifier = Verifier(f"{file}:{function}")
        assert verifier("2+2", "4") == expected
        if function == "right":
            assert verifier("2+2", "5") == 0.0
        verifier.close()


def test_a_call_that_needs_too_much_has_no_score_and_harms_no_later_one(file):
    """Time, memory, and an end of the process."""
    verifier = Verifier(f"{file}:trouble", time_limit_s=0.5, memory_limit_bytes=2**28)
    for answer in ("sleep", "memory", "exit"):
        assert verifier("", answer) is None
        assert verifier("", "good") == 1.0
    os.kill(verifier.pid, signal.SIGKILL)
    assert verifier("", "good") is None or verifier("", "good") == 1.0
    assert verifier("", "good") == 1.0
    verifier.close()
    assert verifier.pid is None


@pytest.mark.parametrize(
    ("place", "sentence"),
    [
        ("checks.py", "a verifier is FILE.py:FUNCTION"),
        ("checks.txt:right", "a verifier is FILE.py:FUNCTION"),
        ("missing.py:right", "has no file"),
    ],
)
def test_places_that_are_none_are_refused(place, sentence):
    with pytest.raises(ValueError, match=sentence):
        Verifier(place)


def test_a_file_that_cannot_be_imported_is_reported_at_the_start(file, tmp_path):
    with pytest.raises(ValueError, match="AttributeError"):
        Verifier(f"{file}:missing").start()
    (tmp_path / "broken.py").write_text("import nowhere_to_be_found")
    with pytest.raises(ValueError, match="ModuleNotFoundError"):
        Verifier(f"{tmp_path}/broken.py:f").start()


def test_names_of_verifiers():
    assert named_places(("a=f.py:g", "b=h.py:i"), "--verifier") == {"a": "f.py:g", "b": "h.py:i"}
    with pytest.raises(ValueError, match="names a twice"):
        named_places(("a=f.py:g", "a=h.py:i"), "--verifier")
