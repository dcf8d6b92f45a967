"""Encode chat messages to token ids, so that no message text can act as the model's protocol.

A user may type ``<|im_end|>``. In the text that a chat template makes, that string cannot be told from the template's
own, and would end the user's turn. So before rendering, every spelling of a special token in a message (and every end
of a text that begins one, which the template's next piece might complete) is replaced by unguessable digits;
after rendering, the special tokens in the text are the template's alone. They become tokens, the digits become the
messages' text again, and that is encoded as text. Digits, because a template may write a message as JSON, or change its
case.

Only *special* tokens are treated so. Added tokens that are text (``<think>`` in Qwen3) are recognised everywhere.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

_KEY_DIGITS, _NUMBER_DIGITS = 30, 6
_LEFT_ALONE = ("role", "type")
"""Keys whose values templates compare, and do not print as text: partial spellings at the ends of these values are not
hidden."""


class Template(Protocol):
    """Part of a chat template that is used here."""

    @property
    def source(self) -> str: ...
    @property
    def tool_source(self) -> str: ...
    def render(self, messages: Any, add_generation_prompt: bool = ..., **kwargs: Any) -> str: ...


class ChatEncoder(Protocol):
    """Part of a tokenizer that is used here."""

    @property
    def special_texts(self) -> Sequence[str]: ...
    def encode(self, text: str, add_special_tokens: bool = ..., parse_special: bool = ...) -> list[int]: ...
    def encode_chat(self, text: str, mask: Mask, add_special_tokens: bool = ...) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class _Spellings:
    """Patterns of spellings: any of the special tokens, or a beginning of one."""

    pattern: re.Pattern[str] | None
    beginnings: frozenset[str]
    longest: int


@lru_cache(maxsize=16)
def _spellings(specials: tuple[str, ...]) -> _Spellings:
    ordered = sorted((text for text in specials if text), key=len, reverse=True)
    return _Spellings(
        re.compile("|".join(map(re.escape, ordered))) if ordered else None,
        frozenset(text[:size] for text in ordered for size in range(1, len(text))),
        max(map(len, ordered), default=0),
    )


class Mask:
    """Hides the spellings of special tokens in what users wrote, for one rendering.

    Args:
        specials: the spellings.
    """

    def __init__(self, specials: Iterable[str]) -> None:
        found = _spellings(tuple(specials))
        self._specials, self._beginnings, self._longest = found.pattern, found.beginnings, found.longest
        self._key = f"{secrets.randbelow(10**_KEY_DIGITS):0{_KEY_DIGITS}}"
        self._hidden: list[str] = []
        self._shown = re.compile(f"{self._key}([0-9]{{{_NUMBER_DIGITS}}})")

    def __bool__(self) -> bool:
        """Return True if something was hidden."""
        return bool(self._hidden)

    def hide(self, value: Any, ends: bool = True) -> Any:
        """Return a copy of a string, or of all strings in lists and mappings, with spellings of special tokens hidden.

        Args:
            ends: hide also the end of a string that is the beginning of such a spelling.
        """
        if self._specials is None:
            return value
        if isinstance(value, str):
            return self._hide_text(value, ends)
        if isinstance(value, Mapping):
            return {
                self.hide(key, ends=False): self.hide(item, ends and key not in _LEFT_ALONE)
                for key, item in value.items()
            }
        if isinstance(value, (list, tuple)):
            return [self.hide(item, ends) for item in value]
        return value

    def show(self, text: str) -> str:
        """Return the text with all hidden spellings restored."""
        return self._shown.sub(lambda found: self._hidden[int(found[1])], text)

    def _hide_text(self, text: str, ends: bool) -> str:
        assert self._specials is not None
        masked = self._specials.sub(lambda found: self._stand_in(found[0]), text)
        if not ends:
            return masked
        kept = masked.rstrip()  # templates often strip what they print
        for size in range(min(self._longest - 1, len(kept)), 0, -1):
            if kept[-size:] in self._beginnings:
                return kept[:-size] + self._stand_in(kept[-size:]) + masked[len(kept) :]
        return masked

    def _stand_in(self, spelling: str) -> str:
        if spelling in self._hidden:
            number = self._hidden.index(spelling)
        else:
            number = len(self._hidden)
            self._hidden.append(spelling)
        return f"{self._key}{number:0{_NUMBER_DIGITS}}"


class ChatRendering:
    """Conversation in the process of encoding, for callers that render or encode elsewhere.

    Give ``messages`` and ``variables`` to the template, its output to ``finish``, and the result to ``encoder.encode``.

    Args:
        tokenizer: of the model.
        messages, variables: see ``ChatTemplate.render``.
        continue_final_message: see ``chat_tokens``.

    Raises:
        ValueError: there is no last message with text to continue.
    """

    def __init__(
        self,
        tokenizer: ChatEncoder,
        messages: Any,
        variables: Mapping[str, Any] | None = None,
        *,
        continue_final_message: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._mask = Mask(tokenizer.special_texts)
        self._end = ""
        self.messages = self._mask.hide(messages)
        self.variables: dict[str, Any] = self._mask.hide(dict(variables or {}))
        if continue_final_message:
            self.messages, self._end = _marked_end(self.messages)

    def shown(self, text: str) -> str:
        """Return a text that was made from the messages (or an error about them) in its readable form."""
        text = self._mask.show(text)
        return text.replace(self._end, "") if self._end else text

    def finish(self, text: str) -> str:
        """Return the template's output, up to the point where the model continues.

        Raises:
            ValueError: the last message is to be continued, and the template does not show it.
        """
        if not self._end:
            return text
        if self._end not in text:
            raise ValueError("continue_final_message: the chat template does not show the last message as it is")
        return text[: text.rindex(self._end)]

    @property
    def encoder(self) -> Any:
        """Encoder of a finished text: the tokenizer itself if no spelling was replaced."""
        return _MaskedEncoder(self._tokenizer, self._mask) if self._mask else self._tokenizer


class _MaskedEncoder:
    """A tokenizer for texts with hidden spellings; other calls go to the underlying tokenizer."""

    def __init__(self, tokenizer: ChatEncoder, mask: Mask) -> None:
        self._tokenizer, self._mask = tokenizer, mask

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    @property
    def longest_token(self) -> int:
        """Most characters of a token; digits that hide a spelling are longer."""
        longest: int = self._tokenizer.longest_token  # type: ignore[attr-defined]
        return max(longest, 1) * (_KEY_DIGITS + _NUMBER_DIGITS)

    def encode(self, text: str, add_special_tokens: bool = False, parse_special: bool = True) -> list[int]:
        """Encode a text: hidden spellings are text, visible special tokens are tokens."""
        return self._tokenizer.encode_chat(text, self._mask, add_special_tokens)


def _marked_end(messages: Any) -> tuple[Any, str]:
    """Copy the messages with a mark at the end of the last one's text; also return the mark."""
    mark = f"{secrets.randbelow(10**_KEY_DIGITS):0{_KEY_DIGITS}}"
    last = messages[-1] if isinstance(messages, Sequence) and messages else None
    content = last.get("content") if isinstance(last, Mapping) else None
    if isinstance(content, str):
        content = content + mark
    elif isinstance(content, Sequence) and content and isinstance(content[-1], Mapping) and "text" in content[-1]:
        content = [*content[:-1], {**content[-1], "text": f"{content[-1]['text']}{mark}"}]
    else:
        raise ValueError("continue_final_message needs a last message with text to continue")
    assert isinstance(last, Mapping)
    return [*messages[:-1], {**last, "content": content}], mark


