"""The literal text of a form of tool calls, and its grammar.

A call reads ``begin + before_name + NAME + after_name + ARGUMENTS + end``. All but the name and the arguments (JSON of
the tool's schema) is fixed to the letter: that is how the model was taught to write it, and it lets the parser find the
parts without guessing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..grammar import lark
from ..grammar.closed import closed
from ..grammar.lark import Lead
from ..grammar.sources import tidy, with_options
from .spec import Tool, ToolUse


@dataclass(frozen=True, slots=True)
class CallShape:
    """One form.

    Attributes:
        name: for ``--tool-call-parser``.
        begin: opens the calls, and each of them unless ``separator`` does; in free text it is the sign that a call
            comes.
            Empty: an answer that begins with ``before_name`` is a call.
        before_name, after_name, end: see above.
        opening: between ``begin`` and the first call.
        separator: between two calls.
        begins_each: every call has its own ``begin``.
        close: after the last call.
        short_ids: the template wants ids of calls that are nine letters and digits.
        taught: the model's template says nothing of tools; the prompt does (``generic.py``).
    """

    name: str
    begin: str
    before_name: str
    after_name: str
    end: str
    opening: str = ""
    separator: str = ""
    begins_each: bool = True
    close: str = ""
    short_ids: bool = False
    taught: bool = False

    @property
    def mark(self) -> str:
        """What tells a call from text."""
        return self.begin or self.before_name

    def grammar(
        self, use: ToolUse, special_ids: Mapping[str, int], lead: Lead | None = None, *, form: bool = False
    ) -> str:
        """A grammar in Lark of answers that use tools so.

        Args:
            special_ids: special tokens by their spelling: the form may have some.
            lead: what the answer begins with.
            form: an answer in text has a form, the grammar called ``@answer``.

        Raises:
            ValueError: calls of this shape cannot be told from an answer that has a form.
        """
        if form and use.mode == "auto" and not self.begin:
            raise ValueError(
                "tools and response_format do not go together here, because calls of this model have no mark of their "
                "own: set tool_choice to required or none"
            )

        def fixed(text: str) -> str:
            return lark.literal(text, special_ids)

        calls = " | ".join(f"call_{number}" for number in range(len(use.callable)))
        lines = [self._call(number, tool, fixed) for number, tool in enumerate(use.callable)]
        again = (
            f" ({fixed(self.separator)} {fixed(self.begin) if self.begins_each else ''} call)*" if use.parallel else ""
        )
        lines += [f"call: {calls}", f"calls: {fixed(self.opening)} call{again} {fixed(self.close)}"]
        first, other = ("", "") if lead is None else ("lead ", f" & ~{lead.begins}" if lead.begins else "")
        if use.mode != "auto" or form:
            text = "@answer | " if form and use.mode == "auto" else ""
            lines.insert(0, f"start: {first}({text}{fixed(self.begin)} calls)")
        elif not self.begin:
            # No mark: what begins like a call is one.
            letter = self.before_name[:1]
            lines[:0] = [f"start: {first}(PLAIN | calls)?", f"PLAIN: /[^{letter}\\s](?s:.*)/{other}"]
        elif self.begin in special_ids:
            lines[:0] = [f"start: {first}(TEXT? | TEXT? {fixed(self.begin)} calls)", f"TEXT: /(?s:.+)/{other}"]
        else:
            lines[:0] = [f"start: {first}(TEXT | mark calls)", f"mark[lazy]: TEXT {fixed(self.begin)}"]
            lines.append(f"TEXT: {lark.ANY_TEXT}{other}")
        return "\n".join(lines if lead is None else [*lines, lead.rules])

    def _call(self, number: int, tool: Tool, fixed: Any) -> str:
        schema = with_options(tidy(closed(tool.parameters)), lenient=not tool.strict)
        head = fixed(f"{self.before_name}{tool.name}{self.after_name}")
        return f"call_{number}: {head} {lark.schema(schema)} {fixed(self.end)}".rstrip()
