"""Where a decision log comes from: a file, or a server that runs."""

from __future__ import annotations

import httpx

from ..engine.decisions import read_records
from .log import RunLog, build, load

PATIENCE_S = 30.0


def open_log(source: str, api_key: str | None = None) -> RunLog:
    """The log in a file, or the newest records of the server at a URL.

    Raises:
        ValueError: it cannot be read, or the server has none.
    """
    if not source.startswith(("http://", "https://")):
        return load(source)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        answer = httpx.get(f"{source.rstrip('/')}/v1/decisions", headers=headers, timeout=PATIENCE_S)
    except httpx.HTTPError as error:
        raise ValueError(f"{source} does not answer ({error}): start the server, or give another URL") from None
    if answer.status_code != 200:
        raise ValueError(f"{source} gave no decision log ({answer.status_code}): {answer.text[:200]}")
    return build(read_records(answer.content), complete=answer.headers.get("x-decisions-complete") == "true")
