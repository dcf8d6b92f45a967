"""Mistral 7B v0.3, Nemo, Small and their kin: ``[TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]``. The first word
is a special token of their vocabularies."""

from .shape import CallShape

SHAPE = CallShape(
    name="mistral",
    begin="[TOOL_CALLS]",
    opening="[",
    before_name='{"name": "',
    after_name='", "arguments": ',
    end="}",
    separator=", ",
    begins_each=False,
    close="]",
    short_ids=True,
)
