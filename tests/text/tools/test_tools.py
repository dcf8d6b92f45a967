"""Every form of tool calls: its grammar takes what its parser reads, and nothing else; pieces of any size make the
same; what is no call stays text."""

import json
import random

import jsonschema
import pytest
from byte_grammar import END, SPECIAL, accepts, allowed, constraint, random_answer, tokens_of
from effort import quick_first
from hypothesis import given
from hypothesis import strategies as st

from transect.text.reasoning import PARSERS
from transect.text.tools.parser import ToolParser
from transect.text.tools.registry import SHAPES
from transect.text.tools.shape import MAX_OTHER
from transect.text.tools.spec import tool_use

ADD = {
    "name": "add",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
}
MIXED = {
    "city": {"type": "string"},
    "unit": {"enum": ["C", "F"]},
    "days": {"type": ["integer", "null"]},
    "exact": {"type": "boolean"},
    "places": {"type": "array", "items": {"$ref": "#/$defs/place"}},
    "note": {"anyOf": [{"type": "string"}, {"type": "number"}]},
}
PLACE = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "open": {"type": "boolean"}},
    "required": ["name"],
}
TOOLS = [
    {"type": "function", "function": ADD},
    {
        "type": "function",
        "function": {
            "name": "weather.now",
            "parameters": {"type": "object", "properties": MIXED, "required": ["city"], "$defs": {"place": PLACE}},
        },
    },
    {"type": "function", "function": {"name": "ping"}},
]
ONE = ("add", {"a": 1, "b": -2})
TWO = ("weather.now", {"city": "}\"{ <tool_call> \\ [x](y), é\n 'z"})
ALL = {
    "city": "Oslo",
    "unit": "F",
    "days": None,
    "exact": True,
    "places": [{"name": "a, b)", "open": False}],
    "note": 2.5,
}
CALLS = [ONE, TWO, ("weather.now", ALL), ("ping", {})]
LEADS = [(None, None, ""), ("qwen3", "inside", "hm <think> </think>\n\n"), ("qwen3", "over", "")]
LEADS += [
    ("qwen3", "before", '\n<think> I <tool_call> {"name": </think>\n\n'),
    ("mistral", "before", "[THINK]a[/THINK]"),
]
FORMS = sorted(name for name, shape in SHAPES.items() if not shape.channels)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize(("parser", "state", "thoughts"), LEADS)
@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "add"}}])
def test_grammars(name, parser, state, thoughts, choice):
    shape = SHAPES[name]
    lead = PARSERS[parser].lead(state, SPECIAL) if parser else None
    grammar = constraint(lark=shape.grammar(tool_use(TOOLS, choice), SPECIAL, lead), field="tools")
    right = [shape.write([ONE])]
    wrong = [shape.write([("bogus", {})]), shape.write([("add", {"a": 1})])]
    if choice == "auto":
        right += ["", "Hello < [ there"] + ([f"Hi {shape.write([ONE])}"] if shape.begin else [])
    else:
        wrong += ["", "Hello"]
    (right if choice in ("auto", "required") else wrong).append(shape.write([ONE, TWO]))
    for text in right:
        assert accepts(grammar, thoughts + text), text
        assert state != "before" or accepts(grammar, text), "a model may answer without a thought"
    for text in wrong:
        assert not accepts(grammar, thoughts + text), text


@pytest.mark.parametrize("name", FORMS)
def test_values_of_all_kinds(name):
    shape = SHAPES[name]
    grammar = constraint(lark=shape.grammar(tool_use(TOOLS, "required"), SPECIAL))
    assert accepts(grammar, shape.write(CALLS))
    for wrong in ({"unit": "F"}, {"city": "a", "unit": "K"}, {"city": "a", "exact": "yes"}, {"city": "a", "other": 1}):
        assert not accepts(grammar, shape.write([("weather.now", wrong)])), wrong
    for fewer in ({"city": "a", "note": "5 km"}, {"city": "", "exact": False}):
        text = shape.write([("weather.now", fewer)])
        assert accepts(grammar, text) and read(shape, list(text)) == ("", [("weather.now", fewer)])


@pytest.mark.parametrize("name", FORMS)
def test_parameters_that_nobody_named(name):
    shape = SHAPES[name]
    free = {"name": "free", "parameters": {"properties": {"a": {"type": "integer"}}, "additionalProperties": True}}
    grammar = constraint(lark=shape.grammar(tool_use([free], "required"), SPECIAL))
    for given_ in ({}, {"a": 1}, {"other": [1]}, {"a": 1, "x": "text", "y": 2}):
        assert accepts(grammar, shape.write([("free", given_)])), given_


