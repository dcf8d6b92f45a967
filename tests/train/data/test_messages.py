"""Rows that mean something else than their text alone: flags, columns, calls and labels are used, refused or named."""

import json
from pathlib import Path

import pytest
from commands import run_here
from tiny_llm import CHAT_TEMPLATE, save_tiny_llm_text
from training_runs import tiny_run

from transect.text.chat_template import ChatTemplate
from transect.train.config import TrainConfig
from transect.train.data.checks import check_files
from transect.train.data.documents import answers_apart, chat_tokens
from transect.train.data.layouts import form_of
from transect.train.data.loader import load_stream
from transect.train.data.streaming import StreamingLoader
from transect.train.data.tokenize import tokenize
from transect.train.data.tokens import open_tokens
from transect.train.loop.trainer import Trainer
from transect.train.objectives.rewards import read_prompts

USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def call(name="add", arguments='{"a": 1}'):
    return {
        "role": "assistant",
        "tool_calls": [{"type": "function", "function": {"name": name, "arguments": arguments}}],
    }


def said(ids, trained, tokenizer):
    return tokenizer.decode([t for t, s in zip(ids, trained, strict=True) if s], skip_special_tokens=False)


def lines(path: Path, *rows) -> str:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return str(path)


def learned(form, tools) -> str:
    return said(*chat_tokens(form.messages, *tools, tools=form.tools, first=form.first, masked=form.masked), tools[0])


@pytest.mark.parametrize("flag", [{"weight": 0}, {"train": False}])
@pytest.mark.parametrize("layout", ["messages", "conversations"])
def test_messages_that_are_not_to_be_trained_on_are_masked(flag, layout, tools, tmp_path) -> None:
    shape = (lambda m: m) if layout == "messages" else lambda m: {"from": m["role"], "value": m["content"], **flags(m)}
    flags = lambda m: {k: v for k, v in m.items() if k in ("weight", "train")}  # noqa: E731
    one, two, three = ({"role": "assistant", "content": text} for text in ("first", "second", "third"))
    turns = [USER, one, USER, {**two, **flag}, USER, {**three, next(iter(flag)): 1}]
    _, form = form_of({layout: [shape(turn) for turn in turns]})
    assert learned(form, tools) == "first<|im_end|>third<|im_end|>"
    assert not any(key in message for message in form.messages for key in ("weight", "train"))
    apart = answers_apart(form.messages, *tools, masked=form.masked)
    assert [said(*each, tools[0]) for each in apart] == ["first<|im_end|>", "third<|im_end|>"]
    path = lines(tmp_path / "chats.jsonl", {"messages": turns})
    stream = load_stream([path], 300, *tools)
    assert said(stream.tokens.tolist(), stream.trained.tolist(), tools[0]) == "first<|im_end|>third<|im_end|>"


def test_a_mask_counts_from_the_chat_s_own_messages(tools) -> None:
    """Without a word of tools in the template, a message that describes them comes first."""
    row = {"messages": [USER, {**ANSWER, "weight": 0}, USER, call(), {"role": "tool", "content": "2"}, ANSWER]}
    _, form = form_of({**row, "tools": [TOOL]})
    text = learned(form, tools)
    assert text.startswith("<tool_call>") and text.endswith("</tool_call><|im_end|>a<|im_end|>")


