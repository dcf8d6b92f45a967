"""Grammars over bytes: one token for each byte and a few special ones, so that any text can be tried on a grammar."""

from __future__ import annotations

import random
import re

import numpy as np

from transect.text.grammar.compiler import GrammarCompiler
from transect.text.grammar.constraint import GrammarConstraint
from transect.text.grammar.params import StructuredOutputsParams
from transect.text.grammar.vocabulary import Vocabulary

SPELLED = ("<eos>", "[TOOL_CALLS]", "[THINK]", "[/THINK]", "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>",
           "<|end|>", "<|tool_call|>", "<|python_tag|>", "[ARGS]", "[CALL_ID]")  # fmt: skip
SPECIAL = {spelling: 256 + number for number, spelling in enumerate(SPELLED)}
END = SPECIAL["<eos>"]
SIZE = 256 + len(SPECIAL) + 2


class ByteTokenizer:
    """Ids 0 to 255 are bytes, those from 256 on ``SPECIAL``; the model has two rows more."""

    vocab_size = 256 + len(SPECIAL)
    special_ids = frozenset(SPECIAL.values())

    def token_bytes(self, token_id: int) -> bytes:
        names = {token: name.encode() for name, token in SPECIAL.items()}
        return names.get(token_id, bytes([token_id % 256]))

    def encode(self, text: str, add_special_tokens: bool = False, parse_special: bool = False) -> list[int]:
        return list(text.encode())


def vocabulary() -> Vocabulary:
    return Vocabulary.of(ByteTokenizer(), (END,), SIZE)


COMPILER = GrammarCompiler(vocabulary, checked=False)


def tokens_of(text: str) -> list[int]:
    """Bytes, and special tokens where they are spelled."""
    pattern = "|".join(map(re.escape, SPECIAL))
    parts = re.split(f"({pattern})", text)
    return [token for part in parts for token in ([SPECIAL[part]] if part in SPECIAL else part.encode())]


def constraint(**form) -> GrammarConstraint:
    """At the beginning of an answer of this form."""
    return COMPILER.compile(StructuredOutputsParams(**form))


def allowed(grammar: GrammarConstraint) -> list[int]:
    words = np.zeros(-(-SIZE // 32), np.int32)
    assert grammar.fill(words) is None
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()


def accepts(grammar: GrammarConstraint, text: str) -> bool:
    """Whether the whole text is an answer. The mask is asked for every token, as an engine does."""
    state = grammar.fork()
    for token in tokens_of(text):
        if state.terminated or token not in allowed(state) or state.accept(token) is not None:
            return False
    return state.may_end


def random_answer(grammar: GrammarConstraint, rng: random.Random, most: int = 3000) -> str | None:
    """An answer as chance has it, that ends as soon as it may; None if it does not come to an end."""
    state, found = grammar.fork(), bytearray()
    for _ in range(most):
        if state.terminated:
            return found.decode()
        choices = allowed(state)
        forced = state.forced()
        assert not forced or choices == forced[:1], "a token that is said to be forced has alternatives"
        if END in choices and (len(choices) == 1 or rng.random() < 0.5):
            return found.decode()
        closing = [token for token in choices if token in tuple(b'"}]')]
        plain = closing if closing and rng.random() < 0.4 else [token for token in choices if token < 256]
        token = rng.choice(plain)
        assert state.accept(token) is None
        found.append(token)
    return None
