"""Llama 3.1 to 3.3: the whole answer is ``{"name": "f", "parameters": {...}}``; several are parted by ``; ``."""

from .shape import CallShape

SHAPE = CallShape(
    name="llama3_json",
    begin="",
    before_name='{"name": "',
    after_name='", "parameters": ',
    end="}",
    separator="; ",
)
