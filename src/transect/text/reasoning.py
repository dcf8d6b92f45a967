"""Thoughts before an answer: ``<think>...</think>`` in the text of models that were taught to think aloud.

``Thoughts.state`` says from the end of a prompt whether the model is thinking already (the template has opened the
tag), may begin to, or may not (the template has closed it). ``Thoughts.lead`` is the grammar of the thoughts, so that
the form of an answer is kept to after them; ``ThoughtParser`` parts them from the answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from .grammar import lark
from .grammar.lark import Lead

State = Literal["inside", "before", "over"]


@dataclass(frozen=True, slots=True)
class Thoughts:
    """How a family of models marks them."""

    name: str
    begin: str
    end: str

    def state(self, prompt: str) -> State:
        """Where a model stands that goes on from this prompt: ``inside`` thoughts, ``before`` them, or ``over``."""
        tail = prompt.rstrip()
        if tail.endswith(self.begin):
            return "inside"
        return "over" if tail.endswith(self.end) else "before"

    def lead(self, state: State, special_ids: Mapping[str, int]) -> Lead | None:
        """The grammar of the thoughts; None where there are none to come."""
        if state == "over":
            return None
        begin, end = lark.literal(self.begin, special_ids), lark.literal(self.end, special_ids)
        blank = r"(/[ \r\n\t]{1,4}/)?"
        if self.end in special_ids:
            thought = f"{begin if state == 'before' else ''} THOUGHT {end}"
            rules = f"thought: {thought}\nTHOUGHT: {lark.ANY_TEXT}"
            begins = ""
        elif state == "inside":
            rules, begins = f"thought[lazy]: THOUGHT {end}\nTHOUGHT: {lark.ANY_TEXT}", ""
        else:
            rules = f"thought[lazy]: {begin} THOUGHT {end}\nTHOUGHT: {lark.ANY_TEXT}"
            begins = f"/(?s:{lark.escaped(self.begin)}.*)/"
        optional = f"(thought {blank})?" if state == "before" else f"thought {blank}"
        return Lead(f"lead: {optional}\n{rules}", begins)


PARSERS: dict[str, Thoughts] = {
    name: Thoughts(name, begin, end)
    for name, begin, end in (
        ("deepseek_r1", "<think>", "</think>"),
        ("qwen3", "<think>", "</think>"),
        ("mistral", "[THINK]", "[/THINK]"),
    )
}


def thoughts_of(name: str | None) -> Thoughts | None:
    """The marks that ``--reasoning-parser`` names; None for none.

    Raises:
        ValueError: there is no such parser.
    """
    if name is None:
        return None
    if name not in PARSERS:
        raise ValueError(f"there is no reasoning parser {name!r}; there are {', '.join(sorted(PARSERS))}")
    return PARSERS[name]


class ThoughtParser:
    """Parts the thoughts of one answer from the rest, in pieces of any size.

    Args:
        thoughts: how they are marked.
        state: see ``Thoughts.state``.
    """

    def __init__(self, thoughts: Thoughts, state: State) -> None:
        self._thoughts = thoughts
        self._state = {"inside": "inside", "before": "before", "over": "answer"}[state]
        self._held = ""

    def feed(self, piece: str, *, last: bool = False) -> tuple[str, str]:
        """More of the text: what it adds to the thoughts, and to the answer. ``last``: no more will come."""
        self._held += piece
        thought = answer = ""
        while self._held:
            before = (self._state, len(self._held))
            if self._state == "before":
                self._begin(last)
            elif self._state == "inside":
                thought += self._inside(last)
            elif self._state == "after":  # blanks between thoughts and answer belong to neither
                self._held = self._held.lstrip()
                self._state = "answer" if self._held else "after"
            else:
                answer, self._held = answer + self._held, ""
            if (self._state, len(self._held)) == before:
                break
        return thought, answer

    def _begin(self, last: bool) -> None:
        text, mark = self._held.lstrip(), self._thoughts.begin
        if text.startswith(mark):
            self._held, self._state = text[len(mark) :], "inside"
        elif last or not mark.startswith(text):
            self._state = "answer"

    def _inside(self, last: bool) -> str:
        mark, held = self._thoughts.end, self._held
        at = held.find(mark)
        if at >= 0:
            self._held, self._state = held[at + len(mark) :], "after"
            return held[:at]
        sizes = range(min(len(mark) - 1, len(held)), 0, -1)
        keep = 0 if last else next((n for n in sizes if mark.startswith(held[-n:])), 0)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]