def chat_tokens(
    template: Template,
    tokenizer: ChatEncoder,
    messages: Any,
    add_generation_prompt: bool = True,
    *,
    add_special_tokens: bool = False,
    continue_final_message: bool = False,
    **kwargs: Any,
) -> tuple[str, list[int]]:
    """Render and encode a conversation to (text, token ids); special tokens come from the template, never from
    messages.

    Args:
        messages: see ``ChatTemplate.render``.
        add_special_tokens: add the special tokens that the model expects around a text; most templates add them.
        continue_final_message: end where the last message's text ends, so that the model continues it.
        kwargs: further variables of the template, treated as messages are; ``tools`` become text where the template
            does not mention them.

    Raises:
        ValueError: see ``ChatTemplate.render`` and ``Tokenizer.encode``.
    """
    from .tools.registry import for_template

    source = template.tool_source if kwargs.get("tools") else template.source
    messages, variables = for_template(source, messages, kwargs)
    rendering = ChatRendering(tokenizer, messages, variables, continue_final_message=continue_final_message)
    try:
        text = template.render(rendering.messages, add_generation_prompt, **rendering.variables)
    except ValueError as error:
        raise ValueError(rendering.shown(str(error))) from error
    text = rendering.finish(text)
    return rendering.shown(text), rendering.encoder.encode(text, add_special_tokens, parse_special=True)
