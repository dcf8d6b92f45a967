"""A substitute for a tokenizer if a model has none (``load_format="dummy"``): every token is its number as text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn


class NumberText:
    """The interface of ``Tokenizer`` as far as output needs it: token 17 is the text `` 17``. Texts have no tokens.

    Attributes:
        vocab_size: ids are below this.
        longest_token: as in ``Tokenizer``.
    """

    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    special_ids: frozenset[int] = frozenset()
    special_texts: tuple[str, ...] = ()
    drops_leading_space = False
    longest_token = 2**31  # so that no length is checked before ``encode`` reports the error

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def encode(self, text: str, add_special_tokens: bool = False, parse_special: bool = False) -> NoReturn:
        """Raise ValueError: there is no tokenizer to encode with.

        Raises:
            ValueError: there is nothing to encode with.
        """
        raise ValueError("this model has random weights and no tokenizer: give the prompt as token ids")

    def encode_chat(self, text: str, mask: object, add_special_tokens: bool = False) -> NoReturn:
        """Raise ValueError, like ``encode``."""
        self.encode(text)

    def token_id(self, token: str) -> int | None:
        """Return the number that the text spells; None if it spells none."""
        number = token.strip()
        return int(number) if number.isdecimal() and int(number) < self.vocab_size else None

    def decode(
        self, token_ids: Iterable[int], skip_special_tokens: bool = True, *, continues_text: bool = False
    ) -> str:
        """Return the numbers, separated by spaces."""
        return b"".join([self.token_bytes(token) for token in token_ids]).decode()

    def token_bytes(self, token_id: int) -> bytes:
        """Return a space and the number."""
        return b" %d" % token_id

    def token_text(self, token_id: int) -> str:
        """Return a space and the number."""
        return f" {token_id}"
