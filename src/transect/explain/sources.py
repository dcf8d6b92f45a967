"""Where a decision log comes from: a file, or a server that runs."""

from __future__ import annotations

import httpx

from ..engine.decisions import read_records
from .log import RunLog, build, load

PATIENCE_S = 30.0


class NoLogYet(ValueError):
    """A server does not answer, or has run no step: later it may."""


def open_log(source: str, api_key: str | None = None, engine: int = 0) -> RunLog:
    """The log in a file, or the newest records of one engine of the server at a URL.

    Raises:
        ValueError: it cannot be read, or the server has none.
    """
    if not source.startswith(("http://", "https://")):
        return load(source)
    return _fetched(source, api_key, engine)[0]


def open_logs(source: str, api_key: str | None = None) -> list[RunLog]:
    """The same for every engine of a server.

    Raises:
        ValueError: as ``open_log``. ``NoLogYet``: there may be one later.
    """
    if not source.startswith(("http://", "https://")):
        return [load(source)]
    first, count = _fetched(source, api_key, 0)
    return [first, *(_fetched(source, api_key, engine)[0] for engine in range(1, count))]


def _fetched(source: str, api_key: str | None, engine: int) -> tuple[RunLog, int]:
    """The log of an engine, and how many engines the server has."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    url = f"{source.rstrip('/').removesuffix('/v1')}/v1/decisions"
    try:
        answer = httpx.get(url, params={"engine": engine}, headers=headers, timeout=PATIENCE_S)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise NoLogYet(f"{source} does not answer ({error}): start the server, or give another URL") from None
    if answer.status_code == 503 or (answer.status_code == 404 and "no_decisions" in answer.text):
        raise NoLogYet(f"{source} has no log of decisions: no step has run yet, or it was started without one")
    if answer.status_code != 200:
        raise ValueError(f"{source} gave no decision log ({answer.status_code}): {answer.text[:200]}")
    complete = answer.headers.get("x-decisions-complete") == "true"
    idle = float(answer.headers.get("x-decisions-idle", 0))
    log = build(read_records(answer.content), complete=complete, idle=idle)
    return log, int(answer.headers.get("x-decisions-engines", 1))
