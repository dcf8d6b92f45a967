"""Which form a chat template speaks, and how tools reach a model whose template does not print them."""

import json

import pytest

from transect.text.chat_template import ChatTemplate
from transect.text.tools.generic import taught
from transect.text.tools.registry import SHAPES, for_template, names, shape_of
from transect.text.tools.spec import tool_use

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("add", "weather.now")]
CALL = {"id": "c", "function": {"name": "add", "arguments": '{"a": 1}'}}
PHI = (
    "{% for message in messages %}{% if message['role'] == 'system' and 'tools' in message %}"
    "{{ '<|system|>' + message['content'] + '<|tool|>' + message['tools'] + '<|/tool|><|end|>' }}"
    "{% else %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endif %}{% endfor %}"
)
TOLD = {
    "generic": ["", "{{ messages }}", "{{ tools }}", "<tool_call>"],
    "hermes": ["{% if tools %}<tool_call>{% endif %}"],
    "mistral": ["{{ tools }}[TOOL_CALLS]", "{{ tools }}[TOOL_CALLS] ["],
    "mistral_v11": ["{{ tools }}[TOOL_CALLS]{{ name }}[ARGS]", "{{ tools }}[TOOL_CALLS]{{ name }}[CALL_ID]x[ARGS]"],
    "llama3_json": ["{{ tools }} ipython parameters", "{{ tools }} ipython parameters <|python_tag|>"],
    "pythonic": ["{{ tools }} ipython parameters [func_name1(param1=value1), func_name2(...)]"],
    "qwen3_coder": ["{{ tools }}<tool_call>\n<function=f>\n<parameter=p>"],
    "glm45": ["{{ tools }}<tool_call>{function-name}\n<arg_key>"],
    "phi4_mini": [PHI],
    "phi4_object": ['{{ tools }}<|tool|><|/tool|><|tool_call|>{"name": "foo"}<|/tool_call|>'],
    "phi4_functools": ["{{ tools }} formatted as functools[{...}]"],
    "granite": ["{{ tools }} respond with <|tool_call|> followed by a JSON list"],
    "deepseek_v3": ["{{ tools }}<｜tool▁calls▁begin｜>\n```json\n"],
    "deepseek_v31": ["{{ tools }}<｜tool▁calls▁begin｜>"],
    "lfm2": ["{{ tools }}List of tools: <|tool_list_start|>["],
    "gpt_oss": ["{{ tools }}<|start|>assistant<|channel|>commentary json<|message|>"],
    "kimi_k2": ["<|im_system|>tool_declare<|im_middle|>{{ tools }}"],
}


@pytest.mark.parametrize("name", SHAPES)
def test_which_form_a_template_speaks(name):
    for template in TOLD[name]:
        assert shape_of(template or None).name == name, template
    assert shape_of("{{ tools }}[TOOL_CALLS]", name).name == name


def test_other_names():
    assert shape_of(None, "qwen3").name == "hermes" and "qwen3" in names()
    with pytest.raises(ValueError, match=r"no form of tool calls 'x'; there are deepseek_r1"):
        shape_of(None, "x")


def test_a_template_without_tools_is_taught():
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "So:", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "2"}]},
    ]
    first, *others = taught(messages, tool_use(TOOLS, "required"))
    assert first["content"].startswith("Be brief.\n\n") and "weather.now" in first["content"]
    assert "must call a function" in first["content"]
    assert [message["role"] for message in others] == ["user", "assistant", "user"]
    assert others[1]["content"] == 'So:\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    assert "2" in others[2]["content"]
    assert taught(messages[1:], None)[0] == {"role": "user", "content": "x"}
    parts = {"role": "system", "content": [{"type": "text", "text": "Be brief."}]}
    assert taught([parts, *messages[1:]], tool_use(TOOLS, "required"))[0] == first


def test_a_template_that_shows_calls_and_no_tools():
    """As DeepSeek's own: the prompt teaches the form in which the template prints calls of earlier turns."""
    source = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for call in m.tool_calls %}<｜tool▁calls▁begin｜>"
        "{{ call.function.name }}{% endfor %}{% endfor %}"
    )
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    messages.append({"role": "tool", "content": "2"})
    plain, variables = for_template(source, messages, {"tools": TOOLS})
    assert variables == {} and shape_of(source).name == "deepseek_v31"
    text = ChatTemplate(source).render(plain)
    assert "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>" in text and "weather.now" in text
    assert text.endswith("<user>x<assistant><｜tool▁calls▁begin｜>add<tool>2")


def test_a_template_with_tools_in_the_system_message():
    """As Phi-4-mini's own."""
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    plain, variables = for_template(PHI, messages, {"tools": TOOLS, "day": 1})
    text = ChatTemplate(PHI).render(plain, **variables)
    assert variables == {"day": 1}
    listed = json.loads(text[text.index("<|tool|>") + 8 : text.index("<|/tool|>")])
    assert [tool["name"] for tool in listed] == ["add", "weather.now"]
    assert text.endswith('<|tool_call|>[{"name": "add", "arguments": {"a": 1}}]<|/tool_call|><|end|>')
    assert for_template(PHI, messages[:1], {}) == (messages[:1], {})
