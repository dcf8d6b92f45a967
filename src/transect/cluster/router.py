"""A fleet's router and its replicas as plain processes: for Kubernetes, systemd and shells. On Ray, ``ray_app.py`` does
the same inside of actors."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from ..server.operations.request_log import configure
from ..server.process import bind, bind_unix, serve, url_of
from .fleet import RemoteReplicas
from .host import Find, Host
from .settings import FleetSettings

ENDED, GIVEN_UP = 0, 1
"""Exit codes of a replica: it was asked to end; its engine could not be started again."""
CHECK_S = 0.5
"""Seconds between two looks at the state of a replica."""


def run_router(settings: FleetSettings) -> int:
    """Serve until SIGTERM; exit codes are those of ``transect serve``.

    Raises:
        ValueError: the settings are at fault.
        EngineDeadError: no replica came.
    """
    options = settings.server
    configure(options.request_log, options.log_level)
    sock = bind(options.host, options.port) if options.uds is None else bind_unix(options.uds)
    linking = bind_links(settings)
    print(f"transect: fleet {settings.name}: waits for replicas on {address(linking)}", file=sys.stderr, flush=True)

    def ready(fleet: Any) -> None:
        print(ready_line(settings, fleet, sock), flush=True)

    return asyncio.run(serve(lambda: RemoteReplicas.open(settings, linking), options, sock, ready=ready))


def bind_links(settings: FleetSettings) -> socket.socket:
    """Bind the socket for replicas.

    Raises:
        ValueError: the address cannot be had.
    """
    try:
        return bind(settings.links.host, settings.links.port)
    except ValueError as error:
        text = str(error).replace("--port", "links.port").replace("--host", "links.host")
        raise ValueError(f"replicas cannot dial in: {text}") from None


def address(sock: socket.socket) -> str:
    """Return ``HOST:PORT`` of a bound socket."""
    host, port = sock.getsockname()[:2]
    return f"{host}:{port}"


def ready_line(settings: FleetSettings, fleet: RemoteReplicas, sock: socket.socket) -> str:
    """Return the line that says that the fleet takes requests."""
    info = fleet.info
    scheme = "http" if settings.server.ssl_certfile is None else "https"
    said = (
        f"transect: ready on {url_of(sock, scheme)}",
        f"fleet {settings.name}",
        f"model {settings.server.model_names[0]}",
        f"context {info.max_model_len} tokens",
        f"KV cache {info.kv_tokens} tokens a replica",
        info.kernels,
    )
    return " | ".join(filter(None, said))


def run_replica(
    settings: FleetSettings, name: str | None = None, generation: int = 0, ready_file: Path | None = None
) -> int:
    """Run one replica until SIGTERM, which lets its streams finish. Returns the exit code.

    Args:
        name: unique in the fleet; default: host name and process id.
        ready_file: a file that exists while the router has the replica, for probes.

    Raises:
        ValueError: the settings or the model are at fault.
        EngineDeadError: the engine could not start.
    """
    return asyncio.run(_replica(settings, name or f"{socket.gethostname()}-{os.getpid()}", generation, ready_file))


async def _replica(settings: FleetSettings, name: str, generation: int, ready_file: Path | None) -> int:
    loop = asyncio.get_running_loop()
    ending = asyncio.Event()
    for each in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(each, ending.set)
    starting = asyncio.ensure_future(Host.start(settings, name, fixed(settings), generation))
    asked = asyncio.create_task(ending.wait())
    await asyncio.wait((starting, asked), return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        return ENDED
    host = starting.result()
    print(f"transect: replica {name} is ready | {host._engines[0].info.kernels}", flush=True)
    while not ending.is_set() and host.failure is None:
        if ready_file is not None:
            ready_file.touch() if host.linked else ready_file.unlink(missing_ok=True)
        await asyncio.wait((asked,), timeout=CHECK_S)
    if ready_file is not None:
        ready_file.unlink(missing_ok=True)
    failed = host.failure
    await host.retire(0.0 if failed else None)
    asked.cancel()
    return GIVEN_UP if failed else ENDED


def fixed(settings: FleetSettings) -> Find:
    """Return a function that finds the router at the address in the settings."""
    own = settings.links

    async def find() -> tuple[str, int]:
        return own.address or own.host, own.port

    return find