@pytest.mark.parametrize("name", FORMS)
def test_one_call_where_several_are_not_wanted(name):
    shape = SHAPES[name]
    grammar = constraint(lark=shape.grammar(tool_use(TOOLS, "required", False), SPECIAL))
    assert accepts(grammar, shape.write([ONE])) and not accepts(grammar, shape.write([ONE, TWO]))


@pytest.mark.parametrize("name", FORMS)
def test_text_with_a_form_beside_calls(name):
    shape = SHAPES[name]
    use = tool_use(TOOLS, "auto")
    if not shape.begin:
        with pytest.raises(ValueError, match="tools and response_format cannot be combined"):
            shape.grammar(use, SPECIAL, form=True)
        return
    schema = {"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"]}
    grammar = constraint(lark=shape.grammar(use, SPECIAL, form=True), json={**schema, "additionalProperties": False})
    assert accepts(grammar, '{"answer": 5}') and accepts(grammar, shape.write([ONE]))
    assert not accepts(grammar, "Hello") and not accepts(grammar, '{"answer": "x"}')


def read(shape, pieces, **end):
    parser = ToolParser(shape, tool_use(TOOLS).tools)
    text, calls = "", {}
    for index, piece in enumerate(pieces):
        more, news = parser.feed(piece, last=index == len(pieces) - 1, **(end if index == len(pieces) - 1 else {}))
        text += more
        for call in news:
            entry = calls.setdefault(call.index, ["", "", 0])
            entry[0] += call.name or ""
            entry[1] += call.arguments
            entry[2] += call.id is not None
    assert parser.num_calls == len(calls) and all(begun == 1 for _, _, begun in calls.values())
    return text, [(calls[index][0], whole_or_text(calls[index][1])) for index in sorted(calls)]


def whole_or_text(arguments):
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def cut(text, rng, most=6):
    pieces = []
    while text:
        size = rng.randint(1, most)
        pieces.append(text[:size])
        text = text[size:]
    return pieces


@given(st.sampled_from(FORMS), st.integers(0, 2**32), st.booleans(), st.booleans())
def test_pieces_of_any_size_make_the_same(name, seed, before, after):
    shape, rng = SHAPES[name], random.Random(seed)
    calls = rng.choices(CALLS, k=rng.randint(1, 4))
    said = "Well <tool and {[TOOL" if before and shape.begin else ""
    whole = said + ("\n" if said else "") + shape.write(calls) + ("\nDone." if after else "")
    expected = (said, calls)  # what follows a call is no text of the answer
    for pieces in ([whole], list(whole), cut(whole, rng)):
        assert read(shape, pieces) == expected


SCHEMAS = {tool.name: {**tool.parameters, "additionalProperties": False} for tool in tool_use(TOOLS).tools}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("seed", quick_first(range(20), range(2)))
def test_what_the_grammar_lets_through_is_read(name, seed):
    """Answers as chance has them, under the grammar: calls whose arguments are valid, and no text."""
    shape, rng = SHAPES[name], random.Random(seed)
    grammar = constraint(lark=shape.grammar(tool_use(TOOLS, "required"), {}))
    whole = random_answer(grammar, rng)
    if whole is None:
        return
    text, calls = read(shape, cut(whole, rng))
    assert (text, calls) == read(shape, [whole]) and not text and calls
    for called, arguments in calls:
        jsonschema.validate(arguments, SCHEMAS[called])


@pytest.mark.parametrize("name", FORMS)
def test_answers_without_calls(name):
    shape = SHAPES[name]
    for text in ("Nothing to call, <tool or [TOOL_CA ", "", " \n", "{", '{"name', "[f", "[1, 2]", '{"a": 5}'):
        assert read(shape, list(text)) == read(shape, [text]) == (text, [])


@pytest.mark.parametrize("name", FORMS)
def test_what_is_cut_off_is_a_call_so_far_or_text(name):
    """Nothing that came before the arguments is lost."""
    shape = SHAPES[name]
    for calls in ([ONE], [ONE, TWO]):
        whole = shape.write(calls)
        for end in range(1, len(whole)):
            for pieces in ([whole[:end]], list(whole[:end])):
                text, found = read(shape, pieces)
                assert (not found and text == whole[:end]) or (
                    found[0][0] == "add" and whole[:end].rstrip().endswith(text)
                )
                assert not found or found[0][1] == ONE[1] or isinstance(found[0][1], str)


