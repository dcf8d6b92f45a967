"""Every form of tool calls: its grammar takes what its parser reads, and nothing else; pieces of any size make the
same."""

import random

import pytest
from byte_grammar import SPECIAL, accepts, constraint
from hypothesis import given
from hypothesis import strategies as st

from transect.text.reasoning import PARSERS
from transect.text.tools.generic import taught
from transect.text.tools.parser import ToolParser
from transect.text.tools.registry import SHAPES, names, shape_of
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
TOOLS = [
    {"type": "function", "function": ADD},
    {
        "type": "function",
        "function": {"name": "weather.now", "parameters": {"properties": {"city": {"type": "string"}}}},
    },
]
ONE, TWO = ("add", '{"a": 1, "b": -2}'), ("weather.now", '{\n  "city": "}\\"{ <tool_call>"}')
LEADS = [(None, None, ""), ("qwen3", "inside", "hm <think> </think>\n\n"), ("qwen3", "over", "")]
LEADS += [("qwen3", "before", '<think> I <tool_call> {"name": </think>\n\n'), ("mistral", "before", "[THINK]a[/THINK]")]


def written(shape, *calls):
    """An answer of these calls."""
    texts = [shape.before_name + name + shape.after_name + arguments + shape.end for name, arguments in calls]
    between = shape.separator + (shape.begin if shape.begins_each else "")
    return shape.begin + shape.opening + between.join(texts) + shape.close


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(("parser", "state", "thoughts"), LEADS)
@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "add"}}])
def test_grammars(name, parser, state, thoughts, choice):
    shape = SHAPES[name]
    lead = PARSERS[parser].lead(state, SPECIAL) if parser else None
    grammar = constraint(lark=shape.grammar(tool_use(TOOLS, choice), SPECIAL, lead), field="tools")
    right = [written(shape, ONE)]
    wrong = [written(shape, ("bogus", "{}")), written(shape, ("add", '{"a": 1}'))]
    if choice == "auto":
        right += ["", "Hello < [ there"] + ([f"Hi {written(shape, ONE)}"] if shape.begin else [])
    else:
        wrong += ["", "Hello"]
    (right if choice in ("auto", "required") else wrong).append(written(shape, ONE, TWO))
    for text in right:
        assert accepts(grammar, thoughts + text), text
        assert state != "before" or accepts(grammar, text), "a model may answer without a thought"
    for text in wrong:
        assert not accepts(grammar, thoughts + text), text


@pytest.mark.parametrize("name", SHAPES)
def test_one_call_where_several_are_not_wanted(name):
    shape = SHAPES[name]
    grammar = constraint(lark=shape.grammar(tool_use(TOOLS, "required", False), SPECIAL))
    assert accepts(grammar, written(shape, ONE)) and not accepts(grammar, written(shape, ONE, TWO))


@pytest.mark.parametrize("flat", [False, True])
def test_some_of_the_tools_are_allowed(flat):
    """The model is told of all; ``flat``: as ``/v1/responses`` has it."""
    inner = {"mode": "required", "tools": [{"type": "function", "name": TOOLS[0]["function"]["name"]}]}
    choice = {"type": "allowed_tools"} | (inner if flat else {"allowed_tools": inner})
    use = tool_use(TOOLS, choice)
    assert (use.mode, len(use.tools), [tool.name for tool in use.callable]) == (
        "required",
        len(TOOLS),
        [TOOLS[0]["function"]["name"]],
    )
    with pytest.raises(ValueError, match="tool_choice allows 'nobody', which is none of the tools"):
        tool_use(TOOLS, choice | {"allowed_tools": {"tools": [{"function": {"name": "nobody"}}]}})


@pytest.mark.parametrize(
    "choice", [{"allowed_tools": []}, {"mode": "none", "tools": [{"name": "add"}]}, {"mode": "auto"}, {"tools": "add"}]
)
def test_a_malformed_list_of_allowed_tools(choice):
    with pytest.raises(ValueError, match="tool_choice of type allowed_tools must have a mode"):
        tool_use(TOOLS, {"type": "allowed_tools"} | choice)


@pytest.mark.parametrize("name", SHAPES)
def test_text_with_a_form_beside_calls(name):
    shape = SHAPES[name]
    use = tool_use(TOOLS, "auto")
    if not shape.begin:
        with pytest.raises(ValueError, match="tools and response_format do not go together"):
            shape.grammar(use, SPECIAL, form=True)
        return
    schema = {"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"]}
    grammar = constraint(lark=shape.grammar(use, SPECIAL, form=True), json={**schema, "additionalProperties": False})
    assert accepts(grammar, '{"answer": 5}') and accepts(grammar, written(shape, ONE))
    assert not accepts(grammar, "Hello") and not accepts(grammar, '{"answer": "x"}')


def read(shape, pieces, free_text=True):
    parser = ToolParser(shape, free_text=free_text)
    text, calls = "", {}
    for index, piece in enumerate(pieces):
        more, news = parser.feed(piece, last=index == len(pieces) - 1)
        text += more
        for call in news:
            entry = calls.setdefault(call.index, ["", "", 0])
            entry[0] += call.name or ""
            entry[1] += call.arguments
            entry[2] += call.id is not None
    assert parser.num_calls == len(calls) and all(begun == 1 for _, _, begun in calls.values())
    return text, [tuple(calls[index][:2]) for index in sorted(calls)]


@given(st.sampled_from(sorted(SHAPES)), st.integers(0, 2**32), st.booleans())
def test_pieces_of_any_size_make_the_same(name, seed, spoken):
    shape, rng = SHAPES[name], random.Random(seed)
    said = "Well <tool and {[TOOL" if spoken and shape.begin else ""
    whole = said + ("\n" if said else "") + written(shape, ONE, TWO)
    pieces, rest = [], whole
    while rest:
        size = rng.randint(1, 6)
        pieces.append(rest[:size])
        rest = rest[size:]
    assert read(shape, pieces) == read(shape, [whole]) == (said, [ONE, TWO])


@pytest.mark.parametrize("name", SHAPES)
def test_answers_without_calls_and_answers_that_are_cut_off(name):
    shape = SHAPES[name]
    text = "Nothing to call, <tool or [TOOL_CA "
    assert read(shape, list(text)) == read(shape, [text]) == (text, [])
    whole = written(shape, ONE)
    for end in range(1, len(whole)):
        _, calls = read(shape, [whole[:end]])
        assert not calls or (calls[0][0] == "add" and ONE[1].startswith(calls[0][1]))


def test_which_form_a_template_speaks():
    assert shape_of(None).name == shape_of("{{ messages }}").name == "generic"
    assert shape_of("{% if tools %}<tool_call>{% endif %}").name == "hermes"
    assert shape_of("{{ tools }}[TOOL_CALLS]").name == "mistral"
    assert shape_of("{{ tools }} ipython parameters").name == "llama3_json"
    assert shape_of(None, "qwen3").name == "hermes" and "qwen3" in names()
    with pytest.raises(ValueError, match=r"no form of tool calls 'x'; there are generic, hermes"):
        shape_of(None, "x")


def test_a_template_without_tools_is_taught():
    call = {"id": "c", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "So:", "tool_calls": [call]},
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
