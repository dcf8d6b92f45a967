"""One request of a trace, without its tokens: a simulation needs to know only which tokens are equal."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..workload import Work


class Piece(NamedTuple):
    """A run of tokens; equal keys mean equal tokens."""

    key: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Asked:
    """A request of a trace.

    Attributes:
        at: arrival, in seconds from the start.
        prompt_tokens, output_tokens: lengths, at least 1.
        pieces: the beginning of the prompt, as far as other prompts may begin so; no other prompt has the rest.
        answer: key of the answer's tokens, if later prompts hold them; empty if none does.
        client: sender, where the trace has one.
        prompt: the prompt itself, where the trace has it.
    """

    at: float
    prompt_tokens: int
    output_tokens: int
    pieces: tuple[Piece, ...] = ()
    answer: str = ""
    client: str = ""
    prompt: tuple[int, ...] | str | None = None


def work_of(asked: Iterable[Asked], *, vocab: tuple[int, int] = (0, 10000), seed: int | str = 0) -> list[Work]:
    """Draw the tokens of requests: random ids ``vocab[0] .. vocab[1]`` with both ends, equal for equal pieces."""
    rng = random.Random(f"trace {seed}")
    known: dict[Piece, tuple[int, ...]] = {}
    work = []
    for each in asked:
        if each.prompt is not None:
            work.append(Work(each.prompt, each.output_tokens, each.at))
            continue
        ids: list[int] = []
        for piece in each.pieces:
            tokens = known.get(piece)
            if tokens is None:
                own = random.Random(f"piece {seed} {piece.key}")
                tokens = known[piece] = tuple(own.randint(*vocab) for _ in range(piece.tokens))
            ids.extend(tokens)
        ids = ids[: each.prompt_tokens]
        ids.extend(rng.randint(*vocab) for _ in range(each.prompt_tokens - len(ids)))
        work.append(Work(tuple(ids), each.output_tokens, each.at))
    return work


def from_start(asked: Iterable[Asked], where: object) -> list[Asked]:
    """Order requests by arrival, the first at 0.

    Raises:
        ValueError: there are none in ``where``.
    """
    found = sorted(asked, key=lambda each: each.at)
    if not found:
        raise ValueError(f"{where} holds no request")
    began = found[0].at
    return [replace(each, at=each.at - began) for each in found] if began else found


def faster(asked: Iterable[Asked], speed: float) -> list[Asked]:
    """Make the same requests arrive ``speed`` times as fast.

    Raises:
        ValueError: ``speed`` is not above 0.
    """
    if not speed > 0:
        raise ValueError(f"the speed of a trace must be above 0, got {speed:g}")
    return [replace(each, at=each.at / speed) for each in asked]


def rate_of(asked: Sequence[Asked]) -> float:
    """Return the requests per second from the first arrival to the last."""
    seconds = asked[-1].at - asked[0].at
    return (len(asked) - 1) / seconds if seconds > 0 else float("inf")


def warped(asked: Iterable[Asked], rates: Sequence[float], seconds: float) -> Iterator[Asked]:
    """Yield requests of a trace of one per second at other times: ``rates`` has the requests per second of consecutive
    spans of ``seconds``. Bursts are kept; requests after the last span are dropped."""
    span, passed = 0, 0.0
    for each in asked:
        while span < len(rates) and each.at >= passed + rates[span] * seconds:
            passed += rates[span] * seconds
            span += 1
        if span == len(rates):
            return
        yield replace(each, at=seconds * span + (each.at - passed) / rates[span])
