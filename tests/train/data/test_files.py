"""Files that people train on: told apart by ending and keys, read row by row, and refused with a reason."""

import csv
import gzip
import json
import struct

import pytest

from transect.text.chat_template import ChatTemplate
from transect.train.data.checks import check_files
from transect.train.data.documents import chat_tokens
from transect.train.data.files import find
from transect.train.data.layouts import ChatExample, CompletionExample, Preference, Text, detect
from transect.train.data.loader import load_stream

CHAT = {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}
SHAREGPT = {"conversations": [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]}
ALPACA = {"instruction": "Add.", "input": "2 and 2", "output": "4"}
PAIR = {"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}


def lines(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def table(path, *rows, delimiter=","):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)


def parquet(path, *rows):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet as files

    files.write_table(pyarrow.Table.from_pylist(list(rows)), path)


def saved_dataset(path, *rows):
    """What ``Dataset.save_to_disk`` of Hugging Face ``datasets`` leaves."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import ipc

    path.mkdir()
    made = pyarrow.Table.from_pylist(list(rows))
    file = str(path / "data-00000-of-00001.arrow")
    with pyarrow.OSFile(file, "wb") as sink, ipc.new_stream(sink, made.schema) as writer:
        writer.write_table(made)
    (path / "dataset_info.json").write_text("{}")
    (path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))


GOOD = {
    "chats.jsonl": (lambda p: lines(p, CHAT, CHAT), "chat (messages)", 2),
    "chats.JSONL": (lambda p: lines(p, CHAT), "chat (messages)", 1),
    "chats.ndjson": (lambda p: lines(p, SHAREGPT, SHAREGPT), "ShareGPT (conversations)", 2),
    "alpaca.json": (lambda p: p.write_text(json.dumps([ALPACA, {**ALPACA, "input": ""}])), "Alpaca", 2),
    "wrapped.json": (lambda p: p.write_text(json.dumps({"version": 1, "data": [CHAT]})), "chat (messages)", 1),
    "zipped.jsonl.gz": (lambda p: p.write_bytes(gzip.compress(json.dumps(ALPACA).encode())), "Alpaca", 1),
    "mark.jsonl": (lambda p: p.write_text("\ufeff" + json.dumps(CHAT), encoding="utf-8"), "chat (messages)", 1),
    "pairs.csv": (lambda p: table(p, {"question": "2, or\n3?", "answer": "4"}), "question and answer", 1),
    "pairs.tsv": (lambda p: table(p, {"prompt": "2?", "response": "4"}, delimiter="\t"), "question and answer", 1),
    "completions.csv": (lambda p: table(p, {"prompt": "2 + 2 =", "completion": " 4"}), "prompt and completion", 1),
    "chats.parquet": (lambda p: parquet(p, CHAT, CHAT), "chat (messages)", 2),
    "dataset": (lambda p: saved_dataset(p, ALPACA, ALPACA, ALPACA), "Alpaca", 3),
    "preferences.jsonl": (lambda p: lines(p, PAIR), "preferences", 1),
    "book.md": (lambda p: p.write_text("# Once\nupon a time"), "text", 1),
}
BAD = {
    "book.epub": (lambda p: p.write_text("x"), "files that end in .epub are not known"),
    "program.py": (lambda p: p.write_text("print()"), "name it text:"),
    "object.json": (lambda p: p.write_text('{"a": 1}'), "one JSON object"),
    "lines.json": (lambda p: p.write_text('{"a": 1}\n{"a": 2}'), r"belong in a \.jsonl file"),
    "keys.jsonl": (lambda p: lines(p, {"mesages": []}), "mesages is near messages"),
    "roles.json": (lambda p: p.write_text(json.dumps([{"conversations": [{"from": "alien", "value": "x"}]}])), "alien"),
    "silent.jsonl": (lambda p: lines(p, {"messages": CHAT["messages"][:1]}), "no message of the assistant"),
    "uneven.csv": (lambda p: p.write_text("prompt,response\na,b\nc\n"), "another number of fields than the 2"),
    "semicolons.csv": (
        lambda p: p.write_text("prompt;response\na;b\n"),
        "';' between its columns: save it with commas",
    ),
    "latin.csv": (lambda p: p.write_bytes(b"prompt,response\n\xe9,b\n"), "not UTF-8"),
    "torn.jsonl.gz": (lambda p: p.write_bytes(gzip.compress(b"x" * 999)[:20]), "cannot read"),
    "torn.parquet": (lambda p: p.write_bytes(b"PAR1"), "not a parquet file"),
    "empty.jsonl": (lambda p: lines(p, {}), "the keys of an empty row"),
    "mixed.jsonl": (lambda p: lines(p, CHAT, {"text": "x"}), "this row is text, and those before are chat"),
}


@pytest.mark.parametrize("name", GOOD)
def test_files_are_told_apart_and_read(tmp_path, tools, name) -> None:
    make, layout, rows = GOOD[name]
    make(tmp_path / name)
    (found,) = check_files([str(tmp_path / name)], *tools)
    assert not found.problems
    assert found.layout.startswith(layout) and found.rows == rows and found.tokens > 0


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_trained_on_is_refused_with_a_reason(tmp_path, tools, name) -> None:
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    make, reason = BAD[name]
    make(tmp_path / name)
    with pytest.raises(ValueError, match=reason):
        load_stream([str(tmp_path / name)], 300, *tools)
    (found,) = check_files([str(tmp_path / name)], *tools)
    assert len(found.problems) == 1


def test_bad_rows_are_left_out_and_counted_where_that_is_asked_for(tmp_path, tools) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(f"{json.dumps(CHAT)}\n{{\n{json.dumps({'messages': 1})}\n{json.dumps(CHAT)}\n[]\n")
    told: list[str] = []
    stream = load_stream([str(path)], 300, *tools, skip=True, tell=told.append)
    assert stream.num_documents == 2
    assert "2 rows, chat (messages)" in told[0] and "line 2" in told[0] and told[0].count("left out 1 row:") == 3
    with pytest.raises(ValueError, match=r'line 2: the line is not JSON.*data\.on_bad_row = "skip"'):
        load_stream([str(path)], 300, *tools)


def test_a_whole_file_of_bad_rows_is_an_error_even_then(tmp_path, tools) -> None:
    lines(tmp_path / "bad.jsonl", {"a": 1})
    with pytest.raises(ValueError, match="no row that can be used"):
        load_stream([str(tmp_path / "bad.jsonl")], 300, *tools, skip=True)


def test_a_damaged_file_is_told_of_beside_its_bad_rows(tmp_path, tools) -> None:
    packed = gzip.compress(f"{json.dumps(CHAT)}\n{{\n".encode() + b"".join(b"[%d]" % i for i in range(20000)))
    (tmp_path / "cut.jsonl.gz").write_bytes(packed[:-2000])
    (found,) = check_files([str(tmp_path / "cut.jsonl.gz")], *tools)
    assert any("cannot read" in problem for problem in found.problems) and len(found.problems) == 2


def test_a_compressed_file_that_is_no_longer_what_it_was_is_named(tmp_path, tools) -> None:
    packed = bytearray(gzip.compress(f"{json.dumps(CHAT)}\n".encode()))
    packed[10] |= 6  # a kind of block that there is not
    (tmp_path / "bad.jsonl.gz").write_bytes(packed)
    with pytest.raises(ValueError, match=r"cannot read .*bad\.jsonl\.gz: .*invalid block type"):
        load_stream([str(tmp_path / "bad.jsonl.gz")], 300, *tools)


def test_any_file_is_text_where_it_is_named_so(tmp_path, tools) -> None:
    (tmp_path / "program.py").write_text("print()")
    stream = load_stream([f"text:{tmp_path / 'program.py'}"], 300, *tools)
    assert tools[0].decode(stream.tokens[:7].tolist()) == "print()"


def test_a_directory_stands_for_the_files_in_it(tmp_path) -> None:
    for name in ("b.jsonl", "a.jsonl", "README"):
        (tmp_path / name).write_text("{}")
    assert [file.path.name for file in find([str(tmp_path)])] == ["a.jsonl", "b.jsonl"]
    (tmp_path / "splits").mkdir()
    (tmp_path / "splits" / "dataset_dict.json").write_text("{}")
    (tmp_path / "splits" / "train").mkdir()
    (tmp_path / "splits" / "train" / "state.json").write_text("{}")
    with pytest.raises(ValueError, match=r"several splits: name one of .*train"):
        find([str(tmp_path / "splits")])


def test_forms() -> None:
    assert detect({"text": "x"}).read({"text": "x"}) == Text("x")
    whole = detect(ALPACA).read(ALPACA)
    assert isinstance(whole, ChatExample) and whole.messages[0]["content"] == "Add.\n\n2 and 2"
    both = {"prompt": CHAT["messages"][:1], "completion": CHAT["messages"][1:]}
    assert detect(both).read(both) == ChatExample(CHAT["messages"], None, 1)
    assert isinstance(
        detect({"prompt": "a", "completion": "b"}).read({"prompt": "a", "completion": "b"}), CompletionExample
    )
    no_prompt = {"chosen": CHAT["messages"], "rejected": [*CHAT["messages"][:1], {"role": "assistant", "content": "5"}]}
    pair = detect(no_prompt).read(no_prompt)
    assert isinstance(pair, Preference) and pair.prompt == CHAT["messages"][:1] and pair.rejected[0]["content"] == "5"


ASKED, FOUR, FIVE = *CHAT["messages"], {"role": "assistant", "content": "5"}
EARLIER = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]


@pytest.mark.parametrize(
    ("prompt", "before"),
    [
        ("2 + 2?", [ASKED]),  # UltraFeedback: the question stands in all three
        ("2 + 2?", [*EARLIER, ASKED]),
        ([ASKED], [ASKED]),
        ([{"role": "system", "content": "Add."}], [ASKED]),  # what both say after a prompt is theirs
    ],
)
def test_a_question_that_stands_in_prompt_and_answers_is_asked_once(prompt, before) -> None:
    row = {"prompt": prompt, "chosen": [*before, FOUR], "rejected": [*before, FIVE]}
    pair = detect(row).read(row)
    assert isinstance(pair, Preference)
    whole = prompt + before if isinstance(prompt, list) and prompt != before else before
    assert [*pair.prompt, *pair.chosen] == [*whole, FOUR] and [*pair.prompt, *pair.rejected] == [*whole, FIVE]


def test_what_follows_a_prompt_alone_is_trained_on(tmp_path, tools) -> None:
    tokenizer, template = tools
    lines(tmp_path / "a.jsonl", {"prompt": "2 + 2 =", "completion": " 4"})
    stream = load_stream([str(tmp_path / "a.jsonl")], 300, tokenizer, template)
    ids = stream.tokens[stream.trained].tolist()
    assert tokenizer.decode(ids[:-1]) == " 4" and ids[-1] in tokenizer.eos_token_ids


def test_messages_of_a_completion_are_trained_on_and_those_of_the_prompt_are_not(tools) -> None:
    tokenizer, template = tools
    messages = [*CHAT["messages"], {"role": "user", "content": "and 1?"}, {"role": "assistant", "content": "5"}]
    ids, trained = chat_tokens(messages, tokenizer, template, first=2)
    text = tokenizer.decode([token for token, on in zip(ids, trained, strict=True) if on])
    assert "5" in text and "4" not in text


def test_a_chat_that_begins_with_the_assistant_trains_no_header(tools) -> None:
    tokenizer, _ = tools
    template = ChatTemplate(
        "{% if messages[0].role != 'system' %}[be kind]{% endif %}"
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    messages = [{"role": "assistant", "content": "hello"}, {"role": "user", "content": "x"}]
    ids, trained = chat_tokens(messages, tokenizer, template)
    text = tokenizer.decode([token for token, on in zip(ids, trained, strict=True) if on])
    assert text == "hello</>"


def test_tools_of_a_chat_reach_the_template(tools) -> None:
    tokenizer, _ = tools
    template = ChatTemplate(
        "{% if tools %}tools: {{ tools[0].name }} {% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
        "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    row = {**CHAT, "tools": json.dumps([{"name": "clock"}])}
    form = detect(row).read(row)
    assert isinstance(form, ChatExample)
    ids, _ = chat_tokens(form.messages, tokenizer, template, tools=form.tools)
    assert tokenizer.decode(ids).startswith("tools: clock ")


def test_a_dataset_whose_offsets_lie_is_refused(tools, tmp_path) -> None:
    """Arrow would follow them out of its memory."""
    saved_dataset(tmp_path / "saved", *({"text": "12345"} for _ in range(3)))
    (file,) = (tmp_path / "saved").glob("*.arrow")
    whole, offsets = file.read_bytes(), struct.pack("<4i", 0, 5, 10, 15)
    assert whole.count(offsets) == 1
    for lies in ((0, 5, -10, 15), (0, 5, 2**30, 15)):
        file.write_bytes(whole.replace(offsets, struct.pack("<4i", *lies)))
        with pytest.raises(ValueError, match="saved is not a dataset that can be read"):
            load_stream([str(tmp_path / "saved")], 300, *tools)


def test_a_file_without_rows_is_told_of(tmp_path) -> None:
    from transect.train.data.checks import check_files

    path = tmp_path / "empty.jsonl"
    path.write_text("\n")
    (found,) = check_files([str(path)], None, None)
    assert found.rows == 0 and found.problems == [f"{path} holds no rows"]
    text = tmp_path / "empty.txt"
    text.write_text("\n")
    (found,) = check_files([str(text)], None, None)
    assert found.rows == 0 and found.problems == [f"{text} holds no text"]
