"""Stop strings in a stream of text: found across any chunk border, holding back no more text than necessary.

The matcher is the automaton of Aho and Corasick ("Efficient string matching: an aid to bibliographic search", 1975).
Its state after a character is the longest suffix of the text that begins some stop string; exactly that is held back.
The stop string that is *complete first* wins; of several complete at the same character, the longest, which begins
first. So the answer depends on the text alone and not on how it was cut into chunks, and no token is generated only to
learn whether a longer stop string might follow.

``StopAutomaton`` is what a set of stop strings makes, built once and read by all choices; ``StopMatcher`` is the place
of one choice in it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class StopAutomaton:
    """The automaton of some stop strings. Nothing in it changes once it is built.

    Args:
        stops: non-empty strings; none at all is an automaton that finds nothing.

    Raises:
        ValueError: a stop string is empty or not a string.
    """

    __slots__ = ("__weakref__", "depth", "fail", "found", "goto")

    def __init__(self, stops: Iterable[str] = ()) -> None:
        self.goto: list[dict[str, int]] = [{}]
        """Transitions of each node: next character to next node. Node 0 is the root."""
        self.fail = [0]
        """Node of the longest proper suffix, by node."""
        self.depth = [0]
        """Number of characters that lead to the node, by node."""
        self.found: list[str | None] = [None]
        """Longest stop string that is complete at the node, by node."""
        for stop in stops:
            if not isinstance(stop, str) or not stop:
                raise ValueError(f"stop must hold non-empty strings, got {stop!r}")
            self._insert(stop)
        self._link()

    def _insert(self, stop: str) -> None:
        node = 0
        for char in stop:
            child = self.goto[node].get(char)
            if child is None:
                child = len(self.goto)
                self.goto[node][char] = child
                self.goto.append({})
                self.fail.append(0)
                self.depth.append(self.depth[node] + 1)
                self.found.append(None)
            node = child
        self.found[node] = stop

    def _link(self) -> None:
        """Link the nodes, breadth first: a node falls back to the node of its longest proper suffix, and inherits the
        stop strings that end there."""
        queue = deque(self.goto[0].values())
        while queue:
            node = queue.popleft()
            for char, child in self.goto[node].items():
                fallback = self.fail[node]
                while fallback and char not in self.goto[fallback]:
                    fallback = self.fail[fallback]
                self.fail[child] = self.goto[fallback].get(char, 0)
                queue.append(child)
            if self.found[node] is None:
                self.found[node] = self.found[self.fail[node]]


class StopMatcher:
    """Finds the first of ``stops`` in text that arrives in pieces.

    Args:
        stops: stop strings, or the automaton that they have made; none at all makes ``push`` pass text through.
        include_stop: keep the stop string at the end of the text; otherwise the text ends before it.

    Raises:
        ValueError: a stop string is empty or not a string.
    """

    __slots__ = ("_automaton", "_held", "_include_stop", "_state", "_stopped")

    def __init__(self, stops: Iterable[str] | StopAutomaton = (), include_stop: bool = False) -> None:
        self._automaton = stops if isinstance(stops, StopAutomaton) else StopAutomaton(stops)
        self._include_stop = include_stop
        self._state = 0
        self._held = ""
        self._stopped: str | None = None

    @property
    def stopped(self) -> str | None:
        """Stop string that was found; None if none was."""
        return self._stopped

    def push(self, delta: str) -> tuple[str, str | None]:
        """Add text; return (text that is safe to show, the stop string once found).

        After a stop string was found, everything further is dropped: the answer is ("", that stop string).
        """
        if self._stopped is not None:
            return "", self._stopped
        automaton = self._automaton
        goto, fail, found = automaton.goto, automaton.fail, automaton.found
        if len(goto) == 1:
            return delta, None
        state = self._state
        for position, char in enumerate(delta):
            while state and char not in goto[state]:
                state = fail[state]
            state = goto[state].get(char, 0)
            stop = found[state]
            if stop is not None:
                text = self._held + delta[: position + 1]
                self._stopped, self._held, self._state = stop, "", 0
                return (text if self._include_stop else text[: -len(stop)]), stop
        self._state = state
        text = self._held + delta
        safe = len(text) - automaton.depth[state]
        self._held = text[safe:]
        return text[:safe], None

    def flush(self) -> str:
        """Return the held-back text, when no more follows."""
        held, self._held, self._state = self._held, "", 0
        return held
