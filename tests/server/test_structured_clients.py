"""Structured output and tools with the real clients (openai, anthropic), the real server and the real engine, on a tiny
random model: it knows nothing, so what is right about its answers is the grammar's work."""

import json
import os
import subprocess
import threading
import time
from typing import Literal

import jsonschema
import openai
import pydantic
import pytest
from tiny_llm import save_tiny_llm

PATIENCE_S = 120
HELLO = [{"role": "user", "content": "Hi"}]


class Person(pydantic.BaseModel):
    model_config = {"extra": "forbid"}
    name: str = pydantic.Field(max_length=6)
    age: int = pydantic.Field(ge=0, le=150)
    kind: Literal["child", "adult"]


ADD = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": -9, "maximum": 9}, "b": {"enum": ["x", 'q"}', "é"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": ADD}},
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "additionalProperties": False}}},
]


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tiny")
    save_tiny_llm(directory, max_position_embeddings=4096)
    options = ("--device", "cpu", "--no-native", "--threads", "1", "--dtype", "float32", "--async-scheduling")
    process = subprocess.Popen(
        [
            os.sys.executable,
            "-m",
            "transect",
            "serve",
            str(directory),
            "--port",
            "0",
            "--served-model-name",
            "m",
            *options,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    line = process.stdout.readline()
    assert " ready on " in line, line
    yield line.split(" ready on ")[1].split()[0]
    process.terminate()
    process.wait(PATIENCE_S)


@pytest.fixture(scope="module")
def client(url):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)


@pytest.fixture(scope="module")
def claude(url):
    import anthropic  # its import takes seconds, and each worker imports every test

    return anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE_S)


def text_of(stream):
    return "".join(choice.delta.content or "" for chunk in stream for choice in chunk.choices)


def test_parse_gives_an_object_of_the_class(client):
    answer = client.chat.completions.parse(model="m", messages=HELLO, response_format=Person, seed=1)
    person = answer.choices[0].message.parsed
    assert isinstance(person, Person) and answer.choices[0].finish_reason == "stop"


def test_every_choice_is_valid_and_streams_are_the_same(client):
    schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": Person.model_json_schema()}}
    arguments = {"model": "m", "messages": HELLO, "response_format": schema, "seed": 3, "temperature": 2.0}
    whole = client.chat.completions.create(**arguments, n=3, logprobs=True, top_logprobs=2)
    texts = [choice.message.content for choice in whole.choices]
    assert len(set(texts)) == 3
    for text in texts:
        jsonschema.validate(json.loads(text), Person.model_json_schema())
    streamed = ["", "", ""]
    for chunk in client.chat.completions.create(**arguments, n=3, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts


@pytest.mark.parametrize(
    ("form", "right"),
    [
        ({"structured_outputs": {"regex": "[ab]{3}-[0-9]"}}, r"[ab]{3}-[0-9]"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"guided_grammar": 'root ::= "a" | "b" root2\nroot2 ::= [0-9]'}, "a|b[0-9]"),
        ({"structured_outputs": {"grammar": 'start: "x" NUMBER\nNUMBER: /[0-9]{2}/'}}, "x[0-9]{2}"),
        ({"guided_json": '{"enum": ["p", 5]}'}, '"p"|5'),
    ],
)
def test_other_forms_in_completions(client, form, right):
    import re

    answer = client.completions.create(model="m", prompt="Hi", seed=2, max_tokens=60, extra_body=form)
    assert re.fullmatch(right, answer.choices[0].text) and answer.choices[0].finish_reason == "stop", answer


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"type": "string", "pattern": f"(a|b)*a(a|b){{{n}}}"} for n in range(8, 24)]},
        {"allOf": [{"anyOf": [{"properties": {f"{c}{i}": {"const": 0}}} for c in "pq"]} for i in range(14)]},
        {"enum": ["x" * 5 + str(i) for i in range(100_000)]},
        {"type": "strange"},
        {"not": {"type": "string"}},
        {"$ref": "http://example.com/schema"},
        '{"items":' * 10_000 + "{}" + "}" * 10_000,
    ],
)
def test_hostile_schemas_are_refused_and_others_go_on(client, schema):
    arguments = {"model": "m", "messages": HELLO, "seed": 5, "max_tokens": 40, "extra_body": {"ignore_eos": True}}
    alone = client.chat.completions.create(**arguments).choices[0].message.content
    beside = []
    thread = threading.Thread(
        target=lambda: beside.append(text_of(client.chat.completions.create(**arguments, stream=True)))
    )
    thread.start()
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="m", prompt="Hi", extra_body={"guided_json": schema})
    thread.join(PATIENCE_S)
    assert caught.value.param == "guided_json", caught.value.message
    assert beside == [alone]