@pytest.mark.parametrize("name", FORMS)
def test_what_is_broken_stays_text(name):
    """A model that no grammar has watched."""
    shape = SHAPES[name]
    whole = shape.write([ONE])
    head = whole.index("add")
    for broken in (whole[:head] + "é" + whole[head:], whole[:head] + whole[head + 3 :], whole[:head] + "\n\n" + whole):
        text, calls = read(shape, list(broken))
        assert text.count("é") == broken.count("é") and (calls or text == broken)
        assert (text, calls) == read(shape, [broken])


@pytest.mark.parametrize("name", FORMS)
def test_blanks_do_not_matter(name):
    shape = SHAPES[name]
    other = shape.write([ONE, ONE]).replace('": "', '" : "').replace(", ", ",\n").replace('{"', '{ "')
    assert read(shape, list(other)) == ("", [ONE, ONE])


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "pythonic"])
def test_strict_tools_that_cannot_be_kept_to_are_refused(name):
    shape, properties = SHAPES[name], {"a": {"type": "string", "pattern": "x+"}}
    strict = {"name": "f", "strict": True, "parameters": {"properties": properties, "minProperties": 1}}
    with pytest.raises(ValueError, match="tools: f is strict, and calls of this model cannot keep to 'minProperties'"):
        shape.grammar(tool_use([strict]), SPECIAL)


def test_a_strict_string_that_cannot_be_kept_to():
    strict = {"name": "f", "strict": True, "parameters": {"properties": {"a": {"type": "string", "pattern": "x+"}}}}
    with pytest.raises(ValueError, match="cannot keep to 'pattern'"):
        SHAPES["glm45"].grammar(tool_use([strict]), SPECIAL)
    grammar = constraint(lark=SHAPES["pythonic"].grammar(tool_use([strict], "required"), SPECIAL))
    assert accepts(grammar, '[f(a="xx")]') and not accepts(grammar, '[f(a="y")]')


def ids_of(name, text):
    parser = ToolParser(SHAPES[name], tool_use(TOOLS).tools)
    return [call.id for call in parser.feed(text, last=True)[1] if call.id is not None]


def test_ids_are_what_the_template_demands():
    for name in ("mistral", "mistral_v11"):
        first, second = ids_of(name, SHAPES[name].write([ONE, ONE]))
        assert first != second and all(len(each) == 9 and each.isalnum() for each in (first, second))
    assert ids_of("mistral_v11", '[TOOL_CALLS]add[CALL_ID]abcdeFGH9[ARGS]{"a": 1, "b": 2}') == ["abcdeFGH9"]
    call = '<|tool_call_begin|>functions.add:{}<|tool_call_argument_begin|>{{"a": 1, "b": 2}}<|tool_call_end|>'
    section = f"<|tool_calls_section_begin|>{call.format(7)}{call.format(12)}<|tool_calls_section_end|>"
    assert ids_of("kimi_k2", section) == ["functions.add:7", "functions.add:12"]
    assert all(each.startswith("call_") for each in ids_of("hermes", SHAPES["hermes"].write([ONE])))


WRITTEN = {
    "lfm2": "<|tool_call_start|>[add(a=1, b=-2)]<|tool_call_end|>",
    "hermes": '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": -2}}\n</tool_call>',
    "llama3_json": '<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": -2}}',
    "pythonic": "<|python_start|>[add(a=1, b=-2)]",
    "mistral": '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": -2}}]',
    "mistral_v11": '[TOOL_CALLS]add[ARGS]{"a": 1, "b": -2}',
    "granite": '<|tool_call|>[{"name": "add", "arguments": {"a": 1, "b": -2}}]',
    "phi4_mini": '<|tool_call|>[{"name": "add", "arguments": {"a": 1, "b": -2}}]<|/tool_call|>',
    "phi4_object": '<|tool_call|>{"name": "add", "arguments": {"a": 1, "b": -2}}<|/tool_call|>',
    "phi4_functools": 'functools[{"name": "add", "arguments": {"a": 1, "b": -2}}]',
    "qwen3_coder": "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n-2\n</parameter>\n"
    "</function>\n</tool_call>",
    "glm45": "\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n"
    "<arg_value>-2</arg_value>\n</tool_call>",
    "deepseek_v3": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"a": 1, "b": -2}'
    "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1, "b": -2}<｜tool▁call▁end｜>'
    "<｜tool▁calls▁end｜>",
    "kimi_k2": '<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{"a": 1, '
    '"b": -2}<|tool_call_end|><|tool_calls_section_end|>',
}


