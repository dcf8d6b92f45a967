"""``transect reload``: put new engines, or a new server process, in the place of those that run."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Annotated, Any

import typer

POLL_S = 0.5


def command(
    url: Annotated[str, typer.Argument(help="Address of a server on this machine.")] = ("http://127.0.0.1:8000"),
    http: Annotated[
        bool, typer.Option("--http", help="Replace the server process itself, on the same socket (SIGUSR2).")
    ] = False,
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait for the replacement; 0: do not wait.")] = 600.0,
) -> int:
    """Replace the engines of a running server without dropping streams. The same as SIGHUP."""
    import httpx

    def health() -> Any:
        try:
            return httpx.get(f"{url.rstrip('/')}/health", timeout=10, trust_env=False).json()
        except (httpx.HTTPError, ValueError) as error:
            raise ValueError(
                f"no server answers at {url} ({error}): give the URL that the server printed when it was ready"
            ) from None

    before = health()
    server = _server(before.get("server_pid"))
    os.kill(server, signal.SIGUSR2 if http else signal.SIGHUP)
    print(f"process {server} starts {'a new server' if http else 'new engines'}; its log reports the progress")
    until = time.monotonic() + wait
    while time.monotonic() < until:
        time.sleep(POLL_S)
        now = health()
        if http and now.get("server_pid") != server:
            print(f"process {now.get('server_pid')} takes new connections")
            return 0
        engines = now.get("engine_pids")
        if not http and engines and not set(engines) & set(before["engine_pids"]):
            print("new engines take all requests")
            return 0
    if wait:
        raise ValueError(f"nothing was replaced within {wait:g} s: see the server's log")
    return 0


def _server(pid: Any) -> int:
    """Return the server's process id if it is a process of this machine.

    Raises:
        ValueError: it is not.
    """
    try:
        if b"serve" in Path(f"/proc/{int(pid)}/cmdline").read_bytes().split(b"\0"):
            return int(pid)
    except (OSError, TypeError, ValueError):
        pass
    raise ValueError(
        "the server is not a process of this machine: run this where the server runs, or send its process the signal"
    )