@pytest.mark.parametrize("regex", ["(" * 400 + "a" + "){1,9}" * 400, "x" * 40_000, "(?=a)b"])
def test_hostile_expressions_are_refused(client, regex):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="m", prompt="Hi", extra_body={"guided_regex": regex})
    assert caught.value.param == "guided_regex", caught.value.message


def test_a_schema_of_ten_megabytes_is_too_long_a_body(client):
    schema = {"enum": ["x" * 100 + str(i) for i in range(100_000)]}
    with pytest.raises(openai.APIStatusError) as caught:
        client.completions.create(model="m", prompt="Hi", extra_body={"guided_json": schema})
    assert caught.value.status_code == 413


def test_required_tools_and_their_streams(client):
    arguments = {"model": "m", "messages": HELLO, "tools": TOOLS, "tool_choice": "required", "seed": 4}
    arguments |= {"max_tokens": 400, "parallel_tool_calls": False}
    choice = client.chat.completions.create(**arguments).choices[0]
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    schema = next(tool["function"]["parameters"] for tool in TOOLS if tool["function"]["name"] == call.function.name)
    jsonschema.validate(json.loads(call.function.arguments), schema)
    name, streamed = "", ""
    for chunk in client.chat.completions.create(**arguments, stream=True):
        for piece in (each for choice in chunk.choices for each in choice.delta.tool_calls or ()):
            name += piece.function.name or ""
            streamed += piece.function.arguments or ""
    assert (name, streamed) == (call.function.name, call.function.arguments)


def test_no_properties_that_nobody_named(client):
    """A random model would write some at once."""
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    asked = {"model": "m", "messages": HELLO, "seed": 4, "temperature": 2.0, "n": 4}
    answer = client.chat.completions.create(**asked, tools=[tool], tool_choice="required", parallel_tool_calls=False)
    found = [choice.message.tool_calls[0].function.arguments for choice in answer.choices]
    form = {"type": "json_schema", "json_schema": {"name": "f", "schema": schema}}
    answer = client.chat.completions.create(**asked, response_format=form)
    found += [choice.message.content for choice in answer.choices]
    assert [set(json.loads(text)) for text in found] == [{"a"}] * 8


def test_a_round_of_calls(client):
    messages = [*HELLO]
    named = {"type": "function", "function": {"name": "add"}}
    answer = client.chat.completions.create(
        model="m", messages=messages, tools=TOOLS, tool_choice=named, seed=1
    ).choices[0]
    assert answer.finish_reason == "stop" and [call.function.name for call in answer.message.tool_calls] == ["add"]
    messages.append(answer.message)
    for call in answer.message.tool_calls:
        jsonschema.validate(json.loads(call.function.arguments), ADD)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "7"})
    last = client.chat.completions.create(
        model="m", messages=messages, tools=TOOLS, tool_choice="none", max_tokens=5, seed=1
    )
    assert last.choices[0].message.tool_calls is None and last.choices[0].message.content


STRICT = [{"type": "function", "function": {"name": "add", "parameters": ADD, "strict": True}}]