COLUMNS = {
    "chat": ({"messages": [USER, ANSWER], "system": "S"}, ["S", "q"]),
    "the same system": ({"messages": [{"role": "system", "content": "S"}, USER, ANSWER], "system": "S"}, ["S", "q"]),
    "completion": ({"prompt": "q", "completion": "a", "system": "S"}, ["S", "q"]),
    "messages of a completion": ({"prompt": [USER], "completion": [ANSWER], "system": "S"}, ["S", "q"]),
    "alpaca": ({"instruction": "q", "output": "a", "history": [["q0", "a0"]], "system": "S"}, ["S", "q0", "a0", "q"]),
    "history as text": ({"prompt": "q", "response": "a", "history": '[["q0", "a0"]]'}, ["q0", "a0", "q"]),
    "history of messages": ({"prompt": "q", "completion": "a", "history": [USER, ANSWER]}, ["q", "a", "q"]),
    "dolly": ({"instruction": "q", "context": "more", "response": "a"}, ["q\n\nmore"]),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_columns_around_a_question_are_used(name, tools) -> None:
    row, before = COLUMNS[name]
    layout, form = form_of(row)
    assert [message["content"] for message in form.messages] == [*before, "a"]
    assert learned(form, tools) == "a<|im_end|>"
    assert not layout.ignored(row)


def test_system_prompts_reach_pairs_judged_answers_and_prompts(tmp_path) -> None:
    system = {"role": "system", "content": "S"}
    assert form_of({"question": "q", "chosen": "a", "rejected": "b", "system": "S"})[1].prompt == [system, USER]
    assert form_of({"prompt": "q", "completion": "a", "label": 1, "system": "S"})[1].prompt == [system, USER]
    seen = []
    path = lines(tmp_path / "p.jsonl", {"Frage": "q", "system": "S"})
    read_prompts([path], lambda messages, _: seen.append(messages) or [1], columns={"prompt": "Frage"})
    assert seen == [[system, USER]]
    with pytest.raises(ValueError, match="begin with another one"):
        form_of({"messages": [{"role": "system", "content": "T"}, USER, ANSWER], "system": "S"})


def test_thoughts_and_refusals_are_what_the_assistant_says(tools) -> None:
    thinking = {"role": "assistant", "content": "a", "reasoning_content": "t"}
    named = CHAT_TEMPLATE.replace("{{ m['content'] }}", "{{ m.reasoning_content }}|{{ m['content'] }}")
    parsed = CHAT_TEMPLATE.replace("{{ m['content'] }}", "{{ m['content'].split('</think>') | join('#') }}")
    for template, expected in ((named, "t|a<|im_end|>"), (parsed, "<think>\nt\n#\n\na<|im_end|>")):
        rendered = chat_tokens([USER, thinking], tools[0], ChatTemplate(template))
        assert said(*rendered, tools[0]) == expected
    _, form = form_of({"question": "q", "answer": "a", "reasoning_content": "t"})
    assert form.messages[-1] == thinking
    _, form = form_of({"messages": [USER, {"role": "assistant", "content": None, "refusal": "No."}]})
    assert form.messages[-1] == {"role": "assistant", "content": "No."}


def test_a_refusal_beside_content_and_a_column_that_another_replaces_are_named(tools, tmp_path) -> None:
    path = lines(tmp_path / "r.jsonl", {"messages": [USER, {**ANSWER, "refusal": "No."}]})
    assert next(check_files([path], *tools)).unread == "ignored keys: refusal of messages (1 row)"
    path = lines(tmp_path / "c.jsonl", {"question": "id 7", "Frage": "q", "answer": "a"})
    (found,) = check_files([path], *tools, {"question": "Frage"})
    assert not found.problems and found.unread == "ignored keys: question (1 row)"


def test_thoughts_that_a_template_prints_beside_calls_alone_are_named(tools, tmp_path) -> None:
    template = ChatTemplate(
        "{% for m in messages %}<|im_start|>{{ m.role }}{% if m.tool_calls %}{{ m.reasoning_content }}{% endif %}"
        "{{ m.content }}{{ m.tool_calls }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
    )
    chats = [[USER, {**each, "reasoning_content": "t"}] for each in (ANSWER, call())]
    path = lines(tmp_path / "c.jsonl", *({"messages": chat} for chat in chats))
    assert next(check_files([path], tools[0], template)).unread == "ignored keys: reasoning_content of messages (1 row)"


def test_keys_that_nothing_reads_are_named_when_files_are_streamed_or_tokenized(tools, tmp_path) -> None:
    plain = [{"question": "q", "answer": "a"}] * 3
    paths = [
        lines(tmp_path / "a.jsonl", *plain),
        lines(tmp_path / "b.jsonl", *plain, {**plain[0], "source": "web"}),
        lines(tmp_path / "c.jsonl", {**plain[0], "source": "web", "id": 1}),
        lines(tmp_path / "d.jsonl", {**plain[0], "source": "web", "id": 1}),
    ]
    config = tiny_run(tmp_path, data={"train": paths, "seq_len": 64, "micro_batch": 64, "streaming": True})
    told: list[str] = []
    loader = StreamingLoader(config.data, 0, 300, *tools, tell=told.append)
    next(loader)
    assert any("source (1 row)" in each for each in told) and sum("id (1 row)" in each for each in told) == 1
    said_of: list[str] = []
    for workers in (1, 2):
        tokenize(paths, tmp_path / "f.tokens", str(tmp_path / "model"), workers=workers, tell=said_of.append)
    assert said_of == ["ignored keys: id (2 rows), source (3 rows)"] * 2
    arguments = ("-o", str(tmp_path / "g.tokens"), "--model", str(tmp_path / "model"), "--workers", "1")
    assert "ignored keys: id (2 rows), source (3 rows)" in run_here("data", "tokenize", *paths, *arguments).stderr


def test_keys_that_nothing_reads_are_named_in_one_line(tools, tmp_path) -> None:
    turns = [USER, {**ANSWER, "reasoning_content": "t", "audio": "x"}]
    path = lines(tmp_path / "c.jsonl", {"messages": turns, "id": 7}, {"messages": turns, "source": "web", "note": ""})
    line = (
        "ignored keys: audio of messages (2 rows), id (1 row), reasoning_content of messages (2 rows), source (1 row)"
    )
    told: list[str] = []
    load_stream([path], 300, *tools, tell=told.append)
    (found,) = check_files([path], *tools)
    assert not found.problems and found.unread == line and told[0].endswith(line)
    assert "note" not in found.unread
    run = tiny_run(tmp_path, data={"train": [path], "seq_len": 250, "micro_batch": 500})
    assert any(line in each for each in Trainer(run).objective.described())
    shown = run_here("data", "check", path, "--model", str(tmp_path / "model"))
    assert shown.returncode == 0 and line in shown.stdout


REFUSED = {
    "flag of another kind": ({"messages": [USER, {**ANSWER, "weight": 0.5}]}, '"weight" must be 0 or 1, not 0.5'),
    "flag of the user": ({"messages": [{**USER, "train": True}, ANSWER]}, "is of the user .*only the assistant's"),
    "nothing left": ({"messages": [USER, {**ANSWER, "weight": 0}]}, "no message of the assistant to learn from"),
    "a bad answer": ({"prompt": "q", "completion": "a", "label": 0}, 'set objective = "kto"'),
    "a good answer": ({"prompt": "q", "completion": "a", "label": True}, 'set objective = "kto"'),
    "no verdict": ({"prompt": "q", "completion": "a", "label": "maybe"}, "must be true or false .* not 'maybe'"),
    "a judged pair": ({"question": "q", "answer": "a", "label": 0}, "bad answers as well as good ones"),
    "a judged chat": ({"messages": [USER, ANSWER], "label": "false"}, "bad answers as well as good ones"),
    "empty": ({"messages": [USER, {"role": "assistant", "content": ""}]}, r"messages\[1\] is an empty answer"),
    "empty on the way": (
        {"messages": [USER, {"role": "assistant", "content": " \n"}, USER, ANSWER]},
        r"messages\[1\] is an empty answer",
    ),
    "empty part": ({"messages": [USER, {**ANSWER, "content": [{"type": "text", "text": ""}]}]}, "is an empty"),
    "thoughts that the template leaves out": (
        {"messages": [USER, {"role": "assistant", "content": "", "reasoning_content": "t"}]},
        "prints nothing of the answer",
    ),
    "empty of ShareGPT": (
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": ""}]},
        "is an empty",
    ),
    "arguments": ({"messages": [USER, call(arguments='{"a": ')]}, "the arguments of add are not JSON"),
    "arguments that are a list": ({"messages": [USER, call(arguments="[1]")]}, "must be a JSON object"),
    "arguments that are no number": ({"messages": [USER, call(arguments='{"a": NaN}')]}, "of add are not JSON"),
    "an infinite argument": ({"messages": [USER, call(arguments={"a": [float("inf")]})]}, "of add are not JSON"),
    "argument twice": ({"messages": [USER, call(arguments='{"a": 1, "a": 2}')]}, 'the key "a" is there twice'),
    "not offered": ({"messages": [USER, call("sub")], "tools": [TOOL]}, "calls sub, and the row's tools are add"),
    "nameless": ({"messages": [USER, call("")]}, "calls a function without a name"),
    "a key twice": ('{"messages": [], "messages": [{"role": "user"}]}', 'the key "messages" is there twice'),
    "a key twice inside": ('{"prompt": "q", "response": {"a": 1, "a": 2}}', 'the key "a" is there twice'),
    "a call of ShareGPT": (
        {"conversations": [{"from": "human", "value": "q"}, {"from": "function_call", "value": "add(1)"}]},
        r"conversations\[1\] must hold a call",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_row_that_means_something_else_is_refused_by_name_or_left_out(name, tools, tmp_path) -> None:
    row, words = REFUSED[name]
    good = {"messages": [USER, ANSWER]}
    path = lines(tmp_path / "rows.jsonl", row, good, row, good)
    with pytest.raises(ValueError, match=rf"rows\.jsonl, line 1: .*{words}"):
        load_stream([path], 300, *tools)
    told: list[str] = []
    assert load_stream([path], 300, *tools, skip=True, tell=told.append).num_documents == 2
    assert "left out" in told[0] and "rows.jsonl, line 1" in told[0]


@pytest.mark.parametrize("name", sorted(set(REFUSED) - {"a bad answer", "a good answer"}))
def test_a_check_names_such_rows_with_their_lines(name, tools, tmp_path) -> None:
    """Judged answers are what an objective takes; the rest cannot be trained on."""
    path = lines(tmp_path / "rows.jsonl", REFUSED[name][0], REFUSED[name][0])
    (found,) = check_files([path], *tools)
    (problem,) = found.problems
    assert problem.startswith("2 rows: ") and "rows.jsonl, line 1, line 2)" in problem


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "q", "chosen": "a", "rejected": "a"}, '"chosen" and "rejected" are the same'),
        ({"chosen": [USER, ANSWER], "rejected": [USER, ANSWER]}, "are the same"),
        ({"prompt": "q", "chosen": [{**ANSWER, "weight": 1}], "rejected": "a"}, "are the same"),
        ({"prompt": "q", "chosen": [USER, ANSWER], "rejected": "a"}, "are the same"),
        ({"prompt": "q", "chosen": [{**ANSWER, "reasoning_content": "t"}], "rejected": "a"}, "are the same"),
        ({"prompt": "q", "chosen": [{**ANSWER, "content": ""}], "rejected": "b"}, "is an empty answer"),
        ({"prompt": "q", "chosen": [{**ANSWER, "weight": 0}], "rejected": "b"}, '"chosen" ends with a message'),
        ({"prompt": "q", "chosen": [call("sub")], "rejected": "b", "tools": [TOOL]}, "calls sub"),
        ({"prompt": "q", "completion": [{**ANSWER, "content": ""}], "label": True}, "is an empty answer"),
    ],
)
def test_answers_that_teach_nothing_are_refused_in_pairs(row, words, tools, tmp_path) -> None:
    (found,) = check_files([lines(tmp_path / "pairs.jsonl", row)], *tools)
    assert words in found.problems[0] and "pairs.jsonl, line 1" in found.problems[0]
    path = lines(tmp_path / "train.jsonl", {"prompt": "q", "chosen": "a", "rejected": "b"}, row)
    if "chosen" in row:
        config = tiny_run(tmp_path, objective="dpo", data={"train": [path], "seq_len": 250, "micro_batch": 1000})
        with pytest.raises(ValueError, match=r"train\.jsonl, line 2"):
            Trainer(config)


