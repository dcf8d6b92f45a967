"""Chat templates: what transformers renders, and plain sentences for everything that goes wrong."""

from __future__ import annotations

import datetime
import json
import pickle
from types import SimpleNamespace

import pytest

from transect.text import template_sandbox
from transect.text.chat_messages import normal_messages
from transect.text.chat_template import ChatTemplate

USER = [{"role": "user", "content": "Hi <b>&</b> \u00e9"}]
CALL = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}

TEMPLATES = {
    "chatml": (
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + "
        "'\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "llama": (
        "{{ bos_token }}{% for m in messages %}\n    {% if m.role == 'user' %}[INST] {{ m.content | trim }} [/INST]"
        "{% else %} {{ m.content }}{{ eos_token }}{% endif %}\n{% endfor %}"
    ),
    "tools": (
        "{%- if tools %}\n{{- tools | tojson(indent=2) }}\n{%- endif %}\n{%- for m in messages -%}\n"
        "{%- if m.tool_calls %}{{ m.tool_calls[0].function.arguments | tojson }}{% endif -%}\n"
        "{{ m.role ~ ': ' ~ m.content ~ '\n' }}{%- if loop.index > 8 %}{% break %}{% endif %}\n{%- endfor %}"
    ),
    "namespace": (
        "{% set ns = namespace(n=0, text='') %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
        "{% set ns.text = ns.text + '%d. %s|' % (ns.n, m.content) %}{% endfor %}{{ ns.text }}{{ '=' * 5 }}"
        "{{ '{}-{}'.format(1, 2) }}{{ messages[-1].content.split(' ')[0].upper() }}{{ [3, 1] | sort | join(',') }}"
    ),
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %};{% endfor %}",
    "macro": (
        "{% macro turn(m) %}<{{ m.role }}>{{ m.content }}{% endmacro %}"
        "{% for m in messages if m.role != 'system' %}{{ turn(m) }}{% endfor %}{{ 'x' if enable_thinking else 'y' }}"
    ),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_renders_what_transformers_renders(name):
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = [
        {"role": "system", "content": "Be brief."},
        *USER,
        {"role": "assistant", "content": "  \u4f60\u597d 'quoted' \"twice\" \n"},
        {"role": "user", "content": "Bye <|im_end|>"},
    ]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"b": [1, "\u00e9"], "a": None}}}]
    extra = {"bos_token": "<s>", "eos_token": "</s>", "enable_thinking": True}
    for prompt in (False, True):
        [theirs], _ = render_jinja_template(
            [messages], tools=tools, chat_template=TEMPLATES[name], add_generation_prompt=prompt, **extra
        )
        ours = ChatTemplate(TEMPLATES[name], "<s>", "</s>").render(messages, prompt, tools=tools, enable_thinking=True)
        assert ours == theirs