def test_required_tools_with_several_calls_allowed(client):
    """A model that knows nothing draws no whole mark after its first call, so its answer ends."""
    arguments = {"model": "m", "messages": HELLO, "tools": STRICT, "tool_choice": "required", "seed": 1}
    for choice in client.chat.completions.parse(**arguments, n=8).choices:
        (call,) = choice.message.tool_calls
        jsonschema.validate(call.function.parsed_arguments, ADD)
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
    (call,) = client.chat.completions.parse(**arguments).choices[0].message.tool_calls
    with client.chat.completions.stream(**arguments) as stream:
        final = stream.get_final_completion().choices[0]
    assert [each.function.arguments for each in final.message.tool_calls] == [call.function.arguments]
    tool = {"type": "function", "name": "add", "parameters": ADD, "strict": True}
    with client.responses.stream(model="m", input="Hi", tools=[tool], tool_choice="required") as stream:
        response = stream.get_final_response()
    assert [item.type for item in response.output] == ["function_call"] and response.status == "completed"


def test_an_answer_that_is_cut_off_in_its_call(client):
    """The text of the call so far is no content, whatever the client reads it with."""
    for limit in (3, 8, 14, 20):
        arguments = {"model": "m", "messages": HELLO, "tools": TOOLS, "tool_choice": "required", "max_tokens": limit}
        choice = client.chat.completions.create(**arguments).choices[0]
        assert not choice.message.content and choice.finish_reason == "length"
        assert text_of(client.chat.completions.create(**arguments, stream=True)) == ""


def test_auto_leaves_text_alone(client):
    answer = client.chat.completions.create(model="m", messages=HELLO, tools=TOOLS, max_tokens=12, seed=1).choices[0]
    assert answer.message.tool_calls is None and answer.finish_reason in ("length", "stop")


def test_responses(client):
    parsed = client.responses.parse(model="m", input="Hi", text_format=Person)
    assert isinstance(parsed.output_parsed, Person) and parsed.status == "completed"
    tool = {"type": "function", "name": "add", "parameters": ADD, "strict": True}
    with client.responses.stream(
        model="m", input="Hi", tools=[tool], tool_choice="required", parallel_tool_calls=False
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    (call,) = final.output
    jsonschema.validate(json.loads(call.arguments), ADD)
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    following = client.responses.create(
        model="m",
        previous_response_id=final.id,
        input=[{"type": "function_call_output", "call_id": call.call_id, "output": "7"}],
        max_output_tokens=16,
        temperature=0,
    )
    whole = following.usage.output_tokens < 16  # the tiny model may draw its end, by the arguments that it has made up
    assert following.status == ("completed" if whole else "incomplete")


def test_messages(claude):
    tool = {"name": "add", "description": "Adds.", "input_schema": ADD}
    ask = {"model": "m", "messages": HELLO, "tools": [tool], "tool_choice": {"type": "tool", "name": "add"}}
    answer = claude.messages.create(**ask, max_tokens=300)
    (block,) = answer.content
    assert answer.stop_reason == "tool_use" and block.name == "add"
    jsonschema.validate(block.input, ADD)
    with claude.messages.stream(**ask, max_tokens=300) as stream:
        final = stream.get_final_message()
    jsonschema.validate(final.content[0].input, ADD)
    result = {"type": "tool_result", "tool_use_id": block.id, "content": "7"}
    more = [*HELLO, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    text = claude.messages.create(model="m", messages=more, tools=[tool], max_tokens=8, tool_choice={"type": "none"})
    assert text.content[0].type == "text" and text.stop_reason in ("max_tokens", "end_turn")
    count = claude.messages.count_tokens(**ask)
    assert count.input_tokens == final.usage.input_tokens + final.usage.cache_read_input_tokens
    from anthropic import BadRequestError

    with pytest.raises(BadRequestError, match="must be auto, any, tool or none"):
        claude.messages.create(**{**ask, "tool_choice": {"type": "maybe"}}, max_tokens=5)


def test_grammars_that_take_long_are_refused_in_time(client):
    """Not a test of speed: the compiler would take minutes."""
    schema = {"allOf": [{"type": "string", "pattern": f"(a|b)*b(a|b){{{n}}}"} for n in range(8, 24)]}
    began = time.monotonic()
    with pytest.raises(openai.BadRequestError, match=r"takes longer than|takes more than|too busy"):
        client.completions.create(model="m", prompt="Hi", extra_body={"guided_json": schema})
    assert time.monotonic() - began < PATIENCE_S / 2
