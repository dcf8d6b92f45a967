"""Tools, thoughts, ``/v1/responses`` and ``/v1/messages`` on the fake engine: scripted text, one byte a token."""

import dataclasses
import json

import httpx
import pytest
from effort import quick_first

from transect.server.app import create_app
from transect.server.openai import responses
from transect.text.chat_template import ChatTemplate
from transect.text.tools.registry import SHAPES

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}
ARGUMENTS = ('{"a": 1, "text": "} \\" <tool_call>"}', '{"a":\n  -2}')
CALLS = "Well, ".rstrip() + "".join(
    f'\n<tool_call>\n{{"name": "add", "arguments": {arguments}}}\n</tool_call>' for arguments in ARGUMENTS
)
ASK = {"model": "fake-model", "messages": [{"role": "user", "content": "x"}], "max_tokens": 4000}


@pytest.fixture(autouse=True)
def room(engine):
    engine.max_model_len = 10_000


async def events(client, path, body):
    """The data of every event."""
    response = await client.post(path, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


async def test_calls_are_read_from_whole_and_streamed_answers_alike(client, engine):
    engine.reply = CALLS
    body = {**ASK, "tools": [ADD]}
    whole = (await client.post("/v1/chat/completions", json=body)).json()["choices"][0]
    assert whole["message"]["content"] == "Well,"
    assert [call["function"]["arguments"] for call in whole["message"]["tool_calls"]] == list(ARGUMENTS)
    assert {call["function"]["name"] for call in whole["message"]["tool_calls"]} == {"add"}
    text, calls = "", {}
    for chunk in await events(client, "/v1/chat/completions", body):
        for choice in chunk["choices"]:
            text += choice["delta"].get("content") or ""
            for call in choice["delta"].get("tool_calls", ()):
                entry = calls.setdefault(call["index"], {"arguments": ""})
                entry["arguments"] += call["function"]["arguments"]
                entry |= {name: call[name] for name in ("id", "type") if name in call}
                entry |= {"name": call["function"]["name"]} if "name" in call["function"] else {}
    assert text == "Well,"
    assert [calls[index]["arguments"] for index in sorted(calls)] == list(ARGUMENTS)
    assert all(call["name"] == "add" and call["type"] == "function" and call["id"] for call in calls.values())


@pytest.mark.parametrize("name", [name for name, shape in SHAPES.items() if not shape.channels])
async def test_every_form_whole_and_streamed_byte_by_byte(engine, options, name):
    shape = SHAPES[name]
    given = [{"a": 1}, {"a": -2}]
    engine.reply = ("Wéll, " if shape.begin else "") + shape.write(("add", each) for each in given)
    client = client_of(engine, dataclasses.replace(options, tool_call_parser=name))
    body = {**ASK, "tools": [ADD]}
    whole = (await client.post("/v1/chat/completions", json=body)).json()["choices"][0]["message"]
    calls = whole["tool_calls"]
    assert [json.loads(call["function"]["arguments"]) for call in calls] == given
    assert whole["content"] == ("Wéll," if shape.begin else None)
    streamed = {}
    for chunk in await events(client, "/v1/chat/completions", body):
        for call in chunk["choices"][0]["delta"].get("tool_calls", ()):
            entry = streamed.setdefault(call["index"], ["", ""])
            entry[0] += call["function"].get("name", "")
            entry[1] += call["function"]["arguments"]
    assert [streamed[index] for index in sorted(streamed)] == [
        [call["function"]["name"], call["function"]["arguments"]] for call in calls
    ]


async def test_the_engine_gets_one_grammar_and_the_template_is_taught(client, engine):
    await client.post("/v1/chat/completions", json={**ASK, "tools": [ADD], "tool_choice": "required"})
    _, params, _ = engine.seen[0]
    assert params.structured_outputs.field == "tools" and '"<tool_call>"' in params.structured_outputs.lark
    answer = await client.post("/tokenize", json={"messages": ASK["messages"]})
    prompt = await client.post("/v1/chat/completions", json={**ASK, "tools": [ADD]})
    assert prompt.json()["usage"]["prompt_tokens"] > answer.json()["count"] + 200, "the prompt describes the tools"


async def test_results_of_calls_go_back_in_the_conversation(client, engine):
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    history = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
    ]
    answer = await client.post("/v1/chat/completions", json={**ASK, "messages": history, "tools": [ADD]})
    assert answer.status_code == 200, answer.text


