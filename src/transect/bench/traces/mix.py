"""Generated traces: bursts (gamma), clients with rates of their own, conversations of several turns, and system prompts
that many requests begin with."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, count, islice

from ..lengths import Lengths
from .asked import Asked, Piece, from_start

ZIPF = 1.0
"""Exponent of the clients' rates: the second asks half as often as the first (ServeGen, Xiang et al. 2026, finds a few
clients behind most requests)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """A kind of load, without its rate.

    Attributes:
        prompt: lengths of what a user writes, in tokens. output: of answers.
        burstiness: squared coefficient of variation of the gaps of each client; 1 is a Poisson process.
        clients: independent senders; the rate of the n-th is in proportion to 1 / n.
        turns: mean number of turns of a conversation (geometric); each prompt holds all turns before it.
        think: mean seconds from one turn of a conversation to the next (exponential).
        system: tokens of the system prompt that a prompt begins with. systems: number of different ones.
        longest: tokens of prompt and answer at which a conversation ends; None without such a limit.

    Raises:
        ValueError: a number is out of its range.
    """

    prompt: Lengths
    output: Lengths
    burstiness: float = 1.0
    clients: int = 1
    turns: float = 1.0
    think: float = 10.0
    system: int = 0
    systems: int = 1
    longest: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("clients", 1), ("turns", 1), ("systems", 1), ("system", 0), ("think", 0)):
            if not least <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be a number of at least {least}, got {getattr(self, name)!r}")
        if not 0 <= self.burstiness < math.inf:
            raise ValueError(
                f"burstiness must be 0 (even), 1 (Poisson) or another number from 0 on, got {self.burstiness:g}"
            )

    def generate(self, rate: float, number: int, seed: int | str = 0) -> list[Asked]:
        """Draw ``number`` requests at ``rate`` per second on average, all turns together.

        Raises:
            ValueError: ``rate`` is not above 0.
        """
        if not rate > 0:
            raise ValueError(f"the request rate must be above 0, got {rate:g}: use inf for all at once")
        weights = [(each + 1) ** -ZIPF for each in range(self.clients)]
        streams = [
            self._client(str(name), rate * weight / sum(weights), f"{seed} {name}")
            for name, weight in enumerate(weights)
        ]
        return from_start(islice(heapq.merge(*streams, key=lambda each: each.at), number), "this mix")

    def _client(self, name: str, rate: float, seed: str) -> Iterator[Asked]:
        """Yield the requests of one client by arrival, without end."""
        starts, rng = self._gaps(rate / self.turns, random.Random(f"arrivals {seed}")), random.Random(f"work {seed}")
        coming: list[tuple[float, int, Iterator[Asked]]] = []
        start, numbers = next(starts), count()
        while True:
            if coming and coming[0][0] <= start:
                _, number, turns = heapq.heappop(coming)
            else:
                number = next(numbers)
                turns = self._conversation(start, f"{name}.{number}", name, rng)
                start = next(starts)
            yield next(turns)
            upcoming = next(turns, None)
            if upcoming is not None:
                heapq.heappush(coming, (upcoming.at, number, chain((upcoming,), turns)))

    def _gaps(self, rate: float, rng: random.Random) -> Iterator[float]:
        at, shape = 0.0, self.burstiness
        while True:
            if rate != math.inf:
                at += rng.gammavariate(1 / shape, shape / rate) if shape else 1 / rate
            yield at

    def _conversation(self, at: float, key: str, client: str, rng: random.Random) -> Iterator[Asked]:
        pieces: list[Piece] = []
        if self.system:
            pieces.append(Piece(f"system {rng.randrange(self.systems)}", self.system))
        turn = 0
        while True:
            written, answer = self.prompt.draw(rng), self.output.draw(rng)
            own = Piece(f"{key}.{turn}", written)
            length = sum(piece.tokens for piece in pieces) + written
            if self.longest is not None and turn and length + answer > self.longest:
                return
            last = rng.random() < 1 / self.turns
            shared = (*pieces, own) if not last or turn else tuple(pieces)
            name = "" if last else f"{key}.{turn} answer"
            yield Asked(at, length, answer, shared, name, client)
            if last:
                return
            pieces += [own, Piece(name, answer)]
            at += rng.expovariate(1 / self.think) if self.think else 0.0
            turn += 1
