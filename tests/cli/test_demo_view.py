"""What the demo draws in a terminal."""

import io
from xml.etree import ElementTree

from rich.console import Console

from transect.cli.demo_picture import svg_of
from transect.cli.demo_view import DemoView, Gauges, Talk, summary

METRICS = """# HELP transect_kv_cache_usage_ratio Share of the KV pool in use, 0 to 1
transect_kv_cache_usage_ratio 0.25
transect_sequences_running 8.0
transect_requests_waiting 2.0
"""


def talks():
    result = [Talk(number, f"Question {number}?") for number in range(1, 9)]
    for talk in result:
        talk.add(f"answer of {talk.number} with [brackets] and ")
        talk.add("more")
        talk.first_s, talk.last_s = 0.5, 2.5
    result[0].finish_reason = "stop"
    return result


def picture(width, height):
    console = Console(file=io.StringIO(), force_terminal=True, width=width, height=height, color_system=None)
    gauges = Gauges()
    gauges.take(METRICS)
    console.print(DemoView(console, talks(), gauges)._picture())
    return console.file.getvalue()


def test_picture_shows_every_chat_its_speed_and_the_kv_cache():
    text = picture(160, 40)
    for number in range(1, 9):
        assert f"Question {number}?" in text and f"answer of {number} with [brackets]" in text
    assert text.count("first 0.50 s") == 8
    assert "KV █████░" in text and "25.0%" in text and "8 running" in text


def test_picture_fits_small_terminals():
    for width, height in ((160, 40), (80, 24), (60, 50)):
        lines = picture(width, height).rstrip("\n").splitlines()
        assert max(map(len, lines)) <= width and len(lines) <= height


def test_speed_counts_from_the_first_token():
    talk = Talk(1, "x")
    for text in "abc":
        talk.add(text)
    talk.first_s, talk.last_s = 1.0, 2.0
    assert talk.per_second == 2.0


def test_summary_has_a_row_for_each_and_one_for_all():
    console = Console(file=io.StringIO(), width=100)
    gauges = Gauges()
    gauges.take(METRICS)
    console.print(summary(talks(), gauges))
    text = console.file.getvalue()
    assert text.count("Question") == 8 and "together" in text and "25.0%" in text


def test_a_picture_is_kept_when_the_second_talk_ends():
    every, gauges = talks(), Gauges()
    view = DemoView(Console(file=io.StringIO(), width=80), every, gauges, picture_width=132)
    view.finished(every[0])
    assert view.pictures == []
    every[1].finish_reason = "length"
    view.finished(every[1])
    every[2].finish_reason = "stop"
    view.finished(every[2])
    (kept,) = view.pictures
    svg = svg_of([kept, summary(every, gauges)], "transect demo")
    text = ElementTree.fromstring(svg)
    shown = "".join(text.itertext()).replace("\xa0", " ")
    assert "Question 8?" in shown and "first 0.50 s" in shown and "together" in shown and "transect demo" in shown
    assert "@font-face" not in svg and "url(http" not in svg
