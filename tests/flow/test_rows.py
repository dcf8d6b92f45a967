"""Data of a flow: near-duplicates, overlap with benchmarks, splits without leaks, and versions by content."""

import json
import random

import pytest

from transect.flow.chain import FlowChain
from transect.flow.rows.cleaning import DataFindings, group_alike, overlapping, split, without_duplicates
from transect.flow.rows.near import clusters, near_pairs, shingles, similarity
from transect.flow.rows.reading import DataRow, prompts_in, read_rows
from transect.flow.settings import FlowConfig

WORDS = ["".join(random.Random(number).choices("abcdefghijklmnopqrstuvwxyz", k=6)) for number in range(500)]


def sentences(count: int, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=20)) for _ in range(count)]


def row(prompt: str, answer: str = "yes", group: str = "") -> DataRow:
    return DataRow(
        {"question": prompt, "answer": answer}, "q", prompt, answer, f"at {prompt[:9]}", prompt + answer, group
    )


def test_near_duplicates_are_found_and_others_are_not() -> None:
    texts = sentences(200)
    changed = [f"{text} {WORDS[0]}" for text in texts[:40]]
    other_marks = [text.upper().replace(" ", ",  ") for text in texts[40:60]]
    pairs = {(one, other) for one, other, _ in near_pairs([*texts, *changed, *other_marks], 0.8)}
    assert pairs == {(index, 200 + index) for index in range(60)}


def test_similarities_are_exact() -> None:
    one, other = shingles("the cat sat"), shingles("the cat ran")
    assert similarity(one, other) == len({*map(int, one)} & {*map(int, other)}) / len(
        {*map(int, one)} | {*map(int, other)}
    )
    assert similarity(one, shingles("The  CAT; sat!")) == 1
    assert similarity(shingles(""), shingles("")) == 1


def test_many_equal_texts_are_one_cluster() -> None:
    texts = ["the same text again and again"] * 300
    groups = clusters(300, ((one, other) for one, other, _ in near_pairs(texts, 0.9)))
    assert groups == [0] * 300


def test_a_reworded_question_never_leaves_its_split() -> None:
    questions = sentences(60)
    rows = [row(text) for text in questions] + [row(f"{text} {WORDS[1]}", "no") for text in questions]
    groups = group_alike(rows, 0.8, DataFindings())
    lots = split(rows, groups, (0.2, 0.2), seed=1)
    assert lots[:60] == lots[60:]
    assert set(lots) == {"train", "validation", "test"}


def test_rows_of_a_user_stay_together() -> None:
    rows = [row(text, group=f"user {number % 20}") for number, text in enumerate(sentences(100))]
    lots = split(rows, group_alike(rows, 0.8, DataFindings()), (0.2, 0.2), seed=0)
    assert all(len({lots[number] for number in range(user, 100, 20)}) == 1 for user in range(20))


def test_rows_stay_in_their_split_when_others_come() -> None:
    rows = [row(text) for text in sentences(200)]
    few, many = (
        split(some, group_alike(some, 0.8, DataFindings()), (0.15, 0.15), seed=0) for some in (rows[:100], rows)
    )
    assert many[:100] == few
    assert split(rows, list(range(200)), (0.15, 0.15), seed=1) != many


def test_a_wanted_split_is_never_empty() -> None:
    rows = [row(text) for text in sentences(4)]
    assert sorted(split(rows, [0, 1, 2, 3], (0.01, 0.01), seed=0)) == ["test", "train", "train", "validation"]
    with pytest.raises(ValueError, match=r"too few for train, test.*add rows, raise data\.near"):
        split(rows, [0, 0, 0, 0], (0.0, 0.1), seed=0)


def test_equal_rows_and_questions_with_two_answers_are_counted() -> None:
    found = DataFindings()
    rows = [row("a"), row("b"), row("a"), row("A!", "other"), row("a", "third")]
    assert len(without_duplicates(rows, found)) == 4
    assert (found.duplicates, found.conflicts) == (1, 1)
    assert "at a equals at a" in found.examples["duplicates"]


