"""Answers in channels (gpt-oss): thoughts, text and calls are consecutive messages.

A message reads ``<|start|>HEADER<|message|>CONTENT``, and ends with ``<|end|>``, ``<|call|>`` or ``<|return|>``. The
header names a role, a channel (``analysis``: thoughts; ``final``: text; ``commentary``: text before calls) and whom it
is for (``to=functions.NAME``: a call, whose content is its arguments). The prompt ends within the first header. The
source is OpenAI's description of the format (cookbook.openai.com/articles/openai-harmony).
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping

from .grammar import lark
from .tools.arguments import JSON
from .tools.parser import CallDelta
from .tools.spec import ToolUse

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
LONGEST_HEADER = 300

_MARKS = re.compile("|".join(map(re.escape, (*ENDS, START, CHANNEL))))
_PARTS = tuple({mark[:size] for mark in (*ENDS, START, CHANNEL) for size in range(1, len(mark))})
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_FUNCTION = re.compile(r"to=functions\.([A-Za-z0-9_.-]+)")
_BEGINS = (START, CHANNEL, "to=", "assistant")


def grammar(use: ToolUse | None, special_ids: Mapping[str, int], *, form: bool = False) -> str:
    """Return a grammar in Lark of answers in channels.

    Args:
        use: tools that may be called, or None.
        special_ids: special tokens by their spelling.
        form: text in the final channel has a form, the grammar called ``@answer``.

    Raises:
        ValueError: a strict tool cannot be kept to.
    """

    def fixed(text: str) -> str:
        return lark.literal(text, special_ids)

    again = fixed(f"{ENDS[0]}{START}assistant")
    lines = [f"analysis: {fixed(f'{CHANNEL}analysis{MESSAGE}')} TEXT {again}", f"TEXT: {lark.ANY_TEXT}"]
    if use is None or use.mode == "auto":
        lines.append(f"final: {fixed(f'{CHANNEL}final{MESSAGE}')} {'@answer' if form else 'TEXT'}")
    if use is None:
        return "\n".join(["start: analysis* final", *lines])
    lines.append(f"preamble: {fixed(f'{CHANNEL}commentary{MESSAGE}')} TEXT {again}")
    for number, tool in enumerate(use.callable):
        arguments, rules = JSON.grammar(f"a{number}", tool, fixed)
        name = f"to=functions.{tool.name}"
        heads = f"{fixed(f'{CHANNEL}commentary {name}')} | {fixed(f' {name}{CHANNEL}commentary')}"
        kind = f'({fixed(f" {CONSTRAIN}json")} | " json")?'
        lines += [f"call_{number}: ({heads}) {kind} {fixed(MESSAGE)} {arguments}", *rules]
    calls = " | ".join(f"call_{number}" for number in range(len(use.callable)))
    last = f"final | {calls}" if use.mode == "auto" else calls
    return "\n".join([f"start: (analysis | preamble)* ({last})", *lines])


class HarmonyReader:
    """Splits one answer, in pieces of any size. Text outside of channels is plain text.

    Args:
        prompt: its end determines the channel in which the answer continues.
        calls: messages to functions are calls; else they are text.
    """

    def __init__(self, prompt: str = "", *, calls: bool = False) -> None:
        self._wanted = calls
        self._held = ""
        self._kind: str | None = None
        """Kind of the message: ``thoughts``, ``text`` or ``call``; None before its header has been read."""
        self._said = {"thoughts": False, "text": False}
        self._parted = False
        """True if a message of a kind seen before has begun, and nothing of it has been returned."""
        self._skip = 0
        """Characters that look like the beginning of a header and are none."""
        self._fed = self._thoughts_end = 0
        self.num_calls = 0
        at = prompt.rfind(START)
        if MESSAGE in prompt[at:] and at >= 0:
            kind = self._kind_of(prompt[at + len(START) : prompt.index(MESSAGE, at)])
            self._kind = "text" if kind == "call" else kind

    @property
    def thought_bytes(self) -> int:
        """Bytes of the answer up to the end of its thoughts."""
        return self._fed if self._kind == "thoughts" else self._thoughts_end

    def feed(self, piece: str, *, last: bool = False, cut: bool = False) -> tuple[str, str, list[CallDelta]]:
        """Read more of the answer; return the new thoughts, text and calls.

        Args:
            last: no more will come.
            cut: the answer stops before the model ended it. What may be the beginning of a mark is dropped then.
        """
        last = last and not cut  # what is held back as the beginning of a mark stays held back
        self._held += piece
        self._fed += len(piece.encode(errors="replace"))
        found = {"thoughts": "", "text": ""}
        news: list[CallDelta] = []
        while self._held:
            if self._kind is None:
                if not self._header(last, news):
                    break
            else:
                content, ended = self._content(last)
                if self._kind == "call":
                    news += [CallDelta(self.num_calls - 1, content)] if content else []
                elif content:
                    found[self._kind] += ("\n\n" if self._parted else "") + content
                    self._said[self._kind], self._parted = True, False
                if not ended:
                    break
                self._end()
        return found["thoughts"], found["text"], news

    def _header(self, last: bool, news: list[CallDelta]) -> bool:
        held = self._held.lstrip()
        likely = any(held.startswith(mark[: len(held)]) for mark in _BEGINS)
        header, found, rest = self._held.partition(MESSAGE)
        if found and likely:
            self._held, self._kind = rest, self._kind_of(header)
            if self._kind == "call":
                name = _FUNCTION.search(header)
                assert name is not None
                news.append(CallDelta(self.num_calls, "", f"call_{uuid.uuid4().hex[:24]}", name[1]))
                self.num_calls += 1
            self._parted = self._said.get(self._kind, False)
        elif last or not likely or len(held) > LONGEST_HEADER:
            self._kind, self._skip = "text", 1
        return self._kind is not None

    def _kind_of(self, header: str) -> str:
        if _FUNCTION.search(header):
            return "call" if self._wanted else "text"
        channel = _CHANNEL.search(header)
        return "thoughts" if channel is not None and channel[1] == "analysis" else "text"

    def _content(self, last: bool) -> tuple[str, bool]:
        """Return (content of the message, True if it has ended)."""
        held, found = self._held, _MARKS.search(self._held, self._skip)
        self._skip = 0
        if found is not None:
            ended = found[0] in ENDS
            self._held = held[found.end() if ended else found.start() :]
            return held[: found.start()], True
        longest = max(map(len, _PARTS))
        sizes = range(min(longest, len(held)), 0, -1)
        keep = 0 if last else next((size for size in sizes if held[-size:] in _PARTS), 0)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep], False

    def _end(self) -> None:
        if self._kind == "thoughts":
            self._thoughts_end = self._fed - len(self._held.encode(errors="replace"))
        self._kind = None
