"""Processes that check grammars, with a warm spare that replaces a killed one at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ...hardware.cores import step_aside
from .checker import Checker
from .vocabulary import Vocabulary

MOST_KEPT = 256 * 2**20
"""Largest growth, in bytes, of a process that is reused."""


class Checkers:
    """Lends processes to threads.

    Args:
        vocabulary: of the model.
        threads: that may borrow at the same time; there is one process more.
    """

    def __init__(self, vocabulary: Vocabulary, threads: int) -> None:
        self._all = [Checker(vocabulary) for _ in range(threads + 1)]
        self._ready = self._all[1:]  # started when first borrowed
        self._changed = threading.Condition()
        self._closed = False
        self._warm(self._all[0])

    @contextmanager
    def one(self, *, long: bool = False) -> Iterator[Checker]:
        """Lend a process for the length of the block.

        Args:
            long: the check may take long or end the process. One of several processes then stays ready for others.
        """
        least = 2 if long and len(self._all) > 1 else 1
        with self._changed:
            self._changed.wait_for(lambda: len(self._ready) >= least or (self._closed and self._ready))
            checker = self._ready.pop()
        try:
            yield checker
        finally:
            if checker.growth > MOST_KEPT:
                checker.close()
            if checker.alive or self._closed:
                self._put(checker)
            else:
                self._warm(checker)

    def close(self) -> None:
        """End all processes, even busy ones."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for checker in self._all:
            checker.close()

    def _put(self, checker: Checker) -> None:
        with self._changed:
            self._ready.append(checker)
            self._changed.notify_all()

    def _warm(self, checker: Checker) -> None:
        """Restart a process in a thread, and lend it when it is ready."""

        def start() -> None:
            step_aside()
            try:
                if not self._closed:
                    checker.start()
            except (OSError, RuntimeError, EOFError):
                pass  # the next borrower tries again, and reports the error
            finally:
                self._put(checker)
                if self._closed:
                    checker.close()

        threading.Thread(target=start, name="grammar-spare", daemon=True).start()