def test_smollm2(smollm2_metadata):
    source = SimpleNamespace(kind="gguf", text_folder=None, gguf=SimpleNamespace(metadata=smollm2_metadata))
    template = ChatTemplate.from_source(source)
    assert template is not None
    assert template.render([{"role": "user", "content": "Hello"}]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_model_without_a_template(toy_metadata):
    source = SimpleNamespace(kind="gguf", text_folder=None, gguf=SimpleNamespace(metadata=toy_metadata))
    assert ChatTemplate.from_source(source) is None
    source.gguf.metadata = {**toy_metadata, "tokenizer.chat_template": "{{ bos_token }}|{{ eos_token }}"}
    assert ChatTemplate.from_source(source).render(USER) == "<|im_start|>|<|im_end|>"


def test_the_date_in_a_format_of_the_templates_choice():
    text = ChatTemplate("{{ strftime_now('%Y-%m-%d') }}").render(USER)
    year, month, day = map(int, text.split("-"))
    assert year >= 2024 and 1 <= month <= 12 and 1 <= day <= 31


def test_parts_become_text_and_none_becomes_empty():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert normal_messages([{"role": "user", "content": parts}])[0]["content"] == "a\nb"
    assert normal_messages([{"role": "assistant", "content": None}])[0]["content"] == ""
    assert normal_messages([{"role": "assistant", "tool_calls": [CALL]}])[0]["content"] == ""


def test_templates_that_only_know_parts_get_parts():
    template = "{% for m in messages %}{% for part in m['content'] %}({{ part['text'] }}){% endfor %}{% endfor %}"
    assert ChatTemplate(template).render([{"role": "user", "content": "whole"}]) == "(whole)"
    both = "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}" + template + "{% endif %}"
    assert ChatTemplate(both + "{% endfor %}").render([{"role": "user", "content": "whole"}]) == "whole"


def test_arguments_of_tool_calls_become_objects():
    message = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    [normal] = normal_messages([message])
    assert normal["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert message["tool_calls"][0]["function"]["arguments"] == '{"a": 1}', "the caller's message stays as it was"
    broken = {**CALL, "function": {"name": "add", "arguments": "{"}}
    [normal] = normal_messages([{**message, "tool_calls": [broken]}])
    assert normal["tool_calls"][0]["function"]["arguments"] == "{"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "non-empty list"),
        ("hello", "non-empty list"),
        ({"role": "user", "content": "x"}, "non-empty list"),
        (["hello"], r"messages\[0\] must be an object"),
        ([*USER, {"content": "x"}], r"messages\[1\] needs a \"role\""),
        ([{"role": "", "content": "x"}], 'needs a "role"'),
        ([{"role": "user"}], 'needs a "content"'),
        ([{"role": "user", "content": 3}], "string or a list of text parts, got int"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "'image_url'; the model reads text only"),
        ([{"role": "user", "content": [3]}], "one of type 'int'"),
        ([{"role": "assistant", "content": "", "tool_calls": ["x"]}], "tool_calls must hold objects"),
    ],
)
def test_malformed_messages(messages, message):
    with pytest.raises(ValueError, match=message):
        ChatTemplate("x").render(messages)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("a\n{% for x in y", r"not valid Jinja \(line 2"),
        ("{{ x | no_such_filter }}", "not valid Jinja.*no_such_filter"),
        ("{% endfor %}", "not valid Jinja"),
        ("{% generation %}x", "not valid Jinja"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "cannot be compiled.*recursion"),
    ],
)
def test_invalid_templates(source, message):
    with pytest.raises(ValueError, match=message):
        ChatTemplate(source)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses these messages: roles must alternate"),
        ("{{ 1 / 0 }}", "fails on these messages.*division by zero"),
        ("{{ messages[0].content.nothing.at_all }}", "fails on these messages.*nothing"),
        ("{{ messages[0].content + 1 }}", "fails on these messages"),
        ("{{ ''.__class__.__mro__ }}", "fails on these messages.*unsafe"),
        ("{{ raise_exception.__globals__.os }}", "fails on these messages.*unsafe"),
        ("{{ '{0.__class__.__mro__}'.format(messages) }}", "fails on these messages.*unsafe"),
        ("{{ messages.append(1) }}", "fails on these messages.*unsafe"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "fails on these messages.*recursion"),
        ("{{ strftime_now(3) }}", "fails on these messages"),
        ("{{ messages | tojson(indent=10 ** 5 * 11) }}", "asks for too much: the indent"),
    ],
)
def test_templates_that_fail(source, message):
    with pytest.raises(ValueError, match=message):
        ChatTemplate(source).render(USER)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(10000) %}{% for j in range(10000) %}{% endfor %}{% endfor %}",
        "{{ range(10 ** 9) | list | length }}",
        "{{ 'a' * 10 ** 9 }}",
        "{{ ([1] * 10 ** 9) | length }}",
        "{{ 10 ** (10 ** 8) }}",
        "{{ '%1000000000d' % 3 }}",
        "{{ '%*d' % (1000000000, 3) }}",
        "{{ '%1000000000d' | format(3) }}",
        "{{ '{:>1000000000}'.format(3) }}",
        "{{ '{:{w}}'.format(3, w=1000000000) }}",
        "{{ 'a'.ljust(1000000000) }}",
        "{{ 'a' | center(1000000000) }}",
        "{{ 'a\nb' | indent(1000000000) }}",
        "{% set ns = namespace(s='a') %}{% for i in range(64) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{% set ns = namespace(s='a') %}{% for i in range(64) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{% set s = 'a' * 1000000 %}{% for i in range(1000) %}{{ s }}{% endfor %}",
    ],
)
def test_templates_that_would_make_too_much(source):
    with pytest.raises(ValueError, match="asks for too much"):
        ChatTemplate(source).render(USER)


