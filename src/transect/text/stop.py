"""Stop strings in a stream of text: found across any chunk border, with no more text held back than could still matter.

The matcher is the automaton of Aho and Corasick ("Efficient string matching: an aid to bibliographic search", 1975).
Its state after a character is the longest suffix of the text that begins some stop string; exactly that is held back.
The stop string that is *complete first* wins; of several complete at the same character, the longest, which begins
first. So the answer depends on the text alone and not on how it was cut into chunks, and no token is generated only to
learn whether a longer stop string might follow.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class StopMatcher:
    """Finds the first of ``stops`` in text that arrives in pieces.

    Args:
        stops: non-empty strings; none at all makes ``push`` pass text through.
        include_stop: keep the stop string at the end of the text; otherwise the text ends before it.

    Raises:
        ValueError: a stop string is empty or not a string.
    """

    def __init__(self, stops: Iterable[str] = (), include_stop: bool = False) -> None:
        self._include_stop = include_stop
        self._goto: list[dict[str, int]] = [{}]
        self._fail = [0]
        self._depth = [0]
        self._found: list[str | None] = [None]
        for stop in stops:
            if not isinstance(stop, str) or not stop:
                raise ValueError(f"stop must hold non-empty strings, got {stop!r}")
            self._insert(stop)
        self._link()
        self._state = 0
        self._held = ""
        self._stopped: str | None = None

    def _insert(self, stop: str) -> None:
        node = 0
        for char in stop:
            child = self._goto[node].get(char)
            if child is None:
                child = len(self._goto)
                self._goto[node][char] = child
                self._goto.append({})
                self._fail.append(0)
                self._depth.append(self._depth[node] + 1)
                self._found.append(None)
            node = child
        self._found[node] = stop

    def _link(self) -> None:
        """Breadth first: a node falls back to the node of its longest proper suffix, and inherits what ends there."""
        queue = deque(self._goto[0].values())
        while queue:
            node = queue.popleft()
            for char, child in self._goto[node].items():
                fallback = self._fail[node]
                while fallback and char not in self._goto[fallback]:
                    fallback = self._fail[fallback]
                self._fail[child] = self._goto[fallback].get(char, 0)
                queue.append(child)
            if self._found[node] is None:
                self._found[node] = self._found[self._fail[node]]

    @property
    def stopped(self) -> str | None:
        """The stop string that was found, if one was."""
        return self._stopped

    def push(self, delta: str) -> tuple[str, str | None]:
        """Take more text; return (text that is now safe to show, the stop string once found).

        After a stop string was found, everything further is dropped: the answer is ("", that stop string).
        """
        if self._stopped is not None:
            return "", self._stopped
        if len(self._goto) == 1:
            return delta, None
        state = self._state
        for position, char in enumerate(delta):
            while state and char not in self._goto[state]:
                state = self._fail[state]
            state = self._goto[state].get(char, 0)
            stop = self._found[state]
            if stop is not None:
                text = self._held + delta[: position + 1]
                self._stopped, self._held, self._state = stop, "", 0
                return (text if self._include_stop else text[: -len(stop)]), stop
        self._state = state
        text = self._held + delta
        safe = len(text) - self._depth[state]
        self._held = text[safe:]
        return text[:safe], None

    def flush(self) -> str:
        """The text held back, when no more will come."""
        held, self._held, self._state = self._held, "", 0
        return held
