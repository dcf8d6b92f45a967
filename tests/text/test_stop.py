"""Stop strings: the same cut for every chunking, and no more held back than could still matter."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transect.text.stop import StopMatcher

SMALL = st.text("ab \n", max_size=40)
STOPS = st.lists(st.text("ab \n", min_size=1, max_size=5), max_size=4)


def cut(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """By brute force: the first place where some stop string is complete; there the longest one."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return (text[:end] if include else text[: end - len(stop)]), stop
    return text, None


def chunks(text: str, borders: list[int]) -> list[str]:
    places = sorted({min(border, len(text)) for border in borders} | {0, len(text)})
    return [text[a:b] for a, b in pairwise(places)]


@settings(max_examples=600)
@given(text=SMALL, stops=STOPS, include=st.booleans(), borders=st.lists(st.integers(0, 40), max_size=40))
def test_any_chunking_cuts_as_a_search_of_the_whole(text, stops, include, borders):
    matcher = StopMatcher(stops, include)
    emitted, found = "", None
    for chunk in chunks(text, borders):
        safe, stop = matcher.push(chunk)
        emitted += safe
        if stop is not None:
            found = stop
            break
    emitted += matcher.flush()
    assert (emitted, found) == cut(text, stops, include)


@settings(max_examples=600)
@given(text=SMALL, stops=STOPS)
def test_holds_back_only_what_may_begin_a_stop_string(text, stops):
    matcher = StopMatcher(stops)
    emitted = ""
    for end, char in enumerate(text, start=1):
        safe, stop = matcher.push(char)
        if stop is not None:
            return
        emitted += safe
        starts = [n for stop in stops for n in range(1, len(stop)) if text[:end].endswith(stop[:n])]
        assert emitted == text[: end - max(starts, default=0)]


def test_the_one_that_is_complete_first_wins():
    assert StopMatcher(["abc", "b"]).push("xabc") == ("xa", "b")
    assert StopMatcher(["c", "abc"]).push("xabc") == ("x", "abc")


def test_nothing_more_comes_after_the_stop():
    matcher = StopMatcher(["stop"], include_stop=True)
    assert matcher.push("go st") == ("go ", None)
    assert matcher.push("op now") == ("stop", "stop")
    assert matcher.push("and on") == ("", "stop")
    assert matcher.flush() == ""
    assert matcher.stopped == "stop"


def test_without_stops_text_passes_through():
    matcher = StopMatcher()
    assert matcher.push("anything") == ("anything", None)
    assert matcher.flush() == ""


@pytest.mark.parametrize("stop", ["", 3, None])
def test_impossible_stops_are_refused(stop):
    with pytest.raises(ValueError, match="non-empty strings"):
        StopMatcher([stop])
