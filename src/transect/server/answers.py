"""Split chat answers into thoughts, text and tool calls, alike for whole answers and for streams."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..engine.scheduling.sampling_params import SamplingParams
from ..text import harmony
from ..text.grammar.params import StructuredOutputsParams
from ..text.harmony import HarmonyReader
from ..text.reasoning import ThoughtParser
from ..text.tools.parser import CallDelta, ToolParser
from ..text.tools.spec import ToolUse
from .serving import Serving

if TYPE_CHECKING:
    from ..text.outputs import CompletionOutput


@dataclass(slots=True)
class AnswerPiece:
    """New parts of an answer."""

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

    def __init__(self, thoughts: ThoughtParser | HarmonyReader | None, tools: ToolParser | None) -> None:
        self._thoughts, self._tools = thoughts, tools

    @property
    def num_calls(self) -> int:
        """Calls that have begun."""
        if isinstance(self._thoughts, HarmonyReader):
            return self._thoughts.num_calls
        return 0 if self._tools is None else self._tools.num_calls

    @property
    def thought_bytes(self) -> int:
        """Bytes of the answer up to the end of its thoughts."""
        return 0 if self._thoughts is None else self._thoughts.thought_bytes

    def feed(self, text: str, reason: str | None = None, stop_reason: int | str | None = None) -> AnswerPiece:
        """Read more of the answer.

        Args:
            reason: the finish reason with the last of it; None before.
            stop_reason: the stop string or token that ended it, if one did.
        """
        last = reason is not None
        cut = reason == "length" or stop_reason is not None
        if isinstance(self._thoughts, HarmonyReader):
            return AnswerPiece(*self._thoughts.feed(text, last=last, cut=cut))
        piece = AnswerPiece(text=text)
        if self._thoughts is not None:
            piece.thoughts, piece.text = self._thoughts.feed(text, last=last, cut=cut)
        if self._tools is not None:
            piece.text, piece.calls = self._tools.feed(piece.text, last=last, cut=cut)
        return piece

    def whole(self, output: CompletionOutput) -> WholeAnswer:
        """Read an answer that is complete."""
        piece = self.feed(output.text, output.finish_reason or "stop", output.stop_reason)
        calls: list[WholeCall] = []
        for news in piece.calls:
            if news.name is not None:
                calls.append(WholeCall(news.id or "", news.name, ""))
            calls[news.index].arguments += news.arguments
        return WholeAnswer(piece.thoughts or None, None if calls and not piece.text else piece.text, calls)


class Answers:
    """Form of one request's answers, and readers for them.

    Args:
        use: tools that may be called, or None.
        prompt: the text that the model continues.
        said: the beginning of the answer, if the prompt ends with it.
    """

    def __init__(self, serving: Serving, use: ToolUse | None, prompt: str, said: str = "") -> None:
        self._serving, self.use = serving, use
        self._prompt, self._goes_on = prompt, bool(said)
        self._channels = serving.channels
        self._thoughts = serving.thoughts
        self._state = None if self._thoughts is None else self._thoughts.state(prompt, said)
        self._shows_special = False

    @property
    def plain(self) -> bool:
        """True if the answers are text and nothing else."""
        return self.use is None and self._thoughts is None and not self._channels

    @property
    def thinks(self) -> bool:
        """True if thoughts may come before an answer."""
        return self._thoughts is not None or self._channels

    def params(self, params: SamplingParams) -> SamplingParams:
        """Return the sampling parameters with the grammar of these answers.

        Raises:
            ValueError: the tools and the form that was asked for cannot be had together.
        """
        if self.plain:
            return params
        asked, grammar, marks = params.structured_outputs, None, list[str]()
        special = self._serving.special_ids
        if self._channels:
            marks = [harmony.CHANNEL]
            if (self.use is not None or asked is not None) and not self._goes_on:
                grammar = harmony.grammar(self.use, special, form=asked is not None)
        else:
            lead = None
            if self._thoughts is not None and self._state is not None:
                lead = self._thoughts.lead(self._state, special)
                marks += [self._thoughts.begin, self._thoughts.end]
            if self.use is not None:
                grammar = self._serving.shape.grammar(self.use, special, lead, form=asked is not None)
                marks += self._serving.shape.marks
            elif asked is not None and lead is not None:
                asked = dataclasses.replace(asked, lead=lead.rules)
        if grammar is not None:
            if asked is None or (self.use is not None and self.use.mode != "auto"):
                asked = StructuredOutputsParams(lark=grammar, field="tools")
            else:
                asked = dataclasses.replace(asked, lark=grammar)
        changes: dict[str, Any] = {"structured_outputs": asked}
        if any(token in mark for mark in marks for token in special):
            changes["skip_special_tokens"] = False
        changed = params.with_(**changes)
        self._shows_special = not changed.skip_special_tokens
        return changed

    def reader(self) -> AnswerReader:
        """Build a reader for one answer."""
        if self._channels:
            return AnswerReader(HarmonyReader(self._prompt, calls=self.use is not None), None)
        thoughts = tools = None
        if self._thoughts is not None and self._state is not None:
            thoughts = ThoughtParser(self._thoughts, self._state)
        if self.use is not None:
            tools = ToolParser(self._serving.shape, self.use.tools)
        return AnswerReader(thoughts, tools)

    def finish_reason(self, reason: str, reader: AnswerReader) -> str:
        """Return the finish reason to report: ``tool_calls`` if the answer ends with calls, unless the request named
        the call."""
        called = reader.num_calls and self.use is not None and self.use.mode != "named"
        return "tool_calls" if called and reason == "stop" else reason

    def thought_tokens(self, reader: AnswerReader, token_ids: Sequence[int]) -> int:
        """Count the leading tokens of a fully read answer that are thoughts."""
        tokenizer, left, count = self._serving.engine.tokenizer, reader.thought_bytes, 0
        unseen = () if self._shows_special else self._serving.special_ids.values()
        hidden = frozenset(unseen)
        for token in token_ids:
            if left <= 0:
                break
            count += 1
            left -= 0 if token in hidden else len(tokenizer.token_bytes(token))
        return count
