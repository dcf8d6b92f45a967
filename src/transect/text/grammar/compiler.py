"""Compilation of grammars to constraints, outside of the engine's steps and within limits."""

from __future__ import annotations

import dataclasses
import functools
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from .checker import Busy, compile_matcher
from .checkers import Checkers
from .constraint import GrammarConstraint
from .fair_pool import FairPool
from .params import StructuredOutputsParams
from .sources import from_ebnf, grammar_of, is_ebnf
from .vocabulary import Vocabulary

KEPT = 256
KEPT_BYTES = 8 * 2**20
"""Limit of kept compiled grammars, measured by the length of their texts."""
MOST_THREADS = 4


class GrammarCompiler:
    """Compiles grammars for one model. Thread-safe.

    Args:
        vocabulary: makes the model's vocabulary when it is first needed.
        checked: grammars come from strangers: each is compiled on trial in a process of its own first.
    """

    def __init__(self, vocabulary: Callable[[], Vocabulary], *, checked: bool = True) -> None:
        self._make_vocabulary, self._checked = vocabulary, checked
        self._lock = threading.Lock()
        self._tokenizer: Any = None
        self._vocabulary: Vocabulary | None = None
        self._known: OrderedDict[str, Any | str] = OrderedDict()
        """llguidance's matcher of each grammar, or the reason why there is none."""
        self._known_bytes = 0
        self._threads = min(MOST_THREADS, len(os.sched_getaffinity(0)))
        self._checkers: Checkers | None = None
        self._pool: FairPool | None = None

    def submit(self, params: StructuredOutputsParams, client: str = "") -> Future[GrammarConstraint]:
        """Compile in another thread; clients share the threads by time."""
        with self._lock:
            if self._pool is None:
                self._pool = FairPool(self._threads, "grammar")
        return self._pool.submit(client, functools.partial(self.compile, params))

    def compile(self, params: StructuredOutputsParams) -> GrammarConstraint:
        """Return the constraint at the beginning of an answer.

        Raises:
            Busy: it is not known whether it can be used.
            ValueError: the grammar is at fault; the message begins with ``params.field`` and says what to change.
        """
        vocabulary, tokenizer = self._ready()
        if params.grammar is not None and is_ebnf(params.grammar):
            params = dataclasses.replace(params, grammar=self._translate(params.grammar, params.field, vocabulary))
        grammar = grammar_of(params, vocabulary.special_names)
        with self._lock:
            found = self._known.get(grammar)
            if found is not None:
                self._known.move_to_end(grammar)
        if found is None:
            try:
                found = self._compile(grammar, vocabulary, tokenizer)
            except Busy as error:
                raise Busy(f"{params.field} cannot be used: {error}") from None
            self._keep(grammar, found)
        if isinstance(found, str):
            raise ValueError(f"{params.field} cannot be used: {found}")
        return GrammarConstraint(found.deep_copy(), params.field)

    def close(self) -> None:
        """End the threads and processes that check grammars."""
        if self._pool is not None:
            self._pool.close()
        if self._checkers is not None:
            self._checkers.close()

    def _translate(self, grammar: str, field: str, vocabulary: Vocabulary) -> str:
        try:
            if not self._checked:
                return from_ebnf(grammar)
            with self._spares(vocabulary).one() as checker:
                return checker.translate(grammar)
        except ValueError as error:
            raise type(error)(f"{field} cannot be used: {error}") from None

    def _spares(self, vocabulary: Vocabulary) -> Checkers:
        with self._lock:
            if self._checkers is None:
                self._checkers = Checkers(vocabulary, self._threads)
            return self._checkers

    def _compile(self, grammar: str, vocabulary: Vocabulary, tokenizer: Any) -> Any | str:
        if self._checked:
            with self._spares(vocabulary).one() as checker:
                problem = checker.check(grammar)
            if problem is not None:
                return problem
        try:
            return compile_matcher(tokenizer, grammar)
        except ValueError as error:
            return str(error)

    def _ready(self) -> tuple[Vocabulary, Any]:
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = self._make_vocabulary()
                self._tokenizer = self._vocabulary.make()
            return self._vocabulary, self._tokenizer

    def _keep(self, grammar: str, found: Any | str) -> None:
        with self._lock:
            if grammar not in self._known:
                self._known_bytes += len(grammar)
            self._known[grammar] = found
            while len(self._known) > KEPT or (self._known_bytes > KEPT_BYTES and len(self._known) > 1):
                old, _ = self._known.popitem(last=False)
                self._known_bytes -= len(old)