@pytest.mark.parametrize("name", sorted(set(FORMS) - {"generic"}))
def test_each_form_as_models_write_it(name):
    """To the letter, as the models' templates print a call of an earlier turn."""
    shape, text = SHAPES[name], WRITTEN[name]
    assert read(shape, list(text)) == ("", [ONE])
    assert (
        shape.write([ONE]).split() == text.removeprefix(shape.prefix).replace("[TOOL_CALLS] ", "[TOOL_CALLS]").split()
    )
    grammar = constraint(lark=shape.grammar(tool_use(TOOLS), SPECIAL))
    assert accepts(grammar, text.strip().removeprefix(shape.prefix).replace("[TOOL_CALLS] ", "[TOOL_CALLS]"))


def test_python_in_other_spellings():
    shape = SHAPES["pythonic"]
    text = "[weather.now(city='O\\'Hare, \"x\"', exact=True, places=[{'name': 'a', 'open': None}]), ping()]"
    given_ = {"city": 'O\'Hare, "x"', "exact": True, "places": [{"name": "a", "open": None}]}
    assert read(shape, list(text)) == ("", [("weather.now", given_), ("ping", {})])


def test_values_between_tags_without_a_schema():
    text = SHAPES["glm45"].write([("unknown", {"a": "text", "b": 5, "c": "5"})])
    assert read(SHAPES["glm45"], list(text)) == ("", [("unknown", {"a": "text", "b": 5, "c": 5})])
    words = "<tool_call>weather.now\n<arg_key>exact</arg_key>\n<arg_value>True</arg_value>\n</tool_call>"
    assert read(SHAPES["glm45"], [words]) == ("", [("weather.now", {"exact": True})])


def drawn(grammar, text):
    """The state after a text."""
    state = grammar.fork()
    for token in tokens_of(text):
        assert token in allowed(state) and state.accept(token) is None
    return state


PARALLEL = [name for name in FORMS if not SHAPES[name].single]


@pytest.mark.parametrize("name", PARALLEL)
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_after_a_call_the_model_may_end_and_only_a_whole_mark_opens_another(name, choice):
    shape = SHAPES[name]
    grammar = constraint(lark=shape.grammar(tool_use(TOOLS, choice), SPECIAL))
    one, two = shape.write([ONE]), shape.write([ONE, ONE])
    call = one.removesuffix(shape.close) if shape.close else one
    more = tokens_of(two.removeprefix(call))
    state = drawn(grammar, call)
    assert END in allowed(state)
    for blank in b"\n \n":
        assert state.accept(blank) is None and END in allowed(state), "a line break leads into no call"
    state, opened = drawn(grammar, call), 0
    mark = (shape.begin if shape.begins_each else shape.before_name) or "add("
    first = len(tokens_of(shape.separator + mark))
    for position, token in enumerate(more[:first], start=1):
        assert token in allowed(state) and state.accept(token) is None
        inside = position < first and more[position] in range(0x80, 0xC0)  # a letter of several bytes
        opened = opened or (not inside and END not in allowed(state) and position)
    assert opened in (0, first), "no part of the mark leaves only the mark"
    assert read(shape, [call + "\n"])[1] == [ONE] and accepts(grammar, two)


@pytest.mark.parametrize("name", PARALLEL)
def test_what_is_no_mark_ends_the_answer_after_a_call(name):
    shape = SHAPES[name]
    grammar = constraint(lark=shape.grammar(tool_use(TOOLS, "required"), SPECIAL))
    call = shape.write([ONE]).removesuffix(shape.close) if shape.close else shape.write([ONE])
    begin = "" if (shape.begin if shape.begins_each else shape.before_name) in SPECIAL else shape.begin[:6]
    for other in ("The", f"\n{begin}x"):
        state, text = drawn(grammar, call), call
        for token in other.encode():
            assert token in allowed(state) and state.accept(token) is None
            text += chr(token)
        while not state.terminated and len(text) < len(call) + 90:
            assert END in allowed(state), text
            assert state.accept(ord("y")) is None
            text += "y"
        assert state.terminated and len(text) <= len(call) + 5 + MAX_OTHER + len(
            shape.separator + shape.begin + shape.before_name
        )
        assert read(shape, list(text)) == read(shape, [text]) == ("", [ONE])


@pytest.mark.parametrize("name", FORMS)
def test_an_answer_that_is_cut_off_shows_no_part_of_a_mark(name):
    shape = SHAPES[name]
    for calls in ([ONE], [ONE, TWO]):
        whole = shape.write(calls)
        for before in ("", "Well,") if shape.begin else ("",):
            for end in range(1, len(whole)):
                for pieces in ([before + whole[:end]], list(before + whole[:end])):
                    text, found = read(shape, pieces, cut=True)
                    assert text == before and [call[0] for call in found] == [call[0] for call in calls[: len(found)]]
