"""Load on a server: open loop, where arrivals never wait for answers, and closed loop, with a fixed concurrency.

In the open loop each request has a moment at which it is due, and its latencies count from that moment, not from when
the generator came to send it: a slow server cannot slow the questions down, and a slow generator cannot hide behind
its own delay (coordinated omission). How late the generator was is reported as its lag.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from .http_stream import HttpClient, RequestFailed
from .target import Stream, Target
from .workload import Work

HEAD_START_S = 0.05
"""Seconds between the start of the clock and the first arrival, in which the tasks are created."""


@dataclass(slots=True)
class Record:
    """One request. Moments are in seconds from the start of the run.

    Attributes:
        due: when it should be sent; in a closed loop, when it was.
        sent: when it was.
        moments: when its tokens came (see ``target.Stream``).
        ended: when its answer was complete, or failed.
        input_tokens, output_tokens: as the server counts them, else as asked and as seen.
        error: kind of failure, or None; ``detail`` says more.
    """

    due: float
    sent: float = 0.0
    moments: list[float] = field(default_factory=list)
    ended: float = 0.0
    input_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None
    detail: str = ""

    @property
    def ttft(self) -> float:
        """Seconds from the due time to the first token."""
        return self.moments[0] - self.due

    @property
    def latency(self) -> float:
        """Seconds from the due time to the end."""
        return self.ended - self.due

    @property
    def gaps(self) -> list[float]:
        """Seconds between consecutive events with tokens: inter-token latencies."""
        return [later - earlier for earlier, later in zip(self.moments, self.moments[1:], strict=False)]

    @property
    def tpot(self) -> float | None:
        """Seconds per output token after the first; None with fewer than two tokens."""
        if self.output_tokens < 2:
            return None
        return (self.moments[-1] - self.moments[0]) / (self.output_tokens - 1)


@dataclass(slots=True)
class Run:
    """All requests of one level of load, and the load of the generator itself (CPU seconds per second).

    ``began`` is when the clock of the records began, as ``time.perf_counter`` gives it.
    """

    records: list[Record]
    seconds: float
    generator_cpu: float
    began: float = 0.0


OnEnd = Callable[[Record], None]


async def open_loop(target: Target, work: Sequence[Work], on_end: OnEnd | None = None) -> Run:
    """Send each request at its time ``at``, whatever the state of the others."""
    client = target.client()
    bodies = [target.body(each) for each in work]

    async def run(start: float) -> list[Record]:
        loop = asyncio.get_running_loop()
        begin = loop.time() + start - time.perf_counter()
        records = [Record(due=each.at) for each in work]
        tasks: list[asyncio.Task[None]] = []
        all_sent = asyncio.Event()

        def send(index: int) -> None:
            request = _request(client, target, bodies[index], work[index], records[index], start, on_end)
            tasks.append(asyncio.create_task(request))
            if len(tasks) == len(work):
                all_sent.set()

        for index, each in enumerate(work):
            loop.call_at(begin + each.at, send, index)
        await all_sent.wait()
        await asyncio.gather(*tasks)
        return records

    return await _measured(client, run, HEAD_START_S)


async def closed_loop(target: Target, work: Sequence[Work], concurrency: int, on_end: OnEnd | None = None) -> Run:
    """Keep ``concurrency`` requests running until the work is done; arrival times are ignored.

    Raises:
        ValueError: ``concurrency`` is below 1.
    """
    if concurrency < 1:
        raise ValueError(f"concurrency must be at least 1, got {concurrency}")
    client = target.client()
    pairs = iter([(each, target.body(each)) for each in work])

    async def run(start: float) -> list[Record]:
        records: list[Record] = []

        async def worker() -> None:
            for each, body in pairs:
                record = Record(due=time.perf_counter() - start)
                records.append(record)
                await _request(client, target, body, each, record, start, on_end)

        await asyncio.gather(*(worker() for _ in range(min(concurrency, len(work)))))
        return records

    return await _measured(client, run, 0.0)


async def _measured(client: HttpClient, run: Callable[[float], Awaitable[list[Record]]], head_start: float) -> Run:
    """Run with the garbage collector off: a collection over all records would delay the timing of tokens."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    cpu_before = time.process_time()
    start = time.perf_counter() + head_start
    try:
        records = await run(start)
    finally:
        client.close()
        if enabled:
            gc.enable()
    seconds = time.perf_counter() - start
    return Run(records, seconds, (time.process_time() - cpu_before) / seconds, start)


async def _request(
    client: HttpClient, target: Target, body: bytes, work: Work, record: Record, start: float, on_end: OnEnd | None
) -> None:
    stream = Stream(target.endpoint)
    record.sent = time.perf_counter() - start
    try:
        reply = await client.post(target.path, body, stream.take)
        if reply.status != 200:
            raise RequestFailed(f"http {reply.status}", reply.body.decode(errors="replace")[:200])
        if stream.error is not None:
            raise stream.error
        if not stream.moments:
            raise RequestFailed("bad reply", "an answer without tokens, or no event stream")
    except RequestFailed as error:
        record.error, record.detail = error.kind, error.detail
    record.ended = time.perf_counter() - start
    record.moments = [moment - start for moment in stream.moments]
    usage = stream.usage
    record.input_tokens = usage.prompt_tokens if usage else len(work.prompt) if not isinstance(work.prompt, str) else 0
    record.output_tokens = usage.completion_tokens if usage else len(record.moments)
    if on_end is not None:
        on_end(record)
