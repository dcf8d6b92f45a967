r"""Hermes 2 and 3, Qwen 2.5 and 3, and others: ``<tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>``."""

from .shape import CallShape

SHAPE = CallShape(
    name="hermes",
    begin="<tool_call>",
    before_name='\n{"name": "',
    after_name='", "arguments": ',
    end="}\n</tool_call>",
    separator="\n",
)
