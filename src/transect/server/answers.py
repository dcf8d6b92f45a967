"""What chat answers are made of: thoughts, text and calls. The same reading for whole answers and for streams."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from ..engine.sampling_params import SamplingParams
from ..text.grammar.params import StructuredOutputsParams
from ..text.reasoning import ThoughtParser
from ..text.tools.parser import CallDelta, ToolParser
from ..text.tools.spec import ToolUse
from .serving import Serving


@dataclass(slots=True)
class Piece:
    """What is new in an answer."""

    thoughts: str = ""
    text: str = ""
    calls: list[CallDelta] = field(default_factory=list)


@dataclass(slots=True)
class WholeCall:
    """A call with all its arguments."""

    id: str
    name: str
    arguments: str


@dataclass(slots=True)
class WholeAnswer:
    """A complete answer; ``thoughts`` and ``text`` are None where there are none."""

    thoughts: str | None
    text: str | None
    calls: list[WholeCall]


class AnswerReader:
    """Reads one answer."""

    def __init__(self, thoughts: ThoughtParser | None, tools: ToolParser | None) -> None:
        self._thoughts, self._tools = thoughts, tools

    @property
    def num_calls(self) -> int:
        """Calls that have begun."""
        return 0 if self._tools is None else self._tools.num_calls

    def feed(self, text: str, *, last: bool = False) -> Piece:
        """More of the answer; ``last``: all of it has come."""
        piece = Piece(text=text)
        if self._thoughts is not None:
            piece.thoughts, piece.text = self._thoughts.feed(text, last=last)
        if self._tools is not None:
            piece.text, piece.calls = self._tools.feed(piece.text, last=last)
        return piece

    def whole(self, text: str) -> WholeAnswer:
        """An answer that is all there."""
        piece = self.feed(text, last=True)
        calls: list[WholeCall] = []
        for news in piece.calls:
            if news.name is not None:
                calls.append(WholeCall(news.id or "", news.name, ""))
            calls[news.index].arguments += news.arguments
        thoughts = piece.thoughts if self._thoughts is not None and piece.thoughts else None
        return WholeAnswer(thoughts, None if calls and not piece.text else piece.text, calls)


class Answers:
    """The answers of one request: what they must be like, and how they are read.

    Args:
        use: tools that may be called, or None.
        prompt: the text that the model goes on from.
    """

    def __init__(self, serving: Serving, use: ToolUse | None, prompt: str) -> None:
        self._serving, self.use = serving, use
        self._thoughts = serving.thoughts
        self._state = None if self._thoughts is None else self._thoughts.state(prompt)

    @property
    def plain(self) -> bool:
        """They are text and nothing else."""
        return self.use is None and self._thoughts is None

    def params(self, params: SamplingParams) -> SamplingParams:
        """Sampling parameters with the grammar of these answers.

        Raises:
            ValueError: the tools and the form that was asked for cannot be had together.
        """
        if self.plain:
            return params
        changes: dict[str, Any] = {}
        special = self._serving.special_ids
        asked = params.structured_outputs
        lead = None
        if self._thoughts is not None and self._state is not None:
            lead = self._thoughts.lead(self._state, special)
            if {self._thoughts.begin, self._thoughts.end} & set(special):
                changes["skip_special_tokens"] = False
        if self.use is not None:
            shape = self._serving.shape
            grammar = shape.grammar(self.use, special, lead, form=asked is not None)
            if asked is None:
                asked = StructuredOutputsParams(lark=grammar, field="tools")
            elif self.use.mode == "auto":
                asked = dataclasses.replace(asked, lark=grammar)
            else:
                asked = StructuredOutputsParams(lark=grammar, field="tools")
            changes["structured_outputs"] = asked
            if any(token in mark for mark in shape.marks for token in special):
                changes["skip_special_tokens"] = False
        elif asked is not None and lead is not None:
            changes["structured_outputs"] = dataclasses.replace(asked, lead=lead.rules)
        return params.with_(**changes)

    def reader(self) -> AnswerReader:
        """For one answer."""
        thoughts = tools = None
        if self._thoughts is not None and self._state is not None:
            thoughts = ThoughtParser(self._thoughts, self._state)
        if self.use is not None:
            tools = ToolParser(self._serving.shape, self.use.tools)
        return AnswerReader(thoughts, tools)

    def finish_reason(self, reason: str, reader: AnswerReader) -> str:
        """An answer that ends with calls says so, unless the request had named the call."""
        called = reader.num_calls and self.use is not None and self.use.mode != "named"
        return "tool_calls" if called and reason == "stop" else reason
