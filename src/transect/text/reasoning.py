"""Thoughts before an answer: ``<think>...</think>`` in the text of reasoning models.

``PARSERS`` is the table of families; gpt-oss, whose answers come in channels, is in it by name (``harmony.py``).

``Thoughts.state`` says from the end of a prompt whether the model is thinking already (the template has opened the
tag), may begin to, or may not (the template has closed it). ``Thoughts.lead`` is the grammar of the thoughts, so that
the form of an answer is kept to after them; ``ThoughtParser`` parts them from the answer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from .grammar import lark
from .grammar.lark import Lead

State = Literal["inside", "before", "over"]


@dataclass(frozen=True, slots=True)
class Thoughts:
    """Marks of thoughts in a family of models.

    Attributes:
        name: for ``--reasoning-parser``.
        begin, end: around the thoughts.
        told_by: a chat template with all these texts belongs to such a model.
        answer_begin, answer_end: around the rest of the answer, where the model marks that too.
        channels: answers come in channels (``harmony.py``).
    """

    name: str
    begin: str
    end: str
    told_by: tuple[str, ...] = ()
    answer_begin: str = ""
    answer_end: str = ""
    channels: bool = False

    def state(self, prompt: str, said: str = "") -> State:
        """Return the state of a model that continues this prompt: ``inside`` thoughts, ``before`` them, or ``over``.

        Args:
            said: the beginning of the answer, if the prompt ends with it.
        """
        tail = said.strip() or prompt.rstrip()
        if said.strip() and self.begin in tail:
            return "inside" if tail.rfind(self.begin) > tail.rfind(self.end) else "over"
        if tail.endswith(self.begin):
            return "inside"
        return "over" if said.strip() or tail.endswith(self.end) else "before"

    def lead(self, state: State, special_ids: Mapping[str, int]) -> Lead | None:
        """Return the grammar of the thoughts; None if the answer has begun."""
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
            # GLM begins a line first.
            rules = (
                f"thought[lazy]: BLANK {begin} THOUGHT {end}\nTHOUGHT: {lark.ANY_TEXT}\nBLANK: /[ \\r\\n\\t]{{0,4}}/"
            )
            begins = f"/(?s:[ \\r\\n\\t]{{0,4}}{lark.escaped(self.begin)}.*)/"
        if self.answer_begin:
            blank += f" ({lark.literal(self.answer_begin, special_ids)} {blank})?"
        optional = f"(thought {blank})?" if state == "before" else f"thought {blank}"
        return Lead(f"lead: {optional}\n{rules}", begins)


PARSERS: dict[str, Thoughts] = {
    row.name: row
    for row in (
        Thoughts("gpt_oss", "<|channel|>analysis<|message|>", "<|end|>", ("<|channel|>", "<|message|>"), channels=True),
        Thoughts("mistral", "[THINK]", "[/THINK]", ("[THINK]",)),
        # Granite 3.3, then 3.2
        Thoughts("granite_tags", "<think>", "</think>", ("<think>", "<response>"), "<response>", "</response>"),
        Thoughts("granite", "Here is my thought process:", "Here is my response:", ("Here is my thought process:",)),
        # Qwen 3, and all who mark thoughts as DeepSeek R1 did: GLM 4.5, Kimi K2, SmolLM3, QwQ ...
        Thoughts("qwen3", "<think>", "</think>", ("<think>",)),
        Thoughts("deepseek_r1", "<think>", "</think>", ("</think>",)),
        Thoughts("deepseek_v3", "<think>", "</think>"),
        Thoughts("glm45", "<think>", "</think>"),
        Thoughts("kimi_k2", "<think>", "</think>"),
    )
}
"""Parsers by name; a template belongs to the first row whose ``told_by`` texts it has."""


def thoughts_of(name: str | None, template: str | None = None) -> Thoughts | None:
    """Return the marks that ``--reasoning-parser`` names; None for none.

    Args:
        name: name of a parser; ``auto`` for that of the template; ``none`` or None if thoughts are plain text.
        template: the source of the model's chat template, or None.

    Raises:
        ValueError: there is no such parser.
    """
    if name in (None, "none"):
        return None
    if name == "auto":
        rows = (
            row for row in PARSERS.values() if row.told_by and all(text in (template or "") for text in row.told_by)
        )
        return next(rows, None)
    if name not in PARSERS:
        found = ", ".join(sorted(PARSERS))
        raise ValueError(f"there is no reasoning parser {name!r}; there are {found}, auto and none")
    return PARSERS[name]


SWITCHES = ("enable_thinking", "thinking")
"""Variables of templates that turn thoughts on and off."""


def effort_variables(effort: str, variables: Collection[str]) -> dict[str, Any] | None:
    """Return the template's variables for an effort of thinking; None if the template has no such setting.

    Args:
        effort: ``none``, ``low``, ``medium``, ``high`` and their like; ``none`` turns thoughts off where the template
            has a switch.
        variables: those that the template knows.
    """
    if "reasoning_effort" in variables:
        return {"reasoning_effort": effort}
    switches = [name for name in SWITCHES if name in variables]
    return dict.fromkeys(switches, effort != "none") if switches else None


class ThoughtParser:
    """Parts the thoughts of one answer from the rest, in pieces of any size.

    Args:
        thoughts: marks of thoughts.
        state: see ``Thoughts.state``.
    """

    def __init__(self, thoughts: Thoughts, state: State) -> None:
        self._thoughts = thoughts
        self._state = {"inside": "inside", "before": "before", "over": "answer"}[state]
        self._held = ""
        self._fed = self._end = 0

    @property
    def thought_bytes(self) -> int:
        """Bytes of the answer up to the end of its thoughts, their marks included."""
        return self._fed if self._state == "inside" else self._end

    def feed(self, piece: str, *, last: bool = False, cut: bool = False) -> tuple[str, str]:
        """Read more of the text; return what is new in the thoughts and in the answer.

        Args:
            last: no more will come.
            cut: the text stops before the model ended it. What may be the beginning of a mark is dropped then.
        """
        last = last and not cut  # what is held back as the beginning of a mark stays held back
        self._held += piece
        self._fed += len(piece.encode(errors="replace"))
        thought = answer = ""
        while self._held:
            before = (self._state, len(self._held))
            if self._state == "before":
                self._begin(last)
            elif self._state == "inside":
                thought += self._inside(last)
            elif self._state == "after":  # blanks between thoughts and answer belong to neither
                self._after(last)
            else:
                answer += self._answer(last)
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
        thought, ended = self._up_to(self._thoughts.end, last)
        if ended:
            self._state = "after"
            self._end = self._fed - len(self._held.encode(errors="replace"))
        return thought

    def _after(self, last: bool) -> None:
        self._held, mark = self._held.lstrip(), self._thoughts.answer_begin
        if mark and self._held.startswith(mark):
            self._held = self._held[len(mark) :].lstrip()
            mark = ""
            self._thoughts = replace(self._thoughts, answer_begin="")
        if self._held and (last or not mark or not mark.startswith(self._held)):
            self._state = "answer"

    def _answer(self, last: bool) -> str:
        mark = self._thoughts.answer_end if self._end else ""
        if mark:
            return self._up_to(mark, last)[0]
        answer, self._held = self._held, ""
        return answer

    def _up_to(self, mark: str, last: bool) -> tuple[str, bool]:
        """Return (text before the mark, True if the mark was found); a possible beginning of a mark is held back."""
        held = self._held
        at = held.find(mark)
        if at >= 0:
            self._held = held[at + len(mark) :]
            return held[:at], True
        sizes = range(min(len(mark) - 1, len(held)), 0, -1)
        keep = 0 if last else next((n for n in sizes if mark.startswith(held[-n:])), 0)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep], False
