"""Processes that check grammars, with a spare one that is warm: one that had to be ended is replaced at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from .checker import Checker
from .vocabulary import Vocabulary

MOST_KEPT = 256 * 2**20
"""Bytes by which a process may have grown and still be used again."""


class Checkers:
    """Lends processes to threads.

    Args:
        vocabulary: of the model.
        threads: that may borrow at the same time; there is one process more.
    """

    def __init__(self, vocabulary: Vocabulary, threads: int) -> None:
        self._all = [Checker(vocabulary) for _ in range(threads + 1)]
        self._ready = self._all[1:]  # started by whoever borrows them first
        self._changed = threading.Condition()
        self._closed = False
        self._warm(self._all[0])

    @contextmanager
    def one(self, *, long: bool = False) -> Iterator[Checker]:
        """A process, for as long as the block lasts.

        Args:
            long: the check may take long or end the process. Then one stays ready for others, if there are more.
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
        """End all processes, whatever they are doing."""
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
        """Start a process again in a thread, and lend it when it is ready."""

        def start() -> None:
            try:
                if not self._closed:
                    checker.start()
            except (OSError, RuntimeError, EOFError):
                pass  # whoever borrows it tries again, and says what is wrong
            finally:
                self._put(checker)
                if self._closed:
                    checker.close()

        threading.Thread(target=start, name="grammar-spare", daemon=True).start()
