"""Sources of decision logs: a file, or a running server."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx

from ...engine.scheduling.decisions import read_records
from .log import DecisionRunLog, build, load

PATIENCE_S = 30.0


class NoLogYet(ValueError):
    """A server has run no step, or keeps no log."""


class NoServer(NoLogYet):
    """No server answers at an address."""


def server_url(source: str) -> str | None:
    """Return the URL of ``source``, with ``http://`` added to a HOST:PORT; None if it is a file."""
    if source.startswith(("http://", "https://")):
        return source
    return f"http://{source}" if re.fullmatch(r"[\w.-]+:\d{1,5}/?", source) and not Path(source).exists() else None


def open_log(source: str, api_key: str | None = None, engine: int = 0) -> DecisionRunLog:
    """Return the log in a file, or the newest records of one engine of the server at a URL.

    Raises:
        ValueError: it cannot be read, or the server has none.
    """
    url = server_url(source)
    return load(source) if url is None else _fetched(url, api_key, engine)[0]


def open_logs(source: str, api_key: str | None = None) -> list[DecisionRunLog]:
    """Open the logs of all engines of a server, or the one log in a file.

    Raises:
        ValueError: as ``open_log``. ``NoLogYet``: there may be one later.
    """
    url = server_url(source)
    if url is None:
        return [load(source)]
    first, count = _fetched(url, api_key, 0)
    return [first, *(_fetched(url, api_key, engine)[0] for engine in range(1, count))]


def _fetched(source: str, api_key: str | None, engine: int) -> tuple[DecisionRunLog, int]:
    """Return the log of an engine, and the number of engines of the server."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    url = f"{source.rstrip('/').removesuffix('/v1')}/v1/decisions"
    try:
        answer = httpx.get(url, params={"engine": engine}, headers=headers, timeout=PATIENCE_S)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        reason = re.sub(r"^\[Errno -?\d+\] ", "", str(error)).rstrip(".").lower() or type(error).__name__
        raise NoServer(
            f"no server answers at {source} ({reason}): start one with `transect serve`, or give the URL of one that "
            "runs"
        ) from None
    if answer.status_code in (401, 403):
        given = f"{source} refuses this key" if api_key else f"{source} asks for a key"
        raise ValueError(f"{given} ({_message(answer)}): give --api-key KEY, or set TRANSECT_API_KEY")
    if answer.status_code == 503 or (answer.status_code == 404 and "no_decisions" in answer.text):
        raise NoLogYet(f"{source} has no log of decisions: no step has run yet, or it was started without one")
    if answer.status_code != 200:
        raise ValueError(f"{source} gave no decision log ({answer.status_code}): {_message(answer)}")
    complete = answer.headers.get("x-decisions-complete") == "true"
    idle = float(answer.headers.get("x-decisions-idle", 0))
    log = build(read_records(answer.content), complete=complete, idle=idle)
    log.name = answer.headers.get("x-decisions-engine", "")
    return log, int(answer.headers.get("x-decisions-engines", 1))


def _message(answer: httpx.Response) -> str:
    """Return the message of an error in OpenAI's shape, or the beginning of any other body."""
    try:
        return str(answer.json()["error"]["message"])
    except (json.JSONDecodeError, KeyError, TypeError):
        return answer.text[:200]