async def test_an_answer_that_is_cut_off_in_a_call(client, engine):
    engine.reply = CALLS
    choice = (await client.post("/v1/chat/completions", json={**ASK, "tools": [ADD], "max_tokens": 70})).json()[
        "choices"
    ][0]
    assert choice["finish_reason"] == "length"
    arguments = choice["message"]["tool_calls"][0]["function"]["arguments"]
    assert arguments and ARGUMENTS[0].startswith(arguments) and arguments != ARGUMENTS[0]


async def shown(client, path, body):
    """(text, thoughts) of an answer, streamed and in one piece; both must be alike."""
    whole = (await client.post(path, json=body)).json()
    streamed = await events(client, path, body)
    if path.endswith("completions"):
        message = whole["choices"][0]["message"]
        deltas = [choice["delta"] for chunk in streamed for choice in chunk["choices"]]
        pieces = ["".join(delta.get(name) or "" for delta in deltas) for name in ("content", "reasoning")]
        found = [message["content"] or "", message.get("reasoning") or ""]
    elif path.endswith("responses"):
        parts = [part for item in whole["output"] for part in item.get("content", ())]
        kinds = ("output_text", "reasoning_text")
        found = ["".join(part["text"] for part in parts if part["type"] == kind) for kind in kinds]
        news = [(event["type"], event.get("delta")) for event in streamed]
        pieces = ["".join(text for kind, text in news if kind == f"response.{name}.delta") for name in kinds]
    else:
        names = ("text", "thinking")
        found = ["".join(block.get(name, "") for block in whole["content"]) for name in names]
        deltas = [event["delta"] for event in streamed if event["type"] == "content_block_delta"]
        pieces = ["".join(delta.get(name, "") for delta in deltas) for name in names]
    assert pieces == found
    return found


SCHEMA = ADD["function"]["parameters"]
PATHS = {
    "/v1/chat/completions": ("max_tokens", {**ASK, "tools": [ADD]}),
    "/v1/responses": (
        "max_output_tokens",
        {"input": "x", "tools": [{"type": "function", "name": "add", "parameters": SCHEMA}]},
    ),
    "/v1/messages": ("max_tokens", {"messages": ASK["messages"], "tools": [{"name": "add", "input_schema": SCHEMA}]}),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", quick_first(SHAPES, ("hermes", "llama3_json", "deepseek_v31", "mistral", "gpt_oss")))
async def test_a_call_that_is_cut_off_leaves_no_markup(engine, options, name, path):
    """After any number of tokens the text is what came before the call."""
    shape, (limit, body) = SHAPES[name], PATHS[path]
    if shape.channels:
        engine.chat_template = ChatTemplate(CHANNELS)
        before, engine.reply = "", CALLED
    else:
        before = "Wéll," if shape.begin else ""
        engine.reply = before + shape.write(("add", each) for each in ({"a": 1}, {"a": -2}))
    client = client_of(engine, dataclasses.replace(options, tool_call_parser=name))
    for tokens in range(len(before.encode()) + 1, len(engine.reply.encode()), 3):
        text, thoughts = await shown(client, path, {**body, limit: tokens})
        assert text == before and "I see.".startswith(thoughts), tokens


@pytest.mark.parametrize("path", PATHS)
async def test_thoughts_that_are_cut_off_leave_no_markup(engine, options, path):
    engine.reply, (limit, body) = "<think>I see.</think>\n\nYes", PATHS[path]
    client = client_of(engine, dataclasses.replace(options, reasoning_parser="qwen3"))
    for tokens in range(1, len(engine.reply)):
        text, thoughts = await shown(client, path, {**body, limit: tokens})
        assert "Yes".startswith(text) and "I see.".startswith(thoughts), tokens


CHANNELS = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}{{ tools }}"
    "<|start|>assistant{# <|channel|> #}"
)
THOUGHT = "<|channel|>analysis<|message|>I see.<|end|><|start|>assistant"
CALLED = THOUGHT + '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 4}'
TOLD = THOUGHT + "<|channel|>final<|message|>Yes"


