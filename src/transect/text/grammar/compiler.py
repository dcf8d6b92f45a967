"""Compilation of grammars to constraints, outside of the engine's steps and within limits."""

from __future__ import annotations

import dataclasses
import functools
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from hashlib import blake2b
from typing import Any

import msgspec

from ...hardware.cores import helper_cores
from .checker import Busy, compile_matcher
from .checkers import Checkers
from .constraint import GrammarConstraint
from .fair_pool import LIGHT_S, FairPool
from .params import CACHE_BYTES, StructuredOutputsParams
from .sources import from_ebnf, grammar_of, is_ebnf
from .vocabulary import Vocabulary

EMPTY_BYTES, TEXT_FACTOR = 150 * 2**10, 80
"""Estimate of a compiled grammar's memory where it was not measured: some bytes, and as many for each of its text."""
REFUSED_BYTES = 2**10
"""Memory of a stored refusal."""
LEAST_THREADS, MOST_THREADS = 2, 4
"""Threads that compile; one of them is for short work."""
BYTE_S = 5e-6
"""Seconds of compiling expected for a byte of a grammar that has not been seen."""
MOST_TIMED = 4096
"""Grammars whose time of compiling is remembered."""


class GrammarCompiler:
    """Compiles grammars for one model. Thread-safe.

    Args:
        vocabulary: makes the model's vocabulary when it is first needed.
        checked: grammars come from strangers: each is compiled on trial in a process of its own first.
        cache_bytes: memory of compiled grammars that are kept, and of refusals; the least recently used go first.
    """

    def __init__(
        self, vocabulary: Callable[[], Vocabulary], *, checked: bool = True, cache_bytes: int = CACHE_BYTES
    ) -> None:
        self._make_vocabulary, self._checked, self._most_bytes = vocabulary, checked, cache_bytes
        self._lock = threading.Lock()
        self._elsewhere = threading.local()
        """Processor seconds that a thread is charged for beside its own."""
        self._tokenizer: Any = None
        self._vocabulary: Vocabulary | None = None
        self._known: OrderedDict[bytes, tuple[Any | str, int]] = OrderedDict()
        """llguidance's matcher of each grammar, or the reason why there is none; and its bytes. By hash of the grammar:
        a refused one may have a megabyte of text."""
        self.kept_bytes = 0
        """Memory of all that is kept."""
        self._seconds: OrderedDict[int, float] = OrderedDict()
        """By hash of a request for a grammar: seconds that it took last."""
        self._threads = max(LEAST_THREADS, min(MOST_THREADS, helper_cores()))
        self._checkers: Checkers | None = None
        self._pool: FairPool | None = None

    def submit(self, params: StructuredOutputsParams, client: str = "") -> Future[GrammarConstraint]:
        """Compile in another thread; clients share the threads by time, and short work runs before long work."""
        with self._lock:
            if self._pool is None:
                self._pool = FairPool(self._threads, "grammar", self._work_clock)
            key, seconds = self._expect(params)
        return self._pool.submit(client, functools.partial(self._timed, params, key, seconds > LIGHT_S), seconds)

    def _expect(self, params: StructuredOutputsParams) -> tuple[int, float]:
        """Hash a request, and return it with the seconds that its grammar will take as far as can be told."""
        try:
            text = msgspec.json.encode(params)
        except (TypeError, ValueError, OverflowError, RecursionError):  # ``compile`` reports the error
            return 0, LIGHT_S
        key = hash(text)
        return key, self._seconds.get(key, BYTE_S * len(text))

    def _work_clock(self) -> float:
        """Processor seconds of this thread, and of processes for it: waiting for a process does not count."""
        return time.thread_time() + float(getattr(self._elsewhere, "seconds", 0.0))

    def _add_work(self, seconds: float) -> None:
        self._elsewhere.seconds = getattr(self._elsewhere, "seconds", 0.0) + seconds

    def _timed(self, params: StructuredOutputsParams, key: int, long: bool) -> GrammarConstraint:
        began = self._work_clock()
        try:
            return self.compile(params, long=long)
        finally:
            with self._lock:
                self._seconds[key] = self._work_clock() - began
                self._seconds.move_to_end(key)
                if len(self._seconds) > MOST_TIMED:
                    self._seconds.popitem(last=False)

    def compile(self, params: StructuredOutputsParams, *, long: bool = False) -> GrammarConstraint:
        """Return the constraint at the beginning of an answer.

        Args:
            long: compiling is expected to take long: leave a process for others that are not.

        Raises:
            Busy: it is not known whether it can be used.
            ValueError: the grammar is at fault; the message begins with ``params.field`` and says what to change.
        """
        began = time.thread_time()
        vocabulary, tokenizer = self._ready()
        self._add_work(began - time.thread_time())  # the first request makes them, and is not charged for that
        if params.grammar is not None and is_ebnf(params.grammar):
            params = dataclasses.replace(params, grammar=self._translate(params.grammar, params.field, vocabulary))
        grammar = grammar_of(params, vocabulary.special_names)
        key = blake2b(grammar.encode(errors="surrogatepass")).digest()
        with self._lock:
            found, _ = self._known.get(key, (None, 0))
            if found is not None:
                self._known.move_to_end(key)
        if found is None:
            try:
                found, nbytes = self._compile(grammar, vocabulary, tokenizer, long)
            except Busy as error:
                raise Busy(f"{params.field} cannot be used: {error}") from None
            self._keep(key, found, nbytes)
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

    def _compile(self, grammar: str, vocabulary: Vocabulary, tokenizer: Any, long: bool) -> tuple[Any | str, int]:
        nbytes = 0
        if self._checked:
            with self._spares(vocabulary).one(long=long) as checker:
                try:
                    problem = checker.check(grammar)
                finally:
                    self._add_work(checker.spent)
                nbytes = checker.nbytes
            if problem is not None:
                return problem, REFUSED_BYTES
        try:
            matcher = compile_matcher(tokenizer, grammar)
        except ValueError as error:
            return str(error), REFUSED_BYTES
        return matcher, nbytes or EMPTY_BYTES + TEXT_FACTOR * len(grammar)

    def _ready(self) -> tuple[Vocabulary, Any]:
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = self._make_vocabulary()
                self._tokenizer = self._vocabulary.make()
            return self._vocabulary, self._tokenizer

    def _keep(self, key: bytes, found: Any | str, nbytes: int) -> None:
        with self._lock:
            if key in self._known:  # two requests compiled it at the same time
                return
            self._known[key] = found, nbytes
            self.kept_bytes += nbytes
            while self.kept_bytes > self._most_bytes:
                _, (_, old) = self._known.popitem(last=False)
                self.kept_bytes -= old
