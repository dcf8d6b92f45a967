"""Feedback becomes rows for preference training, which trains."""

import json

import pytest
from training_runs import tiny_run

from transect.flow.watch.feedback import feedback_rows
from transect.train.data.layouts import Preference, Rated, form_of
from transect.train.loop.trainer import Trainer

ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Two and two?"}]


def request(number, *texts, messages=ASKED, **more):
    answers = [{"choice": choice, "text": text} for choice, text in enumerate(texts)]
    return {"kind": "request", "id": f"{number:032x}", "messages": messages, "model": "m", "answers": answers} | more


def said(number, choice=0, **given):
    return {"kind": "feedback", "id": f"{number:032x}", "choice": choice, "model": "m", **given}


def pairs(*records, **options):
    return [(row["chosen"][0]["content"], row["rejected"][0]["content"]) for row in rows(*records, **options)]


def rows(*records, kind="pairs", model=""):
    found = feedback_rows(records, kind, model).rows
    assert all(isinstance(form_of(row)[1], Preference if kind == "pairs" else Rated) for row in found)
    return found


def labels(*records):
    return [(row["completion"][0]["content"], row["label"]) for row in rows(*records, kind="labels")]


def test_a_correction_is_preferred():
    records = request(1, "Five."), said(1, correction="Four.", thumb="down")
    assert pairs(*records) == [("Four.", "Five.")] and rows(*records)[0]["prompt"] == ASKED
    assert labels(*records) == [("Four.", True), ("Five.", False)]


def test_thumbs_on_answers_to_the_same_prompt_are_pairs():
    records = [
        request(1, "Four.", "Five."),
        request(2, "Six."),
        request(3, "Four!"),
        request(4, "4", messages=ASKED[1:]),
    ]
    judged = [
        said(1, 0, thumb="up"),
        said(1, 1, thumb="down"),
        said(2, score=0.1),
        said(3, score=1),
        said(4, thumb="up"),
    ]
    found = feedback_rows([*records, *judged])
    assert pairs(*records, *judged) == [("Four.", "Five."), ("Four!", "Six.")]
    assert list(found.left_out.values()) == [1]  # the thumb without a counterpart
    assert sorted(labels(*records, *judged)) == [
        ("4", True),
        ("Five.", False),
        ("Four!", True),
        ("Four.", True),
        ("Six.", False),
    ]


def test_the_last_word_on_an_answer_counts():
    records = request(1, "Four.", "Five."), said(1, thumb="down"), said(1, 1, thumb="down"), said(1, score=0.9)
    assert pairs(*records) == [("Four.", "Five.")]
    assert pairs(*records, said(1, thumb="down")) == []


def test_the_same_text_is_never_better_than_itself():
    records = request(1, "Four."), request(2, "Four. "), said(1, thumb="up"), said(2, thumb="down")
    assert pairs(*records) == [] and pairs(request(1, "Four."), said(1, correction=" Four.")) == []


def test_prompts_of_completions_and_tools_are_kept():
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
    (row,) = rows(request(1, "Five.", tools=tools), said(1, correction="Four."))
    assert row["tools"] == tools
    plain = {"kind": "request", "id": f"{2:032x}", "prompts": ["2 + 2 ="], "answers": [{"choice": 0, "text": " 5"}]}
    (row,) = rows(plain, said(2, correction=" 4"))
    assert row["prompt"] == [{"role": "user", "content": "2 + 2 ="}]


def test_what_cannot_be_used_is_counted():
    records = [
        request(1, "Five."),
        said(1, comment="hm"),
        said(1, score=0.5),
        said(7, thumb="up"),
        request(2, ""),
        said(2, thumb="up"),
        request(3, "", model="m"),
        request(4, "x", answers=[{"choice": 0, "text": "x", "calls": [{"name": "f", "arguments": "{}"}]}]),
        said(4, correction="y"),
    ]
    found = feedback_rows(records)
    assert not found.rows and sum(found.left_out.values()) == 4 and len(found.left_out) == 3
    assert rows(request(1, "Five."), said(1, correction="Four."), model="other") == []


@pytest.mark.parametrize(("objective", "kind"), [("dpo", "pairs"), ("orpo", "pairs"), ("kto", "labels")])
def test_a_tiny_run_trains_on_them(tmp_path, objective, kind):
    records = []
    for number in range(12):
        messages = [{"role": "user", "content": f"{number} and {number}?"}]
        records += [request(number, f"{number}.", messages=messages), said(number, correction=f"{2 * number}!")]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows(*records, kind=kind)))
    data = {"train": [str(path)], "seq_len": 128, "micro_batch": 256}
    trainer = Trainer(tiny_run(tmp_path, objective=objective, steps=8, data=data, optimizer={"learning_rate": 3e-3}))
    losses = [trainer.step().loss for _ in range(8)]
    assert losses[-1] < losses[0]
