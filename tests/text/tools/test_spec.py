"""Tools of a request, and what ``tool_choice`` makes of them."""

import pytest

from transect.text.tools.spec import tool_use

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("add", "weather.now")]


@pytest.mark.parametrize("flat", [False, True])
def test_some_of_the_tools_are_allowed(flat):
    """The model is told of all; ``flat``: as ``/v1/responses`` has it."""
    inner = {"mode": "required", "tools": [{"type": "function", "name": "add"}]}
    choice = {"type": "allowed_tools"} | (inner if flat else {"allowed_tools": inner})
    use = tool_use(TOOLS, choice)
    assert (use.mode, len(use.tools), [tool.name for tool in use.callable]) == ("required", len(TOOLS), ["add"])
    with pytest.raises(ValueError, match="tool_choice allows 'nobody', which is not one of the tools"):
        tool_use(TOOLS, choice | {"allowed_tools": {"tools": [{"function": {"name": "nobody"}}]}})


@pytest.mark.parametrize(
    "choice", [{"allowed_tools": []}, {"mode": "none", "tools": [{"name": "add"}]}, {"mode": "auto"}, {"tools": "add"}]
)
def test_a_malformed_list_of_allowed_tools(choice):
    with pytest.raises(ValueError, match="tool_choice of type allowed_tools must have a mode"):
        tool_use(TOOLS, {"type": "allowed_tools"} | choice)
