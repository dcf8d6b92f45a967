"""``transect reload``: new engines in a running server, with its settings and weights as they are now."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Annotated, Any

import typer

POLL_S = 0.5


def command(
    url: Annotated[str, typer.Argument(help="Where the server listens; it has to run on this machine.")] = (
        "http://127.0.0.1:8000"
    ),
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait for the new engine; 0: only ask.")] = 600.0,
) -> int:
    """Start new engines in a running server and let the old ones finish their streams. The same as SIGHUP."""
    import httpx

    def health() -> Any:
        try:
            return httpx.get(f"{url.rstrip('/')}/health", timeout=10, trust_env=False).json()
        except (httpx.HTTPError, ValueError) as error:
            raise ValueError(
                f"no server answers at {url} ({error}): give the URL that the server printed when it was ready"
            ) from None

    before = health().get("engine_pid")
    server = _parent(before)
    os.kill(server, signal.SIGHUP)
    print(f"process {server} starts new engines; its log reports the progress")
    until = time.monotonic() + wait
    while time.monotonic() < until:
        time.sleep(POLL_S)
        if health().get("engine_pid") != before:
            print("the first new engine takes requests")
            return 0
    if wait:
        raise ValueError(f"no new engine replaced an old one within {wait:g} s: see the server's log")
    return 0


def _parent(pid: Any) -> int:
    """Return the process that started an engine.

    Raises:
        ValueError: there is no such engine here.
    """
    try:
        parent = int(Path(f"/proc/{int(pid)}/stat").read_text().rpartition(")")[2].split()[1])
        if b"serve" in Path(f"/proc/{parent}/cmdline").read_bytes().split(b"\0"):
            return parent
    except (OSError, TypeError, ValueError, IndexError):
        pass
    raise ValueError(
        "the server's engine is not a process of this machine: run this where the server runs, or send its process "
        "SIGHUP"
    )