@pytest.mark.parametrize("reply", [TOLD, CALLED])
async def test_answers_in_channels(client, engine, options, reply):
    engine.chat_template, engine.reply = ChatTemplate(CHANNELS), reply
    client = client_of(engine, options)
    body = {**ASK, "tools": [ADD]}
    whole = (await client.post("/v1/chat/completions", json=body)).json()
    message = whole["choices"][0]["message"]
    calls = message.get("tool_calls", [])
    assert message["reasoning_content"] == message["reasoning"] == "I see."
    assert message["content"] == (None if calls else "Yes")
    assert [call["function"] for call in calls] == [{"name": "add", "arguments": '{"a": 4}'}] * (reply == CALLED)
    counted = len("<|channel|>analysis<|message|>I see.<|end|>")
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": counted}
    chunks = await events(client, "/v1/chat/completions", {**body, "stream_options": {"include_usage": True}})
    assert chunks[-1]["usage"] == whole["usage"]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
    assert "".join(delta.get("reasoning", "") for delta in deltas) == "I see."
    assert "".join(delta.get("content", "") for delta in deltas) == (message["content"] or "")
    pieces = [call["function"]["arguments"] for delta in deltas for call in delta.get("tool_calls", ())]
    assert "".join(pieces) == ('{"a": 4}' if calls else "")
    tool = {"type": "function", "name": "add", "parameters": ADD["function"]["parameters"]}
    response = (await client.post("/v1/responses", json={"input": "x", "tools": [tool]})).json()
    assert [item["type"] for item in response["output"]] == ["reasoning", "function_call" if calls else "message"]
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": counted}
    turn = {"max_tokens": 400, "tools": [{"name": "add", "input_schema": {}}], "messages": ASK["messages"]}
    blocks = (await client.post("/v1/messages", json=turn)).json()["content"]
    assert [block["type"] for block in blocks] == ["thinking", "tool_use" if calls else "text"]


