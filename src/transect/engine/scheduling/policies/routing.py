"""Choice among several engines for a request: the engine that will finish it soonest, estimated in tokens.

Each engine has its own prefix cache. So the router remembers which blocks of prompts it has sent where, newest first,
and expects them to be cached there still. A request costs an engine the tokens that are not cached there, after the
tokens that the engine has to compute already; the least of these sums wins. So a long prefix draws its requests to one
engine until that one's queue is longer than what the prefix saves. In the same way requests of an adapter go to an
engine that has it in a slot of its device, and those of a session to the engine of its last request. Where engines
differ in speed, tokens are weighed by the pace of each. Plain arithmetic: no clock, no torch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

TYPICAL_OUTPUT = 256
"""Most tokens that an answer is expected to have, if a request sets no lower limit."""

RULES = {"routing": {"by": ("Router.send",), "engines": 3, "bounds": {"first_token": 1.15}}}


@dataclass(slots=True)
class _Engine:
    """State of one engine, as known to the router."""

    most_blocks: int
    load: int = 0
    """Tokens that the engine still has to compute."""
    blocks: OrderedDict[int, None] = field(default_factory=OrderedDict)
    """Hashes of the blocks that its cache is assumed to hold; each hash covers all blocks before it."""
    adapters: OrderedDict[str, None] = field(default_factory=OrderedDict)
    """Adapters that its device is assumed to hold, the most recently used last."""
    pace: float = 1.0
    """Time that its tokens take, relative to those of the other engines."""


@dataclass(slots=True)
class Ticket:
    """A request in an engine, with the load that it still counts there."""

    engine: int
    prompt: int
    outputs: int
    noted: tuple[int, ...] = ()
    """Hashes of its blocks that the engine was not assumed to hold."""
    offers: tuple[tuple[int, int, int], ...] = ()
    """(engine, its load, tokens of the prompt that it does not have) of each engine that was compared."""


class Router:
    """Keeps the load and the prefixes of some engines.

    Args:
        capacities: tokens that the prefix cache of each holds.
        block_size: tokens of a block.
        slots: adapters that the device of each holds.
    """

    ADAPTER = 512
    """Tokens that loading an adapter into a slot counts as, so that adapters stay apart while engines have room."""
    SESSION = 128
    """Tokens by which an engine may be behind another and still get the next request of its session."""
    MOST_SESSIONS = 1 << 16
    """Number of sessions that are remembered, the most recently used ones."""

    def __init__(self, capacities: Sequence[int], block_size: int, slots: int = 1) -> None:
        self._size, self._slots = block_size, slots
        self._engines = [_Engine(max(1, tokens // block_size)) for tokens in capacities]
        self._turn = 0
        self._sessions: OrderedDict[str, int] = OrderedDict()
        """Engine of each session's last request."""

    def add(self, capacity: int) -> int:
        """Add an engine whose prefix cache holds ``capacity`` tokens. Returns its number."""
        self._engines.append(_Engine(max(1, capacity // self._size)))
        return len(self._engines) - 1

    def load(self, engine: int) -> int:
        """Return the known number of tokens that an engine still has to compute."""
        return self._engines[engine].load

    def pace(self, engine: int) -> float:
        """Return the time that an engine's tokens take, relative to those of the other engines."""
        return self._engines[engine].pace

    def weigh(self, engine: int, pace: float) -> None:
        """Set the time that an engine's tokens take, relative to those of the other engines."""
        self._engines[engine].pace = pace

    def send(
        self, prompt: Sequence[int], outputs: int, alive: Iterable[int], adapter: str = "", session: str = ""
    ) -> Ticket:
        """Choose an engine, and count the request there.

        Args:
            prompt: token ids.
            outputs: most tokens that will be drawn, over all choices.
            alive: the engines to choose from.
            adapter: content id of the adapter that computes it; empty for none.
            session: name that the requests of a session share; empty for none.

        Raises:
            ValueError: there are none.
        """
        hashes = self._hashes(prompt, adapter)
        home = self._sessions.get(session, -1) if session else -1
        best: tuple[float, int, int, int] | None = None
        offers: list[tuple[int, int, int]] = []
        for index in alive:
            engine = self._engines[index]
            uncached = len(prompt) - min(self._cached(engine, hashes), max(0, len(prompt) - 1))
            if adapter and adapter not in engine.adapters:
                uncached += self.ADAPTER
            offers.append((index, engine.load, uncached))
            cost = engine.pace * (engine.load + uncached) - (self.SESSION if index == home else 0)
            turn = (index - self._turn) % len(self._engines)
            if best is None or (cost, turn) < best[:2]:
                best = cost, turn, index, uncached
        if best is None:
            raise ValueError("there is no engine to choose from")
        index = best[2]
        if session:
            self._sessions[session] = index
            self._sessions.move_to_end(session)
            while len(self._sessions) > self.MOST_SESSIONS:
                self._sessions.popitem(last=False)
        engine = self._engines[index]
        self._turn = (index + 1) % len(self._engines)
        if adapter:
            engine.adapters[adapter] = None
            engine.adapters.move_to_end(adapter)
            while len(engine.adapters) > self._slots:
                engine.adapters.popitem(last=False)
        noted = tuple(each for each in hashes if each not in engine.blocks)
        ticket = Ticket(index, best[3], outputs, noted, tuple(offers))
        for each in reversed(hashes):  # the beginning of a prompt is the newest: it is forgotten last
            engine.blocks.pop(each, None)
            engine.blocks[each] = None
        while len(engine.blocks) > engine.most_blocks:
            engine.blocks.popitem(last=False)
        engine.load += ticket.prompt + ticket.outputs
        return ticket

    def drawn(self, ticket: Ticket, tokens: int) -> None:
        """Account for drawn tokens of a request: its prompt is done, and fewer tokens remain to be drawn."""
        engine = self._engines[ticket.engine]
        fewer = min(tokens, ticket.outputs)
        engine.load -= ticket.prompt + fewer
        ticket.prompt, ticket.outputs = 0, ticket.outputs - fewer

    def done(self, ticket: Ticket) -> None:
        """Account for the end of a request, whatever the reason."""
        self._engines[ticket.engine].load -= ticket.prompt + ticket.outputs
        ticket.prompt = ticket.outputs = 0

    def refused(self, ticket: Ticket) -> None:
        """Account for a refused request, whose prompt the engine will not compute."""
        self.done(ticket)
        for each in ticket.noted:
            self._engines[ticket.engine].blocks.pop(each, None)

    def forget(self, engine: int | None = None) -> None:
        """Forget the assumed prefix cache of an engine, or of all."""
        for index, each in enumerate(self._engines):
            if engine is None or index == engine:
                each.blocks.clear()

    def renew(self, engine: int, capacity: int) -> None:
        """Account for a replaced engine: its prefix cache holds ``capacity`` tokens, and is empty. Its pace is that of
        the others, until it is measured. Tickets of the old one stay valid."""
        self._engines[engine].pace = 1.0
        self._engines[engine].most_blocks = max(1, capacity // self._size)
        self._engines[engine].adapters.clear()
        self.forget(engine)

    def _hashes(self, prompt: Sequence[int], adapter: str) -> list[int]:
        found, before = [], hash(adapter) if adapter else 0
        for start in range(0, len(prompt) - self._size + 1, self._size):
            before = hash((before, *prompt[start : start + self._size]))
            found.append(before)
        return found

    def _cached(self, engine: _Engine, hashes: Sequence[int]) -> int:
        count = 0
        for each in hashes:
            if each not in engine.blocks:
                break
            count += 1
        return count * self._size
