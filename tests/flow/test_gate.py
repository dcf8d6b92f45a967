"""The gate: what passes and what does not, by samples; settings and their errors; questions and checkers."""

import json
import random
from pathlib import Path

import pytest

from transect.flow.gate.answering import checker_of, read_questions, verdict_of
from transect.flow.gate.registry import measure_kind, measures
from transect.flow.settings import FlowConfig

LEVEL = 0.95


def judge(name: str, samples: dict, level: float = LEVEL, **settings):
    kind = measure_kind(name)
    return kind.judge(samples, kind.settings(**settings), level)


def rates(candidate: int, current: int, count: int) -> dict:
    return {
        "candidate": [1] * candidate + [0] * (count - candidate),
        "current": [0] * (count - current) + [1] * current,
    }


def test_a_clear_gain_passes_and_a_noisy_one_does_not() -> None:
    assert judge("task", rates(30, 2, 30), file="f", gain=0.2).passed
    noisy = judge("task", rates(18, 15, 30), file="f", gain=0.0)
    assert not noisy.passed and "a gain of more than 0% is asked for" in noisy.reason
    assert noisy.candidate == 0.6 and noisy.current == 0.5


def test_equal_models_pass_as_gains_as_seldom_as_the_level_says() -> None:
    draw = random.Random(0)
    samples = [
        {name: [int(draw.random() < 0.5) for _ in range(50)] for name in ("candidate", "current")} for _ in range(1000)
    ]
    assert sum(judge("task", each, file="f", gain=0.0).passed for each in samples) < 50  # 25 in the mean


def test_a_loss_that_cannot_be_excluded_does_not_pass() -> None:
    assert not judge("task", rates(20, 20, 20), file="f", worse=0.05).passed  # 20 questions do not show that
    assert judge("task", rates(400, 400, 400), file="f", worse=0.05).passed
    few = judge("task", rates(19, 20, 20), file="f", worse=0.4, least=0.9)
    assert not few.passed and "at least 90% is asked for" in few.reason


def test_perplexity_compares_the_same_rows() -> None:
    draw = random.Random(1)
    rows = [(draw.uniform(20, 60), draw.randint(10, 30)) for _ in range(40)]
    better = [(nats * draw.uniform(0.8, 0.95), count) for nats, count in rows]
    assert judge("perplexity", {"candidate": better, "current": rows}, gain=0.01).passed
    noisy = [[(nats * draw.uniform(0.9, 1.1), count) for nats, count in rows] for _ in range(400)]
    assert sum(judge("perplexity", {"candidate": each, "current": rows}, gain=0.0).passed for each in noisy) < 20
    assert judge("perplexity", {"candidate": rows, "current": rows}).interval == (0.0, 0.0)
    worse = judge("perplexity", {"candidate": rows, "current": better})
    assert not worse.passed and "an increase of" in worse.reason
    with pytest.raises(ValueError, match="at least 5 samples"):
        judge("perplexity", {"candidate": rows[:3], "current": rows[:3]})


def test_size_and_speed() -> None:
    assert judge("size", {"candidate": [900], "current": [800]}, most="1KB").passed
    assert not judge("size", {"candidate": [1100], "current": [800]}, most="1KB").passed
    draw = random.Random(2)
    samples = {"candidate": [draw.gauss(50, 2) for _ in range(9)], "current": [draw.gauss(51, 2) for _ in range(9)]}
    assert judge("speed", samples, slower=0.2).passed
    assert not judge("speed", samples, slower=0.01).passed


def test_speed_alternates_where_models_share_an_engine() -> None:
    class Timed:
        size, order = 0, []

        def __init__(self, name: str, base: str) -> None:
            self.name, self.base = name, base

        def generate_seconds(self, prompt_tokens: int, new_tokens: int, batch: int, seed: int) -> float:
            self.order.append(self.name)
            return 2.0 if self.name == "new" else 1.0

    kind = measure_kind("speed")
    bars = kind.settings(rounds=5, new_tokens=10, batch=3)
    samples = kind.take(Timed("new", "b"), Timed("old", "b"), bars, Path)
    assert samples == {"candidate": [15.0] * 5, "current": [30.0] * 5} and Timed.order == ["new", "old"] * 6
    Timed.order.clear()
    kind.take(Timed("new", "b"), Timed("old", "c"), bars, Path)
    assert Timed.order == ["new"] * 6 + ["old"] * 6