async def test_thoughts_that_the_template_begins(client, engine, options):
    """The prompt ends with their mark, so the answer has the closing one alone."""
    engine.chat_template = ChatTemplate("{{ messages[-1].content }}[assistant]<think>\n")
    engine.reply = "I see.</think>\n\nYes"
    client = client_of(engine, options)
    whole = (await client.post("/v1/chat/completions", json=ASK)).json()
    message = whole["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("I see.", "Yes")
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": len("I see.</think>")}
    form = {"type": "json_schema", "json_schema": {"name": "f", "schema": {"type": "integer"}}}
    await client.post("/v1/chat/completions", json={**ASK, "response_format": form})
    assert '"</think>"' in engine.seen[-1][1].structured_outputs.lead
    plain = client_of(engine, dataclasses.replace(options, reasoning_parser="none"))
    message = (await plain.post("/v1/chat/completions", json=ASK)).json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": engine.reply, "refusal": None}


async def test_a_template_of_its_own_for_tools(engine, options):
    """Without tools the other one renders, to which calls of earlier turns are text."""
    tool_use = "{% for m in messages %}{{ m.role }}{% endfor %}{{ tools[0].function.name }}[TOOL_CALLS]"
    engine.chat_template = ChatTemplate(
        "{% for m in messages %}{{ m.content }}{% endfor %}", variants={"tool_use": tool_use}
    )
    engine.reply = '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]'
    seen = []
    stream = engine.stream
    engine.stream = lambda ids, *args, **options: seen.append(bytes(ids).decode()) or stream(ids, *args, **options)
    client = client_of(engine, options)
    answer = (await client.post("/v1/chat/completions", json={**ASK, "tools": [ADD]})).json()["choices"][0]
    (call,) = answer["message"]["tool_calls"]
    assert len(call["id"]) == 9 and call["function"] == {"name": "add", "arguments": '{"a": 1}'}
    history = [*ASK["messages"], answer["message"], {"role": "tool", "tool_call_id": call["id"], "content": "2"}]
    await client.post("/v1/chat/completions", json={**ASK, "messages": history})
    assert seen[0] == "useradd[TOOL_CALLS]"
    assert '<tool_call>\n{"name": "add"' in seen[1] and "<tool_response>\n2" in seen[1]


EFFORTS = [
    ("{{ reasoning_effort }}", {"reasoning_effort": "high"}, "high"),
    ("{{ enable_thinking }}", {"reasoning_effort": "none"}, "False"),
    ("{{ thinking }}", {"reasoning_effort": "low"}, "True"),
    ("{{ thinking }}", {"reasoning_effort": "low", "chat_template_kwargs": {"thinking": 5}}, "5"),
    ("{{ thinking is defined }}", {}, "False"),
    ("plain", {"reasoning_effort": "none"}, "plain"),
]


@pytest.mark.parametrize(("template", "fields", "prompt"), EFFORTS)
async def test_how_long_a_model_shall_think(engine, options, template, fields, prompt):
    engine.chat_template = ChatTemplate(template)
    seen = []
    stream = engine.stream
    engine.stream = lambda ids, *args, **options: seen.append(bytes(ids).decode()) or stream(ids, *args, **options)
    client = client_of(engine, options)
    response = await client.post("/v1/chat/completions", json={**ASK, **fields})
    assert response.status_code == 200, response.text
    effort = fields.get("reasoning_effort")
    body = {"input": "x", "reasoning": {"effort": effort}, "chat_template_kwargs": fields.get("chat_template_kwargs")}
    assert (await client.post("/v1/responses", json=body)).json()["reasoning"]["effort"] == effort
    assert seen == [prompt, prompt]


async def test_an_effort_that_the_template_does_not_know(client):
    response = await client.post("/v1/chat/completions", json={**ASK, "reasoning_effort": "low"})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "reasoning_effort")
    assert "(reasoning_effort) is not supported by this model's chat template" in error["message"]