def test_a_prompt_that_one_side_of_a_pair_repeats_is_taken_off_it() -> None:
    _, form = form_of({"prompt": "q", "chosen": [USER, ANSWER], "rejected": "b"})
    assert (form.prompt, form.chosen) == ([USER], [ANSWER]) and form.rejected[0]["content"] == "b"


def test_keys_twice_are_found_in_a_list_of_rows(tools, tmp_path) -> None:
    path = tmp_path / "rows.json"
    path.write_text('[{"question": "q", "answer": "a"}, {"question": "q", "answer": "a", "answer": "b"}]')
    (found,) = check_files([str(path)], *tools)
    twice = f'1 row: the key "answer" is there twice in one object (first: {path}, row 2)'
    assert found.rows == 1 and found.problems == [twice]


def test_calls_and_observations_of_sharegpt(tools) -> None:
    row = {
        "conversations": [
            {"from": "human", "value": "1 + 1?"},
            {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
            {"from": "observation", "value": "2"},
            {"from": "gpt", "value": "It is 2."},
        ],
        "tools": json.dumps([TOOL]),
    }
    _, form = form_of(row)
    assert [message["role"] for message in form.messages] == ["user", "assistant", "tool", "assistant"]
    expected = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>It is 2.<|im_end|>'
    assert learned(form, tools) == expected
    row["conversations"][1]["value"] = '[{"name": "add", "arguments": {}}, {"name": "add"}]'
    assert len(form_of(row)[1].messages[1]["tool_calls"]) == 2


def test_columns_of_any_header_are_named_in_the_settings(tools, tmp_path) -> None:
    path = tmp_path / "fragen.csv"
    path.write_text("Frage,Antwort,Quelle\nq,a,Buch\n")
    names = {"question": "Frage", "answer": "Antwort"}
    save_tiny_llm_text(tmp_path)
    with pytest.raises(ValueError, match="no layout is known with the keys Frage, Antwort, Quelle"):
        load_stream([str(path)], 300, *tools)
    stream = load_stream([str(path)], 300, *tools, columns=names)
    assert said(stream.tokens.tolist(), stream.trained.tolist(), tools[0]) == "a<|im_end|>"
    (found,) = check_files([str(path)], *tools, {**names, "system": "Rolle"})
    assert found.unread == "ignored keys: Quelle (1 row); no row has the column 'Rolle' (data.columns.system)"
    with pytest.raises(ValueError, match=r"data\.columns names qestion; .* did you mean question\?"):
        load_stream([str(path)], 300, *tools, columns={"qestion": "Frage"})
    tiny_run(tmp_path)
    toml = tmp_path / "run.toml"
    data = f'[data]\ntrain = "{path}"\nseq_len = 64\nmicro_batch = 64\n'
    data += 'columns = {question = "Frage", answer = "Antwort"}\n'
    toml.write_text(f'model = "{tmp_path}/model"\nrun_dir = "{tmp_path}/run"\nsteps = 1\ndevice = "cpu"\n{data}')
    config = TrainConfig.from_toml(toml)
    assert config.data.columns == names and TrainConfig.from_dict(config.to_dict()) == config
    assert Trainer(config).objective.loader.stream.num_documents == 1
    streamed = Trainer(config.changed(["data.streaming=true"])).objective.loader
    assert next(streamed).num_labels == 2
    tokenize([path], tmp_path / "f.tokens", str(tmp_path / "model"), workers=1, chats=config.data)
    assert open_tokens(tmp_path / "f.tokens", 300).num_documents == 1
    options = ("--columns", "question=Frage", "--columns", "answer=Antwort", "--model", str(tmp_path / "model"))
    assert run_here("data", "check", str(path), *options).returncode == 0
    assert "KEY=HEADER" in run_here("data", "check", str(path), "--columns", "Frage", *options[4:]).stderr
    with pytest.raises(ValueError, match=r"data\.columns must be a table of strings"):
        config.changed(["data.columns=Frage"])
