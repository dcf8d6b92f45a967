"""The bill of a request that still runs, from the news of its engine's log."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...engine.scheduling.decisions import Added
from .live_log import LogNews
from .log import bare_id
from .meter import PARTS, Meter, Span
from .work import StepWork


class GrowingBill:
    """The first choice of a request, in the engine that has it now. Its parts are those of ``bill.Bill``.

    Args:
        name: id of the engine's request, or of the server's answer (``log.bare_id``).
        work: of the engine.
    """

    def __init__(self, name: str, work: StepWork) -> None:
        self.name = bare_id(name)
        self._work = work
        self._meter = Meter()
        self._spans = [Span(0.0, {}, 0.0, 0), Span(0.0, {}, 0.0, 0)]
        """Sums up to the first token, and since then."""
        self._added_up = 0
        """Leading pieces of the meter that are in the sums."""
        self._added: Added | None = None
        self._step = 0
        """Number of the newest step that was taken."""
        self._first = self._last = 0.0
        """Times of the first token and the newest; 0 before them."""
        self._end = 0
        """Positions up to the newest token."""
        self.reason = ""

    def take(self, news: LogNews) -> None:
        """Read the next events of the log; steps that were taken before are ignored."""
        for each in news.added:
            if self._added is None and f"{each.request_id}-".startswith(f"{self.name}-"):
                self._added = each
                self._meter.begin(each)
                self._add_up()
        added = self._added
        if added is None:
            return
        prompt = added.prompt_tokens
        for step in news.steps:
            if step.number <= self._step or self.reason:
                continue
            self._step = step.number
            row = next((each for each in step.rows if each[0] == added.first_seq), None)
            if row is None and step.planned.at <= added.at:
                continue
            self._meter.take(step, row, self._work)
            self._add_up()
            if row is not None and (end := step.end(row)) >= max(prompt, self._end + 1):
                self._end, self._last = end, step.at or 0.0
                self._first = self._first or self._last
        for ended in news.ends:
            if ended.leader == added.first_seq and ended.choice == 0:
                self.reason = ended.reason

    def _add_up(self) -> None:
        """Add the new pieces of the meter to the sums. The last piece stays there: the next one begins at its end."""
        pieces, floors = self._meter.pieces, self._meter.floors
        before = self._spans[bool(self._first)]
        parts = dict(before.parts)
        for begin, end, name in pieces[self._added_up :]:
            parts[name] = parts.get(name, 0.0) + end - begin
        floor = before.floor + sum(seconds for _, seconds, _ in floors)
        tokens = before.tokens + sum(count for _, _, count in floors)
        ordered = {name: parts[name] for name in PARTS if name in parts}
        self._spans[bool(self._first)] = Span(0.0, ordered, floor, tokens)
        floors.clear()
        del pieces[:-1]
        self._added_up = len(pieces)

    def to_dict(self) -> dict[str, Any]:
        """Return the bill so far for JSON; times in milliseconds, those of events on the engine's clock in seconds."""
        added = self._added
        if added is None:
            return {"request_id": self.name, "known": False}
        newest = self._meter.pieces[-1][1] if self._meter.pieces else added.at
        ttft = replace(self._spans[0], seconds=(self._first or newest) - added.arrival)
        decode = replace(self._spans[1], seconds=newest - self._first) if self._last > self._first else None
        return {
            "request_id": added.request_id,
            "known": True,
            "arrival": added.arrival,
            "until": newest,
            "prompt_tokens": added.prompt_tokens,
            "output_tokens": max(0, self._end - added.prompt_tokens + 1) if self._first else 0,
            "finish_reason": self.reason,
            "first_token": bool(self._first),
            "ttft": ttft.to_dict(),
            "decode": None if decode is None else decode.to_dict(),
        }
