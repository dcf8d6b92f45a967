"""Write the deltas of a watched engine as JSON for one reader of ``/live``: an operator sees all, others their own
requests."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import msgspec

from ..http.clients import Client
from .live import EngineWatch, LiveDelta

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Iterable

    from ...engine.scheduling.decisions import Added
    from ...engine.scheduling.policies.routing import Ticket
    from ...explain.engine.growing_bill import GrowingBill
    from ...explain.engine.kv_map import KVMap
    from ...explain.engine.live_log import LogNews
    from ...explain.engine.log import LoggedStep, StepRow

BILL_S = 0.3
"""Seconds between two states of a bill."""
LIMITS = (
    *("num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len"),
    *("itl_target", "pipeline_depth", "scheduling_policy", "max_queue"),
)


class LiveReader:
    """One reader of an engine's watch.

    Args:
        watch: of the engine.
        index: of the engine.
        engines: number of engines.
        client: the reader. An operator sees all requests.
        follow: id of a request whose bill is sent as it grows; empty for none. The caller has checked that the client
            may see it.
    """

    def __init__(self, watch: EngineWatch, index: int, engines: int, client: Client, follow: str = "") -> None:
        self._watch, self._index, self._engines = watch, index, engines
        self._all, self._name = client.operator, client.name
        self._follow = follow
        self._bill: GrowingBill | None = None
        self._bill_at, self._bill_due = 0.0, False
        """Time of the next state of the bill at the earliest, and a flag that it has changed."""
        self._mine: dict[int, int] = {}
        """Own sequences, with the first sequence of their request."""
        self._kv: KVMap | None = None
        self._last_step = 0
        self._last_rows: list[StepRow] = []

    async def events(self, deltas: AsyncGenerator[LiveDelta | None, None]) -> AsyncIterator[bytes]:
        """Yield events for the reader; closes ``deltas`` at the end."""
        async with aclosing(deltas):
            async for delta in deltas:
                if delta is not None:
                    yield _event(self._tick(delta))
                elif self._watch.log is None:
                    yield _event({"type": "down", "reason": self._watch.death})
                else:
                    state = self._state()
                    if self._follow:
                        await self._read_bill()
                        state["bill"] = None if self._bill is None else self._bill.to_dict()
                    yield _event(state)

    def _state(self) -> dict[str, Any]:
        """Return everything that a reader begins with."""
        from ...engine.scheduling.policies.orders.registry import scheduling_policies
        from ...explain.engine.live import LATE
        from ...explain.engine.meter import PARTS

        watch = self._watch
        log, work, seen = watch.log, watch.work, watch.seen
        assert log is not None and work is not None and seen is not None
        header = log.header
        self._mine.clear()
        self._kv, self._last_step, self._last_rows = None, 0, []
        requests = self._own(log.requests.values())
        return {
            "type": "state",
            "now": time.monotonic(),
            "engine": self._index,
            "engines": self._engines,
            "operator": self._all,
            "model": str(header.model.get("name", "")),
            "device": {name: header.device.get(name) for name in ("name", "kind", "threads", "dtype")},
            "floors": work.rates is not None and work.config is not None,
            "lag": header.lag,
            "limits": {name: header.scheduler.get(name) for name in LIMITS},
            "policies": list(scheduling_policies()) if self._all else [],
            "words": {"parts": dict(PARTS), "late": dict(LATE)},
            "requests": requests,
            "steps": self._steps(watch.steps),
            "routed": self._routes(watch.routed()),
            **self._present(),
            **self._sight(),
        }

    def _tick(self, delta: LiveDelta) -> dict[str, Any]:
        """Build an event of type ``tick`` with the changes since the last one."""
        news = delta.news
        found: dict[str, Any] = {"type": "tick", "now": delta.now, **self._present()}
        for name, value in (
            ("requests", self._own(news.added)),
            ("steps", self._steps(news.steps)),
            ("ends", self._ends(news)),
            ("marks", news.marks if self._all else []),
            ("routed", self._routes(delta.routed)),
        ):
            if value:
                found[name] = value
        if delta.seen is not None:
            found |= self._sight()
        if self._bill is not None:
            self._bill.take(news)
            self._bill_due = self._bill_due or bool(news)
            if delta.now >= self._bill_at and self._bill_due:
                self._bill_at, self._bill_due = delta.now + BILL_S, False
                found["bill"] = self._bill.to_dict()
        return found

    def _own(self, requests: Iterable[Added]) -> list[dict[str, Any]]:
        found = []
        for added in requests:
            own = added.client == self._name
            if not (own or self._all):
                continue
            for choice in range(added.n):
                self._mine[added.first_seq + choice] = added.first_seq
            found.append(
                {
                    "seq": added.first_seq,
                    "id": added.request_id,
                    "n": added.n,
                    "client": added.client,
                    "own": own,
                    "prompt": added.prompt_tokens,
                    "max": added.max_tokens,
                    "arrival": added.arrival,
                    "known": added.known,
                    "adapter": added.adapter[:8],
                    "grammar": added.grammar,
                    "priority": added.priority,
                }
            )
        return found

    def _steps(self, steps: Iterable[LoggedStep]) -> list[list[Any]]:
        """Return steps as lists: number, begin (s), ms, floor (ms), launched, rows, ``held_back``, waiting, running,
        free blocks, ms between ranks, cause of a late step, accepted drafts.

        Rows are None if they are those of the last step, each advanced by one token.
        """
        work = self._watch.work
        assert work is not None
        found: list[list[Any]] = []
        for step in steps:
            rows: list[StepRow] = step.rows if self._all else [row for row in step.rows if row[0] in self._mine]
            if not rows:
                continue
            again = step.planned.rows is None and step.number == self._last_step + 1
            again = again and len(rows) == len(self._last_rows)
            self._last_step, self._last_rows = step.number, rows
            planned = step.planned
            queue = [planned.held_back, planned.waiting, planned.running, planned.free_blocks] if self._all else []
            found.append(
                [
                    step.number,
                    round(step.begins, 5),
                    round(1e3 * step.seconds, 3),
                    round(1e3 * work.floor(step.rows).seconds, 3),
                    step.launched,
                    None if again else [number for row in rows for number in row],
                    *(queue or ["", None, None, None]),
                    round(1e3 * step.ranks, 3),
                    step.late,
                    list(step.accepted.items()) if self._all else [],
                ]
            )
        return found

    def _ends(self, news: LogNews) -> list[tuple[Any, ...]]:
        found = []
        for end in news.ends:
            if end.leader + end.choice in self._mine:
                del self._mine[end.leader + end.choice]
                found.append((end.leader, end.choice, end.reason, end.tokens, end.at))
        return found

    def _present(self) -> dict[str, Any]:
        """Return the queue as of the newest plan; of others nothing but the reason why the head of the queue waits."""
        log = self._watch.log
        if log is None:
            return {}
        queue = log.queue
        found: dict[str, Any] = {"reason": queue.held_back}
        if self._all:
            found["queue"] = {
                "waiting": queue.waiting if log.requests else 0,
                "running": queue.running if log.requests else 0,
                "free": queue.free_blocks,
                "under_way": queue.at if queue.in_flight else None,
            }
        return found

    def _sight(self) -> dict[str, Any]:
        """Return the newest snapshot: changes of the map of KV blocks, and the queue in its order."""
        seen, kv = self._watch.seen, self._watch.kv
        if seen is None or kv is None:
            return {}
        shown = kv.shown(None if self._all else set(self._mine.values()))
        before, self._kv = self._kv, shown
        found: dict[str, Any] = {
            "seen": seen.at,
            "kv": shown.runs(before),
            "waiting": [each for each in seen.waiting if self._all or each[0] in self._mine],
        }
        if self._all:
            found["evicted"] = shown.evicted
            found["elsewhere"] = seen.elsewhere
            found["stats"] = seen.stats
        return found

    def _routes(self, routed: Iterable[tuple[str, str, Ticket]]) -> list[dict[str, Any]]:
        """Return the router's choices: for each replica its load and the tokens of the prompt that it would compute."""
        found: list[dict[str, Any]] = []
        for request_id, client, ticket in routed:
            if self._all:
                found.append({"id": request_id, "to": ticket.engine, "offers": ticket.offers})
            elif client == self._name:
                found.append({"id": request_id, "to": ticket.engine, "offers": []})
        return found

    async def _read_bill(self) -> None:
        """Begin the bill of the followed request with what the decision log has of it."""
        from ...explain.engine.growing_bill import GrowingBill
        from ...explain.engine.live_log import LiveLog
        from ...explain.engine.log import bare_id

        watch = self._watch
        assert watch.log is not None and watch.work is not None
        header, data = watch.log.header, watch.ring.mentioning(bare_id(self._follow).encode())
        bill = GrowingBill(self._follow, watch.work)
        await asyncio.to_thread(lambda: bill.take(LiveLog(header).take(data)))
        self._bill = bill


_encode = msgspec.json.Encoder().encode


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + _encode(value) + b"\n\n"
