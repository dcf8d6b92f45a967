"""Encode texts to token ids without delaying other requests.

A text that cannot fit is refused before any work, because a token stands for a bounded number of characters. A long
text is encoded in a thread of its own pool, where the `tokenizers` library releases Python's lock. It is first counted
in pieces. Counting stops at the piece that exceeds the limit, or after the request has ended. So the cost of any text
is bounded by the context, not by the text's length.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable

from ..text.grammar.fair_pool import FairPool
from ..text.protocols import TokenizerLike
from .http.lanes import in_lane

SHORT = 8192
"""Most characters that are encoded in the caller's thread, which takes a millisecond or two. Passing a text to a thread
and back would take as long, and longer while other requests keep Python busy."""
PIECE = 32 * 1024
"""Characters of a piece."""
WORKERS = 2


class TooManyTokens(ValueError):
    """The text has more tokens than fit: at least ``at_least``."""

    def __init__(self, at_least: int, limit: int) -> None:
        super().__init__(f"the text has at least {at_least} tokens, and at most {limit} are allowed")
        self.at_least = at_least


class Encoder:
    """Encodes texts; has the threads for long ones."""

    def __init__(self) -> None:
        self._pool = FairPool(WORKERS, "transect-encode", time.thread_time)

    async def encode(
        self, tokenizer: TokenizerLike, text: str, limit: int, *, add_special: bool, parse_special: bool
    ) -> list[int]:
        """Encode a text to token ids.

        Args:
            tokenizer: must be safe to share between threads.
            limit: most tokens that are useful. A few more may be returned: the caller counts them.

        Raises:
            TooManyTokens: the text has more.
            ValueError: it cannot be encoded.
        """
        at_least = -(-len(text) // tokenizer.longest_token)
        if at_least > limit:
            raise TooManyTokens(at_least, limit)
        encode = functools.partial(tokenizer.encode, parse_special=parse_special)
        if len(text) <= SHORT:
            return encode(text, add_special_tokens=add_special)
        given_up = threading.Event()
        work = functools.partial(_encode_long, encode, text, limit, add_special, given_up)
        try:
            return await in_lane(self._pool, len(text), work)
        finally:
            given_up.set()


def _encode_long(
    encode: Callable[..., list[int]], text: str, limit: int, add_special: bool, given_up: threading.Event
) -> list[int]:
    counted = 0
    for start in range(0, len(text) if len(text) > PIECE else 0, PIECE):
        if given_up.is_set():
            return []
        counted += len(encode(text[start : start + PIECE]))
        # A cut can only divide the few tokens around it; a twentieth is far more than that.
        if counted * 19 // 20 > limit:
            raise TooManyTokens(counted * 19 // 20, limit)
    return encode(text, add_special_tokens=add_special)