def test_renderings_do_not_share_their_budget():
    template = ChatTemplate("{% for i in range(900000) %}{% endfor %}done")
    assert [template.render(USER) for _ in range(2)] == ["done", "done"]


@pytest.mark.parametrize(
    "source",
    [
        # loops and calls
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for x in [1, 1] recursive %}{% if loop.depth < 60 %}{{ loop([1, 1]) }}{% endif %}{% endfor %}",
        "{% set x = messages * 1000 %}{% for a in x %}{% for b in x %}{% endfor %}{% endfor %}",
        "{% set x = messages * 1000 %}{% for a in x %}{% for b in x | map('upper') %}{% endfor %}{% endfor %}",
        # doubling
        "{% set ns = namespace(s='ab') %}{% for i in range(64) %}{% set ns.s = [ns.s, ns.s] | join %}{% endfor %}",
        "{% set ns = namespace(s='ab') %}{% for i in range(64) %}{% set ns.s = ''.join([ns.s, ns.s]) %}{% endfor %}",
        "{% set ns = namespace(s='ab') %}{% for i in range(64) %}{% set ns.s = ns.s.replace('a', 'aa') %}{% endfor %}",
        "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = ns.s|replace('b', 'bb') %}{% endfor %}",
        "{% set ns = namespace(s=[1]) %}{% for i in range(64) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{% set ns = namespace(n=3) %}{% for i in range(64) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
        # filters with a length
        "{{ [1] | batch(1000000000, 0) | list }}",
        "{{ [1] | slice(1000000000) | list }}",
        "{{ messages | tojson(indent=1000000) }}",
        "{{ ('\n' * 1000000) | indent(1000, blank=true) }}",
    ],
)
def test_templates_that_double(source, monkeypatch):
    monkeypatch.setattr(template_sandbox, "MAX_STEPS", 200_000)
    with pytest.raises(ValueError, match="asks for too much"):
        ChatTemplate(source).render(USER)


@pytest.mark.parametrize(
    ("pair", "written"),
    [
        ("[ns.s, ns.s]", "ns.s | tojson"),
        ("[ns.s, ns.s]", "ns.s"),
        ("[ns.s, ns.s]", "ns.s ~ ''"),
        ("[ns.s, ns.s]", "ns.s | string"),
        ("[ns.s] * 2", "[ns.s] | join"),
        ("{1: ns.s, 2: ns.s}", "ns.s | tojson"),
    ],
)
def test_values_that_hold_themselves_many_times(pair, written, monkeypatch):
    monkeypatch.setattr(template_sandbox, "MAX_VALUES", 10_000)
    source = "{% set ns = namespace(s={}) %}{% for i in range(64) %}{% set ns.s = " + pair + " %}{% endfor %}"
    with pytest.raises(ValueError, match="asks for too much"):
        ChatTemplate(source + "{{ " + written + " }}").render(USER)


def test_no_template_can_reach_its_budget():
    source = "{% set budget = none %}{% set _budget = none %}{% for i in range(10 ** 9) %}{% endfor %}"
    with pytest.raises(ValueError, match="asks for too much"):
        ChatTemplate(source).render(USER, **{"budget of this rendering": None})


