"""One line in the log for each request: what was asked, how it ended, how long it took and how many tokens it was.

No text of prompts or answers is logged, and no key. The level of a line is that of its end: info where all went well,
warning where the client has something to change or went away, error where the server failed.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from ...engine.scheduling.outputs import RequestTimes

log = logging.getLogger("transect.requests")

LogFormat = Literal["off", "text", "json"]
GONE = 499
"""The status of a request whose client went away before an answer began."""

_record: ContextVar[dict[str, Any] | None] = ContextVar("transect_request", default=None)


def begin() -> dict[str, Any]:
    """The facts about the request of this task and of those that it starts; ``note`` adds to them."""
    facts: dict[str, Any] = {}
    _record.set(facts)
    return facts


def note(**facts: Any) -> None:
    """Add facts about the request that is being handled, if one is."""
    record = _record.get()
    if record is not None:
        record.update(facts)


def engine_seconds(times: RequestTimes | None) -> dict[str, float]:
    """The stretches of a request's life in the engine, in seconds: ``queue``, ``prefill`` (to its first token) and
    ``decode``; none where it did not come to all of them."""
    if times is None or times.first_scheduled is None or times.first_token is None or times.finished is None:
        return {}
    marks = (times.arrival, times.first_scheduled, times.first_token, times.finished)
    names = ("queue_seconds", "prefill_seconds", "decode_seconds")
    return {name: round(b - a, 6) for name, a, b in zip(names, marks, marks[1:], strict=False)}


def server_timing(facts: dict[str, Any]) -> bytes | None:
    """The value of a ``Server-Timing`` header (W3C), in milliseconds; None before a request has ended."""
    if "queue_seconds" not in facts:
        return None
    parts = (f"{name};dur={1e3 * facts[f'{name}_seconds']:.3f}" for name in ("queue", "prefill", "decode"))
    return ", ".join(parts).encode()


def end(method: str, path: str, status: int, seconds: float, request_id: str, facts: dict[str, Any]) -> None:
    """Write the request's line."""
    level = logging.ERROR if status >= 500 else logging.WARNING if status >= 400 else logging.INFO
    if log.isEnabledFor(level):
        fields = {"method": method, "path": path, "status": status, "seconds": round(seconds, 4), "id": request_id}
        log.log(level, "%s %s %d", method, path, status, extra={"fields": fields | facts})


class _Formatter(logging.Formatter):
    """Lines as text (``name=value``) or as JSON objects; ``time`` is UTC."""

    def __init__(self, kind: LogFormat) -> None:
        super().__init__()
        self._json = kind == "json"

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        level, fields = record.levelname.lower(), getattr(record, "fields", {})
        if self._json:
            return json.dumps({"time": when, "level": level, **fields})
        shown = {name: value for name, value in fields.items() if name not in ("method", "path", "status")}
        pairs = " ".join(f"{name}={value}" for name, value in shown.items())
        return f"transect: {when} {level} {record.getMessage()} {pairs}"


def configure(kind: LogFormat, level: str) -> None:
    """Send the lines of ``level`` and above to standard error; ``off`` sends none."""
    for handler in list(log.handlers):
        log.removeHandler(handler)
    log.propagate = False
    log.setLevel(logging.CRITICAL + 1 if kind == "off" else level.upper())
    if kind != "off":
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(_Formatter(kind))
        log.addHandler(handler)
