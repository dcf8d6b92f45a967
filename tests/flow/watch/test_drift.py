"""Drift: p-values hold without drift, planted drifts are found, and reports reach the metrics."""

import json
import math

import numpy as np
import pytest
from effort import proving

from transect.flow.watch import captures
from transect.flow.watch.drift import Baseline, DriftSettings, check_window
from transect.flow.watch.follow import follow, newest_window
from transect.flow.watch.models import judge_at, remembered
from transect.flow.watch.records import Observation, independent, observation_of, observations, reference_in
from transect.flow.watch.refusals import is_refusal
from transect.flow.watch.report import read_report
from transect.flow.watch.two_sample import (
    excess_test,
    lower_mean_statistic,
    ordered_statistic,
    permutation_test,
    rates_test,
    vector_statistic,
)

WORDS = [f"word{number}" for number in range(40)]
SORRY = "I'm sorry, but I can't help with that."


def embed(texts):
    """Counts of words: a vector that knows nothing of length alone."""
    return np.array([[text.split().count(word) / (1 + len(text.split())) for word in WORDS] for text in texts], "f4")


def text(draw, words=WORDS, most=12):
    return " ".join(draw.choice(words, draw.integers(3, most)))


def some(draw, count, refusing=0.02, words=WORDS, most=12, answers=None, **more):
    return [
        Observation(
            text(draw, words, most), SORRY if draw.random() < refusing else text(draw, answers or words), **more
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize(
    "prepare",
    [
        lambda x: vector_statistic(x),
        lambda x: ordered_statistic(np.round(x[:, 0], 1)),
        lambda x: lower_mean_statistic(x[:, 0]),
    ],
    ids=["vectors", "lengths", "means"],
)
def test_p_values_are_no_smaller_than_they_say(prepare):
    """P(p <= level) <= level; a wrong test would be far above with so many windows."""
    draw = np.random.default_rng(0)
    windows = 4000 if proving() else 400
    found = np.array(
        [permutation_test(prepare(draw.standard_normal((60, 6))), 20, 40, 2000, draw).p for _ in range(windows)]
    )
    for level in (0.01, 0.05, 0.2, 0.5):
        spread = math.sqrt(level * (1 - level) / windows)
        assert abs((found <= level).mean() - level) < 4 * spread + 1e-3


def test_early_stopping_gives_the_p_value_of_all_permutations():
    draw = np.random.default_rng(1)
    values = draw.standard_normal(60)
    values[:20] -= 0.45
    whole = np.mean([permutation_test(lower_mean_statistic(values), 20, 40, 20_000, draw).p for _ in range(20)])
    labels = draw.permuted(np.repeat([[1.0] * 20 + [0.0] * 40], 50_000, axis=0), axis=1)
    drawn = lower_mean_statistic(values)(labels)
    exact = (drawn >= values[20:].mean() - values[:20].mean() - 1e-5).mean()
    assert abs(whole / exact - 1) < 0.15 and 0.005 < exact < 0.1


def test_rates_agree_with_scipys():
    stats = pytest.importorskip("scipy.stats")
    for hits, window, before, reference in ((10, 256, 5, 512), (0, 20, 9, 30), (3, 3, 0, 40), (0, 16, 0, 16)):
        table = [[hits, window - hits], [before, reference - before]]
        expected = stats.fisher_exact(table).pvalue
        assert math.isclose(rates_test(hits, window, before, reference).p, expected, rel_tol=1e-6)
    for hits, count, limit in ((3, 256, 0.01), (0, 20, 0.1), (20, 20, 0.5)):
        expected = stats.binomtest(hits, count, limit, alternative="greater").pvalue
        assert math.isclose(excess_test(hits, count, limit).p, expected, rel_tol=1e-6)


def test_a_window_without_drift_raises_alarms_at_the_stated_rate():
    """1 in 20 here, for the sake of time: the level is the tests' own, whatever it is."""
    draw = np.random.default_rng(2)
    settings = DriftSettings(window=32, false_alarms=0.05, judged=16)
    windows = 2000 if proving() else 100
    alarmed = 0
    for number in range(windows):
        baseline = Baseline.of(some(draw, 64), settings, embed)
        alarmed += bool(check_window(baseline, some(draw, 32), settings, embed, number=number).alarms)
    assert alarmed <= windows * 0.05 + 3 * math.sqrt(windows * 0.05)


PLANTED = {
    "PromptDrift": {"words": WORDS[:25], "answers": WORDS},
    "AnswerDrift": {"answers": WORDS[:25]},
    "PromptLengthDrift": {"most": 20},
    "RefusalDrift": {"refusing": 0.25},
    "SchemaFailures": {"form": "json", "valid": False},
}


@pytest.mark.parametrize("alarm", PLANTED)
def test_planted_drifts_are_found(alarm):
    draw = np.random.default_rng(3)
    settings = DriftSettings(window=128)
    baseline = Baseline.of(some(draw, 300), settings, embed, most=256)
    assert not check_window(baseline, some(draw, 128), settings, embed).alarms
    assert alarm in check_window(baseline, some(draw, 128, **PLANTED[alarm]), settings, embed).alarms


def test_a_judge_that_likes_answers_less_is_heard():
    draw = np.random.default_rng(4)
    settings = DriftSettings(window=64)

    def judge(found):
        return [None if len(each.answer) % 7 == 0 else float("bad" not in each.answer) for each in found]

    baseline = Baseline.of(some(draw, 200, refusing=0), settings, judge=judge)
    worse = some(draw, 64, refusing=0, answers=[*WORDS, *["bad"] * 4])
    report = check_window(baseline, worse, settings, judge=judge)
    assert report.alarms == ["JudgeScoreDrop"]
    assert not check_window(baseline, some(draw, 64, refusing=0), settings, judge=judge).alarms


def test_an_embedding_is_computed_once():
    asked = []

    def vectors(texts):
        asked.extend(texts)
        return embed(texts)

    twice = remembered(vectors)
    assert np.array_equal(twice(["word1", "word2", "word1"]), embed(["word1", "word2", "word1"]))
    assert np.array_equal(twice(["word2", "word3"]), embed(["word2", "word3"])) and asked == ["word1", "word2", "word3"]


def test_observations_of_records():
    chat = {
        "kind": "request",
        "time": 5.0,
        "model": "m",
        "form": "json",
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "one"}]},
            {"role": "assistant", "content": "a"},
            {"role": "user", "content": "two"},
        ],
        "answers": [{"choice": 0, "text": "yes", "valid": False}, {"choice": 1, "text": "no"}],
    }
    found = observation_of(chat)
    assert (found.prompt, found.answer, found.valid, found.model) == ("two", "yes", False, "m") and found.conversation
    plain = observation_of({"kind": "request", "prompts": ["p"], "answers": [{"text": "t"}]})
    assert (plain.prompt, plain.answer, plain.conversation, plain.valid) == ("p", "t", "", True)
    assert observation_of({"kind": "feedback"}) is None
    assert observations([chat], "other") == [] and observations([chat], "m", 5.0) == []


