"""Token ids to text, a few tokens at a time.

Tokens are byte strings, and a character may be spread over several of them. Joining the bytes and feeding them to an
incremental UTF-8 decoder makes each push cost what its own tokens cost, and makes the text independent of how the ids
were cut into pushes: bytes that may still become a character wait, bytes that no longer can become U+FFFD as soon as
that is certain, by the same rule as in ``bytes.decode(errors="replace")`` (one U+FFFD for each maximal invalid part).
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Protocol


class TokenTable(Protocol):
    """Part of a tokenizer that converts ids to text."""

    @property
    def special_ids(self) -> frozenset[int]: ...

    @property
    def drops_leading_space(self) -> bool: ...

    def token_bytes(self, token_id: int) -> bytes: ...


_utf8 = codecs.getincrementaldecoder("utf-8")


class IncrementalDetokenizer:
    """Turns one stream of token ids into text.

    Over any chunking, the pushes and the flush together give ``tokenizer.decode(all_ids, skip_special_tokens,
    continues_text)``.

    Args:
        tokenizer: gives the bytes of a token.
        skip_special_tokens: leave special tokens out.
        continues_text: the ids continue a text (a prompt), so a leading space that the tokenizer family puts before
            every text is real and stays.
    """

    def __init__(
        self, tokenizer: TokenTable, skip_special_tokens: bool = True, *, continues_text: bool = False
    ) -> None:
        self._bytes_of = tokenizer.token_bytes
        self._skipped: frozenset[int] = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._drop_space = tokenizer.drops_leading_space and not continues_text
        self._decoder = _utf8(errors="replace")

    def push(self, token_ids: Iterable[int]) -> str:
        """Return the text that these tokens complete; "" while a character is incomplete."""
        skipped = self._skipped
        data = b"".join([self._bytes_of(token) for token in token_ids if token not in skipped])
        if self._drop_space and data:
            self._drop_space = False
            data = data.removeprefix(b" ")
        return self._decoder.decode(data)

    def flush(self) -> str:
        """Return the remaining text when no token follows: U+FFFD for an incomplete character, else ""."""
        return self._decoder.decode(b"", final=True)
