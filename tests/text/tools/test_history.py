"""Calls of earlier turns, as templates can take them."""

import pytest

from transect.text.chat_template import ChatTemplate
from transect.text.tools.history import with_history
from transect.text.tools.registry import SHAPES, for_template, shape_of
from transect.text.tools.spec import tool_use

LLAMA = "{{ tools }} ipython parameters {{ raise_exception('This model only supports single tool-calls at once!') }}"


def call(name, identity):
    return {"id": identity, "function": {"name": name, "arguments": "{}"}}


def told(*identities):
    """Two calls at once, and their results, the second first; then one more."""
    one, two, three = identities
    return [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "So", "tool_calls": [call("f", one), call("g", two)]},
        {"role": "tool", "tool_call_id": two, "content": "2"},
        {"role": "tool", "tool_call_id": one, "content": "1"},
        {"role": "assistant", "content": None, "tool_calls": [call("f", three)]},
        {"role": "tool", "tool_call_id": three, "content": "3"},
    ]


def ids(messages):
    calls = [call["id"] for message in messages for call in message.get("tool_calls", ())]
    return calls, [message["tool_call_id"] for message in messages if "tool_call_id" in message]


def test_ids_of_other_servers():
    long = told("call_5c0e1d", "abcdefGH9", "toolu_01")
    (one, two, three), results = ids(with_history(SHAPES["mistral"], long))
    assert two == "abcdefGH9" and results == [two, one, three]
    assert len({one, two, three}) == 3 and all(len(each) == 9 and each.isalnum() for each in (one, two, three))
    assert ids(with_history(SHAPES["mistral"], long))[0] == [one, two, three], "the prefix cache sees the same prompt"
    calls, results = ids(with_history(SHAPES["kimi_k2"], told("call_1", "functions.g:7", "call_2")))
    assert calls == ["functions.f:0", "functions.g:7", "functions.f:2"]
    assert results == ["functions.g:7", "functions.f:0", "functions.f:2"]
    assert with_history(SHAPES["hermes"], long) == long
    unnamed = told(None, None, None)
    assert all("tool_call_id" not in each for each in with_history(SHAPES["mistral"], unnamed)[:2])


def test_one_call_in_a_message_where_the_template_shows_no_more():
    shape = shape_of(LLAMA)
    assert shape.single and SHAPES["gpt_oss"].single and not shape_of("{{ tools }} ipython parameters").single
    messages = with_history(shape, told("a", "b", "c"))
    parts = [message.get("tool_call_id") or [c["id"] for c in message.get("tool_calls", ())] for message in messages]
    assert parts == [[], ["a"], "a", ["b"], "b", ["c"], "c"]
    assert [message["content"] for message in messages] == ["x", "So", "1", None, "2", None, "3"]
    assert with_history(shape, told("a", "b", "c"), apart=False) == told("a", "b", "c")
    together, _ = for_template(LLAMA, told("a", "b", "c"), {}, apart=False)
    assert len(together) == 6 and len(for_template(LLAMA, told("a", "b", "c"), {})[0]) == 7
    assert "call)*" not in shape.grammar(tool_use([{"name": "f"}]), {})


@pytest.mark.parametrize("source", ["{{ tools }}[TOOL_CALLS]", "{{ messages[1].tool_calls[0].id }}"])
def test_a_conversation_without_calls_is_left_alone(source):
    messages = [{"role": "user", "content": "x"}]
    assert for_template(source, messages, {})[0] is messages


def test_a_template_that_demands_nine_letters():
    calls = "{% for m in messages %}{% for c in m.tool_calls %}{{ c.id | length }} {% endfor %}{% endfor %}"
    source = "{{ tools }}[TOOL_CALLS]" + calls
    messages, _ = for_template(source, told("call_5c0e1d", "b", "c"), {})
    assert ChatTemplate(source).render(messages).endswith("9 9 9 ")
