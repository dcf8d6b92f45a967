"""Chats of several turns: each turn sends the whole conversation so far, with the answers that the server gave.

Chats begin at random (Poisson). The next turn of a chat comes ``PAUSE_S`` after the end of the answer before. Latencies
of a turn count from when it was due.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

import _paths  # noqa: F401
from transect.bench.http_stream import HttpClient, RequestFailed
from transect.bench.levels import random_arrivals
from transect.bench.load import Record, Run
from transect.bench.target import Stream, Target
from transect.bench.workload import Work

TURNS = 5
PAUSE_S = 1.0
FIRST, NEXT, ANSWER = (240, 960), (40, 160), (60, 240)
"""The fewest and the most tokens of a first message, of a later one and of an answer."""


@dataclass(frozen=True, slots=True)
class Chat:
    """One conversation: when it begins, in seconds, and of each turn the new text and how many tokens to answer."""

    at: float
    turns: tuple[tuple[str, int], ...]


def chats(requests: int, rate: float, seed: int, word: Sequence[str]) -> list[Chat]:
    """Generate chats with ``requests`` turns in total, of which ``rate`` would arrive per second if answers took no
    time.

    Args:
        word: texts of one token each.
    """
    rng = random.Random(f"chats {seed}")
    count = -(-requests // TURNS)
    found = []
    for at in random_arrivals(count, rate / TURNS, seed=f"chats {seed}"):
        sizes = [rng.randint(*(NEXT if turn else FIRST)) for turn in range(TURNS)]
        turns = tuple(("".join(rng.choices(word, k=size)), rng.randint(*ANSWER)) for size in sizes)
        found.append(Chat(at, turns))
    return found


class KeptStream(Stream):
    """A stream that keeps the text of its answer."""

    __slots__ = ("text",)

    def __init__(self, endpoint: str) -> None:
        super().__init__(endpoint)
        self.text = ""

    def take(self, data: bytes, now: float) -> None:
        """Take one event of the stream."""
        super().take(data, now)
        if data != b"[DONE]" and self.error is None:
            self.text += "".join(choice.get("text") or "" for choice in msgspec.json.decode(data)["choices"])


async def run_chats(target: Target, work: Sequence[Chat]) -> Run:
    """Hold all chats. A chat ends with a turn that fails."""
    client = target.client()
    start, cpu = time.perf_counter(), time.process_time()
    try:
        records = await asyncio.gather(*(_hold(client, target, chat, start) for chat in work))
    finally:
        client.close()
    seconds = time.perf_counter() - start
    return Run([each for mine in records for each in mine], seconds, (time.process_time() - cpu) / seconds, start)


async def _hold(client: HttpClient, target: Target, chat: Chat, start: float) -> list[Record]:
    records: list[Record] = []
    said, due = "", chat.at
    for text, tokens in chat.turns:
        await asyncio.sleep(max(0.0, start + due - time.perf_counter()))
        said += text
        record, stream = Record(due=due, sent=time.perf_counter() - start), KeptStream(target.endpoint)
        records.append(record)
        try:
            reply = await client.post(target.path, target.body(Work(said, tokens)), stream.take)
            if reply.status != 200:
                raise RequestFailed(f"http {reply.status}", reply.body.decode(errors="replace")[:200])
            if stream.error is not None or stream.usage is None:
                raise stream.error or RequestFailed("bad reply", "an answer without its numbers of tokens")
        except RequestFailed as error:
            record.error, record.detail = error.kind, error.detail
            break
        finally:
            record.ended = time.perf_counter() - start
        record.moments = [moment - start for moment in stream.moments]
        record.input_tokens, record.output_tokens = stream.usage.prompt_tokens, stream.usage.completion_tokens
        said, due = said + stream.text, record.ended + PAUSE_S
    return records
