"""Requests of a trace as the engine takes them, with made-up tokens: equal pieces of prompts have equal tokens, and all
else differs, so the prefix cache and the router find what they would find."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count, repeat
from typing import Any

from ..bench.traces.asked import Asked
from ..engine.scheduling.request import Request
from ..engine.scheduling.sampling_params import SamplingParams

PRIVATE = 2**24
"""First token of prompt pieces that no other prompt shares."""


def shares_prefixes(asked: Sequence[Asked]) -> bool:
    """Return True if two prompts may begin alike. If none do, the prefix cache finds nothing, and a simulation without
    it decides the same."""
    first = Counter(each.pieces[0].key for each in asked if each.pieces)
    return any(number > 1 for number in first.values())


@dataclass(slots=True)
class Tokens:
    """Generates tokens: one number for each key, repeated over the length of its piece."""

    _known: dict[str, int] = field(default_factory=dict)
    _private: Any = field(default_factory=lambda: count(PRIVATE))

    def request(self, name: str, asked: Asked, done: int | None = None) -> Request:
        """Build a request called ``name``. ``done``: tokens of its answer that an engine has drawn before it failed, so
        that the request ranks before new ones; None for a new request."""
        tokens: list[int] = []
        for key, length in asked.pieces:
            tokens.extend(repeat(self._number(key), length))
        del tokens[asked.prompt_tokens :]
        tokens.extend(repeat(next(self._private), asked.prompt_tokens - len(tokens)))
        params = SamplingParams(max_tokens=asked.output_tokens, ignore_eos=True, seed=0)
        known = None if done is None else ((self.answer(asked),) * done,)
        return Request(name, tuple(tokens), params, arrival_time=asked.at, output_token_ids=known)

    def answer(self, asked: Asked) -> int:
        """Return the token that the answer consists of."""
        return self._number(asked.answer) if asked.answer else next(self._private)

    def _number(self, key: str) -> int:
        return self._known.setdefault(key, len(self._known) + 1)


def shared_tokens(asked: Sequence[Asked]) -> float:
    """Return the share of prompt tokens that an unbounded prefix cache would find, in prompts and answers."""
    known: set[str] = set()
    found = total = 0
    for each in asked:
        total += each.prompt_tokens
        for key, length in each.pieces:
            if key not in known:
                break
            found += length
        known.update(piece.key for piece in each.pieces)
        known.update([each.answer] if each.answer else ())
    return min(found, total) / total if total else 0.0