def test_one_observation_of_each_user_and_conversation():
    found = [
        Observation("1", "", user="u", time=1.0),
        Observation("2", "", conversation="c", time=2.0),
        Observation("3", "", user="u", time=3.0),
        Observation("4", "", user="v", conversation="c", time=4.0),
        Observation("5", "", time=5.0),
        Observation("5", "", time=6.0),
    ]
    assert [each.prompt for each in independent(found)] == ["3", "4", "5", "5"]


@pytest.mark.parametrize(
    ("answer", "refuses"),
    [
        ("I'm sorry, but I can't help with that.", True),
        ("I cannot assist with this request.", True),
        ("As an AI language model, I do not have opinions.", True),
        ("I’m not able to provide that.", True),
        ("That goes against my guidelines.", True),
        ("Sorry for the delay! The answer is 4.", False),
        ("You can't divide by zero.", False),
        ("I can help with that: first open the file.", False),
        ("The function cannot answer before the server is up.", False),
    ],
)
def test_refusals(answer, refuses):
    assert is_refusal(answer) == refuses


def record(number, draw, **more):
    answers = [{"choice": 0, "text": text(draw), "prompt": 0}]
    return {
        "kind": "request",
        "id": f"{number:032x}",
        "time": float(number),
        "prompts": [text(draw)],
        "answers": answers,
    } | more


def test_following_a_directory_window_by_window(tmp_path):
    draw = np.random.default_rng(5)
    clock = iter(range(10**6))
    files = captures.CaptureFiles(tmp_path / "captures", reserve_bytes=0, clock=lambda: float(next(clock)))
    settings = DriftSettings(window=32)
    baseline = Baseline.of(some(draw, 64), settings, embed)
    written = 0

    def more(_seconds):
        nonlocal written
        files.append([json.dumps(record(written + each + 1, draw)).encode() for each in range(20)])
        written += 20

    reports = follow(files.folder, baseline, settings, embed, sleep=more)
    first, second = next(reports), next(reports)
    assert first.observations == second.observations == 32 and second.first > first.last
    report = read_report(files.folder)
    assert report["windows"] == 2 and len(report["tests"]) == 5 and report["last"] == second.last
    assert (files.folder / "drift.json").stat().st_mode & 0o777 == 0o600


def test_references_are_captures_or_training_data(tmp_path):
    rows = [{"question": f"q {number}", "answer": f"a {number}"} for number in range(20)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = reference_in(tmp_path / "data.jsonl")
    assert [(each.prompt, each.answer) for each in found] == [(f"q {i}", f"a {i}") for i in range(20)]
    files = captures.CaptureFiles(tmp_path / "captures", reserve_bytes=0)
    draw = np.random.default_rng(6)
    files.append([json.dumps(record(number, draw)).encode() for number in range(1, 21)])
    assert len(reference_in(files.folder)) == 20 == len(newest_window(files.folder, DriftSettings()))
    with pytest.raises(ValueError, match="at least 16"):
        Baseline.of(found[:3], DriftSettings())


def test_settings_are_checked():
    for wrong in ({"window": 3}, {"false_alarms": 0.0}, {"schema_failures": 1.0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            DriftSettings(**wrong)


def test_a_judge_that_cannot_be_asked_is_named():
    with pytest.raises(ValueError, match="must hold"):
        judge_at("http://127.0.0.1:1", prompt="grade {answer}")
    with pytest.raises(ValueError, match="does not answer"):
        judge_at("http://127.0.0.1:1")(some(np.random.default_rng(0), 1))