def test_questions_of_several_layouts(tmp_path) -> None:
    file = tmp_path / "exam.jsonl"
    lines = [
        {"question": "2 + 2?", "answer": "4"},
        {"prompt": [{"role": "system", "content": "Add."}, {"role": "user", "content": "1 + 1?"}], "completion": "2"},
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = read_questions(file)
    assert [messages[-1]["content"] for messages, _ in found] == ["2 + 2?", "1 + 1?"]
    assert [row["answer"] for _, row in found] == ["4", "2"]
    file.write_text('{"answer": "4"}\n')
    with pytest.raises(ValueError, match=r"exam.jsonl, line 1: the row needs a \"prompt\""):
        read_questions(file)


@pytest.mark.parametrize(
    ("check", "answer", "right", "expected"),
    [
        ("exact", " 4 ", "4", 1), ("exact", "4.", "4", 0), ("contains", "It is PARIS.", "Paris", 1),
        ("contains", "It is Rome.", "Paris", 0), ("number", "2,000 metres, not 3", "2000", 1),
        ("number", "about -3.50", "-3.5", 1), ("number", "none", "3", 0),
    ],
)  # fmt: skip
def test_checkers_decide_exactly(check: str, answer: str, right: str, expected: int) -> None:
    assert verdict_of(checker_of(check, Path), answer, {"answer": right}) == expected


def test_a_checker_of_ones_own(tmp_path) -> None:
    (tmp_path / "mine.py").write_text("def odd(answer, row):\n    return int(answer) % 2\n")
    checker = checker_of("mine.py:odd", lambda name: tmp_path / name)
    assert [verdict_of(checker, text, {}) for text in ("3", "4")] == [1, 0]
    with pytest.raises(ValueError, match=r"check failed on 'x' .*correct it"):
        verdict_of(checker, "x", {})
    with pytest.raises(ValueError, match=r"number or FILE\.py:FUNCTION"):
        checker_of("similar", Path)


def gate(tmp_path, text: str):
    (tmp_path / "flow.toml").write_text(f'name = "m"\n[data]\nfiles = ["a.csv"]\n[train]\nrun = "r.toml"\n{text}')
    return FlowConfig.from_toml(tmp_path / "flow.toml").tables["gate"]


def test_checks_are_tables_of_the_gate(tmp_path) -> None:
    found = gate(
        tmp_path,
        "[gate]\nconfidence = 0.9\nengine = {max_model_len = 99}\n[gate.perplexity]\nworse = 0.1\n"
        '[gate.exam]\nmeasure = "task"\nfile = "exam.jsonl"\n[gate.polite]\nmeasure = "refusals"\nfile = "ask.jsonl"\n',
    )
    assert found.confidence == 0.9 and found.engine == {"max_model_len": 99}
    assert {name: kind.name for name, (kind, _) in found.kinds().items()} == {
        "perplexity": "perplexity", "exam": "task", "polite": "refusals",
    }  # fmt: skip
    assert found.files() == ("exam.jsonl", "ask.jsonl")
    assert set(measures()) == {"perplexity", "task", "refusals", "size", "speed"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[gate]\nconfidence = 2.0", "gate.confidence must be at least 0.5"),
        ("[gate.exam]\nfile = 'x'", "set gate.exam.measure to one of perplexity"),
        ("[gate.exam]\nmeasure = 'tsk'\nfile = 'x'", "gate.exam.measure cannot be 'tsk': it must be one of"),
        ("[gate.exam]\nmeasure = 'task'", "the setting gate.exam.file is missing"),
        ("[gate.exam]\nmeasure = 'task'\nfile = 'x'\nleast = 2.0", "gate.exam.least is a rate from 0 to 1, not 2.0"),
        (
            "[gate.exam]\nmeasure = 'task'\nfile = 'x'\nlest = 0.2",
            r"gate.exam.lest is not known; did you mean gate.exam.least\?",
        ),
        ("[gate.speed]\nrounds = 2", "gate.speed.rounds must be at least 5"),
        ("[gate]\ncheck = 3", "the setting gate.check is not known"),
        ("[release]\nshare = 1.0", "release.share is a share, more than 0 and less than 1, not 1.0"),
        ("[release]\nserver = 'localhost'", "release.server must begin with http"),
        ("[watch]\nlooks = 0", "watch.looks must be at least 1, not 0"),
        ("[watch]\nrefusals = 3.0", "watch.refusals is a difference of rates from 0 to 1, not 3.0"),
        ("[train.grid]\n'lora.rank' = 3", "add"),
    ],
)
def test_errors_name_the_key(tmp_path, text: str, message: str) -> None:
    if message == "add":
        text, message = "[train]\nrun = 'r.toml'\n[train.grid]\n'lora.rank' = 3", "train.grid.lora.rank must be a list"
        (tmp_path / "flow.toml").write_text(f'name = "m"\n[data]\nfiles = ["a.csv"]\n{text}')
        with pytest.raises(ValueError, match=message):
            FlowConfig.from_toml(tmp_path / "flow.toml")
        return
    with pytest.raises(ValueError, match=message):
        gate(tmp_path, text)