def test_rows_that_overlap_with_a_benchmark_are_found() -> None:
    questions = sentences(30, seed=5)
    copied = " ".join(questions[3].split()[2:17])  # 15 words inside a longer answer
    rows = [row(text) for text in sentences(50)] + [
        row(f"{questions[0]} {WORDS[2]}"),
        row("a story", f"so {copied} so"),
    ]
    found = DataFindings()
    assert overlapping(rows, questions, 0.8, found) == {50, 51}
    assert overlapping(rows, [], 0.8, found) == set()


def test_bad_rows_stop_or_are_counted(tmp_path) -> None:
    from collections import Counter

    file = tmp_path / "rows.jsonl"
    file.write_text('{"question": "a", "answer": "b"}\n{"question": "c"}\nnonsense\n')
    with pytest.raises(ValueError, match=r'rows.jsonl, line 2: .*data.on_bad_row = "skip"'):
        list(read_rows([str(file)], {}, "", None))
    bad: Counter[str] = Counter()
    assert [each.prompt for each in read_rows([str(file)], {}, "", bad)] == ["a"]
    assert bad.total() == 2


def test_questions_of_a_benchmark_are_read_in_any_layout(tmp_path) -> None:
    file = tmp_path / "exam.jsonl"
    chat = {"messages": [{"role": "user", "content": "three"}, {"role": "assistant", "content": "x"}]}
    lines = [{"question": "one", "answer": "x"}, {"prompt": [{"role": "user", "content": "two"}]}, chat]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert prompts_in(file) == ["one", "two", "three"]


@pytest.fixture
def table(tmp_path):
    rows = [{"question": text, "answer": f"answer {number}"} for number, text in enumerate(sentences(60))]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    (tmp_path / "exam.jsonl").write_text(json.dumps({"question": rows[0]["question"]}) + "\n")
    (tmp_path / "flow.toml").write_text('name = "m"\n[data]\nfiles = ["rows.jsonl"]\nbenchmarks = ["exam.jsonl"]\n')
    return tmp_path


def run_data(folder, *settings: str):
    from transect.flow.steps.registry import steps

    only = {"data": steps()["data"]}
    (state,) = FlowChain(FlowConfig.from_toml(folder / "flow.toml", settings, only), only, tell=lambda line: None).run()
    return state


def test_a_version_is_named_by_its_content(table) -> None:
    first = run_data(table)
    assert first.outcome["figures"]["overlap"] == 1
    counts = [first.outcome["figures"][name] for name in ("train", "validation", "test")]
    assert sum(counts) == 59 and min(counts) > 0
    again = run_data(table)
    assert again.kept and again.outcome == first.outcome
    renamed = run_data(table, "data.near=0.79")
    assert not renamed.kept
    assert renamed.outcome["outputs"]["version"] == first.outcome["outputs"]["version"]
    changed = run_data(table, "data.seed=7")
    assert changed.outcome["outputs"]["version"] != first.outcome["outputs"]["version"]
    assert run_data(table).kept  # back to the settings of the first run


def test_overlap_can_stop_the_flow(table) -> None:
    with pytest.raises(ValueError, match=r"1 rows overlap with benchmarks .*data.overlap = \"drop\""):
        run_data(table, "data.overlap=stop")


def test_a_file_that_vanished_is_made_again(table) -> None:
    first = run_data(table)
    (test,) = table.glob("flows/m/work/data-*/test.jsonl")
    content = test.read_bytes()
    test.unlink()
    assert not run_data(table).kept and test.read_bytes() == content
    (table / "rows.jsonl").unlink()
    with pytest.raises(ValueError, match=r"there is no file .*rows.jsonl: correct data.files"):
        run_data(table)
    assert first.outcome["outputs"]["version"]