async def test_thoughts_go_back_in_the_conversation(engine, options):
    """Each API has a name for them; templates know ``reasoning_content``."""
    engine.chat_template = ChatTemplate(
        "{% for m in messages %}({{ m.reasoning_content }}|{{ m.content }}){% endfor %}"
    )
    seen = []
    stream = engine.stream
    engine.stream = lambda ids, *args, **options: seen.append(bytes(ids).decode()) or stream(ids, *args, **options)
    client = client_of(engine, options)
    for name in ("reasoning", "reasoning_content"):
        turn = {"role": "assistant", "content": "Yes", name: "hm"}
        await client.post("/v1/chat/completions", json={**ASK, "messages": [turn, *ASK["messages"]]})
    item = {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Yes"}]}
    await client.post("/v1/responses", json={"input": [item, said, *ASK["messages"]]})
    blocks = [{"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "text", "text": "Yes"}]
    turns = [{"role": "assistant", "content": blocks}, *ASK["messages"]]
    await client.post("/v1/messages", json={"max_tokens": 5, "messages": turns})
    assert seen == ["(hm|Yes)(|x)"] * 4


@pytest.mark.parametrize(
    ("begun", "reply", "thoughts", "text"),
    [
        ("<think>I", " see.</think>Yes", " see.", "Yes"),
        ([{"type": "text", "text": "<think>I see.</think>So"}], " <think> yes", None, " <think> yes"),
        ("So", " yes", None, " yes"),
    ],
)
async def test_thoughts_of_an_answer_that_was_begun(engine, options, begun, reply, thoughts, text):
    engine.chat_template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}{# <think> #}")
    engine.reply = reply
    client = client_of(engine, options)
    messages = [*ASK["messages"], {"role": "assistant", "content": begun}]
    body = {**ASK, "messages": messages, "continue_final_message": True}
    message = (await client.post("/v1/chat/completions", json=body)).json()["choices"][0]["message"]
    assert (message.get("reasoning"), message["content"]) == (thoughts, text)
    blocks = (await client.post("/v1/messages", json={"max_tokens": 99, "messages": messages})).json()["content"]
    assert [block.get("thinking", block.get("text")) for block in blocks] == [each for each in (thoughts, text) if each]


def client_of(engine, options):
    return httpx.AsyncClient(transport=httpx.ASGITransport(create_app(engine, options)), base_url="http://server")


@pytest.mark.parametrize("reply", ["<think>I see {</think>\n\nYes", "Yes", "<thin", "<think>no end"])
async def test_thoughts(engine, options, reply):
    engine.reply = reply
    client = client_of(engine, dataclasses.replace(options, reasoning_parser="qwen3"))
    message = (await client.post("/v1/chat/completions", json=ASK)).json()["choices"][0]["message"]
    thoughts, text = {"<": ("I see {", "Yes"), "Y": (None, "Yes")}[reply[0]]
    if reply == "<thin":
        thoughts, text = None, ""  # the answer was cut off: this may be half a mark
    if reply == "<think>no end":
        thoughts, text = "no end", ""
    assert (message.get("reasoning_content"), message["content"]) == (thoughts, text)
    deltas = [c["choices"][0]["delta"] for c in await events(client, "/v1/chat/completions", ASK) if c["choices"]]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == (thoughts or "")
    assert "".join(delta.get("content", "") for delta in deltas) == text


async def test_responses_whole_and_streamed(client, engine):
    engine.reply = CALLS
    tool = {"type": "function", "name": "add", "parameters": ADD["function"]["parameters"]}
    body = {"model": "fake-model", "input": "x", "tools": [tool], "max_output_tokens": 4000}
    whole = (await client.post("/v1/responses", json=body)).json()
    assert [item["type"] for item in whole["output"]] == ["message", "function_call", "function_call"]
    assert whole["output"][0]["content"][0]["text"] == "Well,"
    assert [item["arguments"] for item in whole["output"][1:]] == list(ARGUMENTS)
    stream = await events(client, "/v1/responses", body)
    assert [event["sequence_number"] for event in stream] == list(range(len(stream)))
    deltas = [event for event in stream if event["type"] == "response.function_call_arguments.delta"]
    for index, arguments in enumerate(ARGUMENTS, 1):
        assert "".join(each["delta"] for each in deltas if each["output_index"] == index) == arguments
    last = stream[-1]["response"]
    assert stream[-1]["type"] == f"response.{last['status']}"
    assert [item["type"] for item in last["output"]] == [item["type"] for item in whole["output"]]


async def test_a_response_goes_on_from_one_that_is_kept(client, engine):
    first = (await client.post("/v1/responses", json={"input": "x"})).json()
    again = {"input": "y", "previous_response_id": first["id"]}
    second = (await client.post("/v1/responses", json=again)).json()
    assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"] + len("y")
    assert (await client.get(f"/v1/responses/{first['id']}")).json() == first
    assert (await client.delete(f"/v1/responses/{first['id']}")).json()["deleted"]
    missing = await client.post("/v1/responses", json=again)
    assert missing.status_code == 404 and missing.json()["error"]["param"] == "previous_response_id"
    unkept = (await client.post("/v1/responses", json={"input": "x", "store": False})).json()
    assert (await client.get(f"/v1/responses/{unkept['id']}")).status_code == 404


async def test_all_that_is_kept_of_a_response_counts(client, monkeypatch):
    monkeypatch.setattr(responses, "MOST_BYTES", 4000)
    small, large = {"input": "x"}, {"input": "x", "metadata": {"note": "y" * 1500}}
    kept = [(await client.post("/v1/responses", json=body)).json()["id"] for body in (small, large, large)]
    assert [(await client.get(f"/v1/responses/{name}")).status_code for name in kept] == [404, 404, 200]


async def test_messages_whole_and_streamed(client, engine):
    engine.reply = CALLS
    tool = {"name": "add", "input_schema": ADD["function"]["parameters"]}
    body = {"max_tokens": 4000, "system": "Be brief.", "tools": [tool], "messages": [{"role": "user", "content": "x"}]}
    whole = (await client.post("/v1/messages", json=body)).json()
    assert [block["type"] for block in whole["content"]] == ["text", "tool_use", "tool_use"]
    assert [block["input"] for block in whole["content"][1:]] == [json.loads(each) for each in ARGUMENTS]
    stream = await events(client, "/v1/messages", body)
    assert [stream[0]["type"], stream[-2]["type"], stream[-1]["type"]] == [
        "message_start",
        "message_delta",
        "message_stop",
    ]
    pieces = [event["delta"] for event in stream if event["type"] == "content_block_delta" and event["index"] == 1]
    assert "".join(piece["partial_json"] for piece in pieces) == ARGUMENTS[0]
    assert stream[-2]["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    count = await client.post("/v1/messages/count_tokens", json=body)
    assert count.status_code == 400, "max_tokens is no field of it"
    del body["max_tokens"]
    counted = (await client.post("/v1/messages/count_tokens", json=body)).json()["input_tokens"]
    usage = whole["usage"]
    assert counted == usage["input_tokens"] + usage["cache_read_input_tokens"]


@pytest.mark.parametrize("content", ["So: ", [{"type": "text", "text": "So: "}]])
async def test_an_answer_goes_on_with_the_turn_that_begins_it(client, engine, content):
    """As Anthropic's API has it: the answer is what follows."""
    seen = []
    stream = engine.stream
    engine.stream = lambda ids, *args, **options: seen.append(bytes(ids).decode()) or stream(ids, *args, **options)
    body = {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": content}]}
    whole = (await client.post("/v1/messages", json={**body, "max_tokens": 5})).json()
    assert whole["content"] == [{"type": "text", "text": "Hello"}]
    await events(client, "/v1/messages", {**body, "max_tokens": 5})
    assert seen == ["[user]x[assistant]So: "] * 2
    counted = (await client.post("/v1/messages/count_tokens", json=body)).json()["input_tokens"]
    assert counted == len(seen[0])


MESSAGE = {"max_tokens": 5, "messages": [{"role": "user", "content": "x"}]}


def result_of(content):
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": content}]}


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}]}, "max_tokens is required"),
        ("/v1/messages", {"max_tokens": 5, "messages": [{"role": "user", "content": [{"type": "image"}]}]}, "'image'"),
        ("/v1/messages", {"max_tokens": 5, "messages": ASK["messages"], "tool_choice": {"type": "x"}}, "tool_choice"),
        ("/v1/messages", {**MESSAGE, "tool_choice": {"type": ["auto"]}}, "tool_choice"),
        ("/v1/messages", {**MESSAGE, "messages": [result_of({"a": 1})]}, "messages[0] holds a block of type 'None'"),
        ("/v1/messages", {**MESSAGE, "messages": [result_of(["a"])]}, "messages[0] holds a block of type 'str'"),
        ("/v1/messages", {**MESSAGE, "output_config": {"format": "json"}}, "must be an object such as"),
        ("/v1/responses", {"input": [{"type": "computer_call"}]}, "'computer_call'"),
        ("/v1/responses", {"input": "x", "text": {"format": "json"}}, "text format must be an object such as"),
        ("/v1/responses", {"input": "x", "background": True}, "background"),
        ("/v1/responses", {"input": "x", "tools": [{"type": "web_search"}]}, "'web_search'"),
        ("/v1/responses", {"input": "x", "text": {"format": {"type": "xml"}}}, "'xml'"),
    ],
)
async def test_what_is_wrong_is_said(client, path, body, words):
    response = await client.post(path, json=body)
    assert response.status_code == 400 and words in response.json()["error"]["message"], response.text
    assert (response.json().get("type") == "error") == path.startswith("/v1/messages")