def test_ordinary_loops_are_as_ever():
    source = (
        "{% for k, v in {'a': 1, 'b': 2}.items() %}"
        "{{ loop.index }}/{{ loop.length }}{{ k }}{{ v }}{{ loop.last }};{% endfor %}"
        "{% for x in [1, 2, 3] if x != 2 %}{{ x }}{{ loop.revindex }}{% else %}none{% endfor %}"
        "{% for x in missing %}{% else %}none{% endfor %}{% for x in 'ab' | list | reverse %}{{ x }}{% endfor %}"
        "{% for x in [[1], [2]] recursive %}{{ x if x is number else loop(x) }}{% endfor %}"
        "{{ [1, none, 'a'] }}{{ {'a': 1} }}{{ [1, 2] | join('-') }}{{ ['b', 'a'] | sort | join }}{{ 7 * 6 }}"
    )
    expected = "1/2a1False;2/2b2True;1231noneba12[1, None, 'a']{'a': 1}1-2ab42"
    assert ChatTemplate(source).render(USER) == expected


VARIANTS = {"tool_use": "with tools: {{ tools[0].name }}", "rag": "with {{ documents | length }}", "other": "{{"}


def test_a_template_for_tools_and_one_for_documents():
    template = ChatTemplate("plain", variants=VARIANTS)
    for each in (template, pickle.loads(pickle.dumps(template)), template.dated(datetime.date(2024, 1, 2))):
        assert each.render(USER) == each.render(USER, tools=None, documents=[]) == "plain"
        assert each.render(USER, tools=[{"name": "f"}], documents=[1]) == "with tools: f"
        assert each.render(USER, documents=[1, 2]) == "with 2"
        assert (each.source, each.tool_source) == ("plain", VARIANTS["tool_use"])
    assert ChatTemplate("plain").tool_source == ChatTemplate("plain").sources == "plain" != template.sources


@pytest.mark.parametrize("kind", ["list", "files", "gguf"])
def test_where_a_model_has_its_templates(kind, tmp_path):
    named = {"default": "plain", **VARIANTS}
    if kind == "gguf":
        more = {f"tokenizer.chat_template.{name}": text for name, text in VARIANTS.items()}
        metadata = {"tokenizer.ggml.tokens": ["a"], "tokenizer.chat_template": "plain", **more}
        template = ChatTemplate.from_gguf(metadata)
    elif kind == "files":
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "chat_template.jinja").write_text("plain")
        for name, text in VARIANTS.items():
            (tmp_path / "additional_chat_templates" / f"{name}.jinja").write_text(text)
        template = ChatTemplate.from_hf(tmp_path)
    else:
        listed = [{"name": name, "template": text} for name, text in named.items()]
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": listed}))
        template = ChatTemplate.from_hf(tmp_path)
    assert template.render(USER) == "plain" and template.render(USER, tools=[{"name": "f"}]) == "with tools: f"


ASSISTANT = {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [CALL]}


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ m.tool_calls[0].function.arguments | tojson }}", '{"a": 1}'),
        ("{{ '<call>' + m['tool_calls'][0]['function']['arguments'] + '\n' }}", '<call>{"a": 1}\n'),
        ("{{ m.tool_calls[0].function.arguments }}", '{"a": 1}'),
        ("{{ 'x' ~ m.tool_calls[0].function.arguments }}", 'x{"a": 1}'),
        ("{% set a = m.tool_calls[0].function.arguments %}{{ a if a is string else a | tojson }}", '{"a": 1}'),
        ("{% if m['content'] is none %}call{% else %}text{% endif %}", "call"),
        ("{% if m.content == '' %}empty{% endif %}", "empty"),
        ("{{ m.thinking }}", "hm"),
        ("{{ m.reasoning_content }}{{ 'thinking' in m }}", "hmFalse"),
    ],
)
def test_messages_are_what_the_template_expects(source, text):
    """DeepSeek's templates add arguments to text, and look whether there is no content; gpt-oss's has a name of its own
    for thoughts."""
    assert ChatTemplate("{% set m = messages[0] %}" + source).render([ASSISTANT]) == text
    parsed = {**CALL, "function": {"name": "add", "arguments": {"a": 1}}}
    assert ChatTemplate("{% set m = messages[0] %}" + source).render([ASSISTANT | {"tool_calls": [parsed]}]) == text


def test_thoughts_beside_calls_and_content_stay_out():
    """gpt-oss's template refuses both."""
    source = "{{ messages[0].content }} {{ messages[0].thinking is defined }}"
    assert ChatTemplate(source).render([ASSISTANT | {"content": "So"}]) == "So False"
