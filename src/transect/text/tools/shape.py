"""The literal text of a form of tool calls, and its grammar.

A call reads ``begin + before_name + NAME + after_name + ARGUMENTS + end``. All but the name and the arguments (values
of the tool's schema) is fixed to the letter: that is how the model was taught to write it, and it lets the parser find
the parts without guessing.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..grammar import lark
from ..grammar.lark import Lead
from .arguments import JSON, ArgumentStyle, Fixed
from .spec import Tool, ToolUse

MAX_OTHER = 12
"""Characters, beyond the length of a mark, that may follow a call without opening another one. They end the answer, and
readers drop them."""
_BLANK = r"[ \t\r\n]"


@dataclass(frozen=True, slots=True)
class CallShape:
    """One form.

    Attributes:
        name: for ``--tool-call-parser``.
        before_name, after_name, end: see above.
        begin: opens the calls, and each of them if ``begins_each``; in free text it is the sign that a call comes.
            Empty: an answer that begins with ``opening`` and ``before_name`` is a call.
        told_by: a chat template with all these texts speaks this form.
        prefix: a special token that may stand before everything, where ``begin`` is empty.
        opening: between ``begin`` and the first call.
        separator: between two calls.
        begins_each: every call has its own ``begin``.
        close: after the last call.
        id_mark, id_pattern: the model may write ``id_mark`` and an id of this regular expression after a name.
        ids: form of call ids: ``call_...``; nine letters and digits; or ``functions.NAME:NUMBER``.
        arguments: style of arguments.
        taught: the model's template says nothing of tools; the prompt does (``generic.py``).
        shows_calls: such a template prints calls and results of earlier turns, though.
        single: the template shows one call in a message, and no more.
        in_system: the template takes tools as JSON text in the system message, and shows no calls (``generic.py``).
        channels: answers come in channels (``text/harmony.py``), which has their grammar and their reader.
    """

    name: str
    begin: str
    before_name: str
    after_name: str
    end: str
    told_by: tuple[str, ...] = ()
    prefix: str = ""
    opening: str = ""
    separator: str = ""
    begins_each: bool = True
    close: str = ""
    id_mark: str = ""
    id_pattern: str = ""
    ids: Literal["call", "nine", "numbered"] = "call"
    arguments: ArgumentStyle = JSON
    taught: bool = False
    shows_calls: bool = False
    single: bool = False
    in_system: bool = False
    channels: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        """All literal texts of the form."""
        return (self.prefix, self.begin, self.opening, self.before_name, self.id_mark, self.after_name, self.end,
                self.separator, self.close)  # fmt: skip

    def call_id(self, name: str, index: int, written: str | None) -> str:
        """Return the id of a call; ``written``: the id that the model has written."""
        if self.ids == "numbered":
            return f"functions.{name}:{index if written is None else written}"
        unique = uuid.uuid4().hex
        return f"call_{unique[:24]}" if self.ids == "call" else written or unique[:9]

    def write(self, calls: Iterable[tuple[str, Mapping[str, Any] | str]]) -> str:
        """Return the text of calls, each a name and arguments: an object, or text that is left as it is."""
        texts = []
        for number, (name, arguments) in enumerate(calls):
            identity = f"{self.id_mark}{number}" if self.ids == "numbered" else ""
            head = self.before_name + name + identity + self.after_name
            written = arguments if isinstance(arguments, str) else self.arguments.write(arguments)
            texts.append(head + written + self.end)
        between = self.separator + (self.begin if self.begins_each else "")
        return self.begin + self.opening + between.join(texts) + self.close

    def grammar(
        self, use: ToolUse, special_ids: Mapping[str, int], lead: Lead | None = None, *, form: bool = False
    ) -> str:
        """Return a grammar in Lark of answers that use tools so.

        Where several calls are allowed, the answer may end after each of them. Another call begins only if the model
        draws the whole mark that opens one; anything else that it draws ends the answer.

        Args:
            special_ids: special tokens by their spelling: the form may have some.
            lead: beginning of the answer.
            form: an answer in text has a form, the grammar called ``@answer``.

        Raises:
            ValueError: calls of this shape cannot be told from an answer that has a form, or a strict tool cannot be
                kept to.
        """
        if form and use.mode == "auto" and not self.begin:
            raise ValueError(
                "tools and response_format cannot be combined here, because calls of this model have no mark of their "
                "own: set tool_choice to required or none"
            )

        def fixed(text: str) -> str:
            return lark.literal(text, special_ids)

        lines = [line for number, tool in enumerate(use.callable) for line in self._call(number, tool, fixed)]
        calls = " | ".join(f"call_{number}" for number in range(len(use.callable)))
        close = fixed(self.close)
        if use.parallel and not self.single:
            again = self._again(use.callable, fixed, special_ids)
            most = MAX_OTHER + len(self.separator + self.begin + self.before_name)
            lines += [*again, f"after: again* (SPACE | OTHER{' | shut' if close else ''})?"]
            lines += [f"SPACE: /{_BLANK}{{1,4}}/", f"OTHER: /{_BLANK}{{0,4}}[^ \\t\\r\\n](?s:.{{0,{most}}})/"]
            if close.startswith("<["):
                lines.append(f"shut: SPACE? {close}")
            elif close:
                lines.append(f"shut[lazy]: {_spaced(self.close)}")
            close = "after"
        prefix = f"{fixed(self.prefix)}? " if self.prefix in special_ids else ""
        lines += [f"call: {fixed(self.before_name)} ({calls})", f"calls: {prefix}{fixed(self.opening)} call {close}"]
        first, other = ("", "") if lead is None else ("lead ", f" & ~{lead.begins}" if lead.begins else "")
        if use.mode != "auto" or form:
            text = "@answer | " if form and use.mode == "auto" else ""
            lines.insert(0, f"start: {first}({text}{fixed(self.begin)} calls)")
        elif not self.begin:
            # No mark: what begins like a call is one.
            letter = lark.escaped((self.opening + self.before_name)[:1])
            lines[:0] = [f"start: {first}(PLAIN | calls)?", f"PLAIN: /[^{letter}\\s](?s:.*)/{other}"]
        elif self.begin in special_ids:
            lines[:0] = [f"start: {first}(TEXT? | TEXT? {fixed(self.begin)} calls)", f"TEXT: /(?s:.+)/{other}"]
        else:
            lines[:0] = [f"start: {first}(TEXT | mark calls)", f"mark[lazy]: TEXT {fixed(self.begin)}"]
            lines.append(f"TEXT: {lark.ANY_TEXT}{other}")
        return "\n".join(lines if lead is None else [*lines, lead.rules])

    def _call(self, number: int, tool: Tool, fixed: Fixed) -> list[str]:
        """Return the rules of a call from its name on."""
        arguments, rules = self.arguments.grammar(f"a{number}", tool, fixed)
        if self.id_mark:
            identity = f"({fixed(self.id_mark)} /{self.id_pattern}/)?"
            head = f"{fixed(tool.name)} {identity} {fixed(self.after_name)}"
        else:
            head = fixed(f"{tool.name}{self.after_name}")
        return [
            f"call_{number}: {head} args_{number}",
            f"args_{number}: {arguments} {fixed(self.end)}".rstrip(),
            *rules,
        ]

    def _again(self, tools: Sequence[Tool], fixed: Fixed, special_ids: Mapping[str, int]) -> list[str]:
        """Return the rules that define ``again``: another call after one that has ended.

        A mark in plain text is a lazy terminal, so the whole mark decides, not its first token.
        """
        mark = self.begin if self.begins_each else self.before_name
        call = "call" if self.begins_each else f"({' | '.join(f'call_{number}' for number in range(len(tools)))})"
        between = self.separator.strip()
        if not between and any(mark.startswith(name) for name in special_ids if name):
            return [f"again: SPACE? {fixed(mark)} {call}"]
        if mark:
            return [f"again: mark_again {call}", f"mark_again[lazy]: {_spaced(between, mark)}"]
        marks = [
            f"mark_{number}[lazy]: {_spaced(between, tool.name + self.after_name)}" for number, tool in enumerate(tools)
        ]
        return [f"again: {' | '.join(f'mark_{number} args_{number}' for number in range(len(tools)))}", *marks]


def _spaced(*texts: str) -> str:
    """Return a terminal for these texts, each after at most four blanks."""
    return f"/{''.join(f'{_BLANK}{{0,4}}{lark.escaped(text)}' for text in texts if text)}/"
