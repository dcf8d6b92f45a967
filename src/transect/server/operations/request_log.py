"""One log line for each request: method and path, status, duration and token counts.

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
from urllib.parse import quote

if TYPE_CHECKING:
    from ...engine.scheduling.outputs import RequestTimes

log = logging.getLogger("transect.requests")

LogFormat = Literal["off", "text", "json"]
IN_PATHS = "/:@!$&'()*+,;=~"
"""Characters, beside letters, digits and ``_.-``, that a path may hold as they are (RFC 3986)."""
GONE = 499
"""Status of a request whose client disconnected before an answer began."""

_record: ContextVar[dict[str, Any] | None] = ContextVar("transect_request", default=None)


def begin() -> dict[str, Any]:
    """Start the record of the request of this task and of the tasks that it starts; ``note`` adds to the record."""
    facts: dict[str, Any] = {}
    _record.set(facts)
    return facts


def note(**facts: Any) -> None:
    """Add facts to the record of the request that is being handled, if any."""
    record = _record.get()
    if record is not None:
        record.update(facts)


def engine_seconds(times: RequestTimes | None) -> dict[str, float]:
    """Return the phases of a request's life in the engine, in seconds: ``queue``, ``prefill`` (to its first token) and
    ``decode``. Empty if the request did not reach all of them."""
    if times is None or times.first_scheduled is None or times.first_token is None or times.finished is None:
        return {}
    marks = (times.arrival, times.first_scheduled, times.first_token, times.finished)
    names = ("queue_seconds", "prefill_seconds", "decode_seconds")
    return {name: round(b - a, 6) for name, a, b in zip(names, marks, marks[1:], strict=False)}


def server_timing(facts: dict[str, Any]) -> bytes | None:
    """Write the value of a ``Server-Timing`` header (W3C), in milliseconds; None before a request has ended."""
    if "queue_seconds" not in facts:
        return None
    parts = (f"{name};dur={1e3 * facts[f'{name}_seconds']:.3f}" for name in ("queue", "prefill", "decode"))
    return ", ".join(parts).encode()


def end(method: str, path: str, status: int, seconds: float, request_id: str, facts: dict[str, Any]) -> None:
    """Write the request's line. The path is percent-encoded, because a client could otherwise forge lines and fields of
    the log, or send commands to a terminal."""
    path = quote(path, safe=IN_PATHS)
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
        """Write the line of a record."""
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
