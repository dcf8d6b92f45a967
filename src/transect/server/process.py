"""The life of a server process: bind, serve, drain on SIGTERM, end with the engine.

SIGHUP replaces the engines where the caller can do that, and ends the server in good order elsewhere. SIGUSR2 starts a
new server process on the same socket; this one accepts no more connections then, and ends after its last answer.

Exit codes: 0 after SIGTERM, SIGHUP or SIGUSR2, 130 after Ctrl-C, 1 when the engine died and a supervisor should start
the server again.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import os
import signal
import socket
import stat
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import uvicorn

from ..engine.frontends.collector import keep_from_collector
from ..text.chat_template import ChatTemplate
from .app import create_app
from .hand_over import Successor
from .http.clients import addresses_of
from .http.connections import Connection, Limits, log_shortages_rarely, most_connections, refuse_half_sent
from .http.gate import DRAINING
from .options import ServerOptions
from .rendering import RenderApart
from .serving import Engine, Serving

log = logging.getLogger("transect.server")

HEALTH_CHECK_S = 0.5
"""Seconds between checks that the engine process is alive."""
SETTLE_S = 5.0
"""Seconds for the last answers to be sent after the engine has ended."""
BACKLOG = 2048
"""Connections that wait to be accepted."""
ACCEPTED_AT_ONCE = 4
"""Connections that are accepted in one pass of the event loop."""
SILENT_S = 1.0
"""Seconds that a new connection gets for its first byte when the server ends and another one follows."""
PASSES = 3
"""Passes of the event loop between the acceptance of a connection and its entry in the server's list."""
RED_S = 1.0
"""Seconds for which /health reports 503 after the engine's death, so that a probe can see it."""
SWITCH_S = 1e-3
"""Seconds after which a thread that reads a large body yields to the event loop. Python's default is 5 ms, for which
streams of others would wait in every pass of the loop."""

DRAINED, ENGINE_DIED, INTERRUPTED = 0, 1, 130


def bind(host: str, port: int) -> socket.socket:
    """Bind a socket that does not listen yet: connections are refused while the model loads, not left waiting.

    Args:
        host: name or address of a local interface.
        port: 0 for any free one.

    Raises:
        ValueError: the address cannot be had; the message says what to change.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ValueError(f"--host {host!r} is not an address of this machine ({error.strerror or error})") from None
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise _bind_error(host, port, error) from None
    return sock


def _bind_error(host: str, port: int, error: OSError) -> ValueError:
    if error.errno == errno.EADDRINUSE:
        return ValueError(f"port {port} on {host} is in use: choose another with --port, or --port 0 for any free one")
    if error.errno == errno.EACCES:
        return ValueError(f"port {port} needs more rights than this user has: choose one from 1024 on with --port")
    return ValueError(f"cannot listen on {host} port {port} ({error.strerror}): choose another --host or --port")


def bind_unix(path: str) -> socket.socket:
    """Bind a Unix socket that does not listen yet and that only this user may use. A socket left by a killed server is
    replaced; the caller removes the new one in the end.

    Raises:
        ValueError: the path is taken by something else, or cannot be had.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if abandoned(path):
            os.unlink(path)
        mask = os.umask(0o177)
        try:
            sock.bind(path)
        finally:
            os.umask(mask)
    except OSError as error:
        sock.close()
        raise ValueError(f"--uds {path!r} cannot be bound ({error.strerror or error}): choose another path") from None
    return sock


def abandoned(path: str) -> bool:
    """Return True if ``path`` is a socket without a listener."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return False
    except FileNotFoundError:
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(path) == errno.ECONNREFUSED


def url_of(sock: socket.socket, scheme: str = "http") -> str:
    """Return the URL by which a client on this machine reaches the socket; ``unix:PATH`` for a Unix socket."""
    if sock.family == socket.AF_UNIX:
        return f"unix:{sock.getsockname()}"
    host, port = sock.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


class _Uvicorn(uvicorn.Server):
    """uvicorn without its signal handlers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the handlers as they are."""
        yield


class _Signals:
    """SIGTERM, SIGHUP and Ctrl-C as awaitable events. A second signal of these ends the server immediately.

    SIGHUP, which a closed terminal sends, is left alone where it is ignored, as ``nohup`` wants it.

    Args:
        reloads: SIGHUP does not end the server; it sets ``reload``.
    """

    def __init__(self, reloads: bool = False) -> None:
        self._reloads = reloads
        self.reload = asyncio.Event()
        self.restart = asyncio.Event()
        hangs_up = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
        self._kinds = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2, *([signal.SIGHUP] if hangs_up else []))
        self.first: asyncio.Future[signal.Signals] = asyncio.get_running_loop().create_future()
        self.again = asyncio.Event()

    def __enter__(self) -> _Signals:
        loop = asyncio.get_running_loop()
        for each in self._kinds:
            loop.add_signal_handler(each, self._caught, each)
        return self

    def _caught(self, which: signal.Signals) -> None:
        if which == signal.SIGHUP and self._reloads:
            self.reload.set()
        elif which == signal.SIGUSR2:
            self.restart.set()
        elif self.first.done():
            self.again.set()
        else:
            self.first.set_result(which)

    def __exit__(self, *exception: object) -> None:
        loop = asyncio.get_running_loop()
        for each in self._kinds:
            loop.remove_signal_handler(each)


async def serve(
    start_engine: Callable[[], Any],
    options: ServerOptions,
    sock: socket.socket,
    *,
    ready: Callable[[Any], None],
    reload: Callable[[Any], Awaitable[None]] | None = None,
    restart: Callable[[], Successor] | None = None,
    held: bool = False,
) -> int:
    """Start the engine, serve until a signal, the engine's death or a successor, and clean up.

    Args:
        start_engine: returns an awaitable that gives the running engine.
        options: names, keys, limits, and the seconds that running requests get after SIGTERM.
        sock: from ``bind``.
        ready: called once with the engine, when requests are accepted.
        reload: replaces the engine's processes, on SIGHUP; None if SIGHUP ends the server.
        restart: starts another server on the socket, on SIGUSR2; None if SIGUSR2 does nothing.
        held: another process keeps the socket open: from a signal on, connections wait there for the next server.

    Returns:
        The process's exit code.
    """
    with _Signals(reload is not None) as signals:
        starting = asyncio.ensure_future(start_engine())
        await asyncio.wait((starting, signals.first), return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            return _code(signals)
        engine = starting.result()
        reloading = None if reload is None else asyncio.create_task(_reload(engine, signals, reload))
        succession = asyncio.create_task(_succession(signals, restart))
        try:
            return await _serve(engine, options, sock, signals, ready, succession, held)
        finally:
            if reloading is not None:
                reloading.cancel()
            succession.cancel()
            await asyncio.gather(succession, return_exceptions=True)
            await engine.shutdown()


async def serve_until(
    stop: asyncio.Event, engine: Any, options: ServerOptions, sock: socket.socket, ready: Callable[[Any], None]
) -> int:
    """Serve like ``serve`` inside a process with signal handlers of its own: ``stop`` has the effect of SIGTERM. The
    caller owns the engine. Returns the exit code."""
    signals = _Signals()

    async def ask() -> None:
        await stop.wait()
        signals.first.set_result(signal.SIGTERM)

    asking = asyncio.create_task(ask())
    never = asyncio.create_task(_succession(signals, None))
    try:
        return await _serve(engine, options, sock, signals, ready, never)
    finally:
        asking.cancel()
        never.cancel()
        await asyncio.gather(asking, never, return_exceptions=True)


async def _reload(engine: Any, signals: _Signals, reload: Callable[[Any], Awaitable[None]]) -> None:
    """Replace the engine's processes at each SIGHUP; a signal that arrives during a reload starts another one."""
    while True:
        await signals.reload.wait()
        signals.reload.clear()
        log.warning("transect: reload: new engines are started, and old ones finish their streams")
        try:
            await reload(engine)
        except Exception as error:  # of the settings, or of an engine that does not start: the server continues
            log.error("transect: error: reload failed, and the engines stay: %s", error)
        else:
            log.warning("transect: reload: new engines take all requests")


async def _succession(signals: _Signals, restart: Callable[[], Successor] | None) -> None:
    """Wait until another server process has taken over the socket."""
    while True:
        await signals.restart.wait()
        if restart is None or os.getpid() == 1:
            log.error("transect: error: no restart: this is process 1 of a container, which ends with it, or one rank")
        else:
            log.warning("transect: restart: a new server process is started on the same socket")
            try:
                successor = restart()
                if await successor.ready():
                    log.warning("transect: restart: process %d takes all connections", successor.pid)
                    return
                why = "the new one ended before it was ready"
            except OSError as error:
                why = str(error)
            log.error("transect: error: restart failed, and this process stays: %s", why)
        signals.restart.clear()


def _code(signals: _Signals) -> int:
    return INTERRUPTED if signals.first.result() == signal.SIGINT else DRAINED


async def _serve(
    engine: Any,
    options: ServerOptions,
    sock: socket.socket,
    signals: _Signals,
    ready: Callable[[Any], None],
    succession: asyncio.Task[None],
    held: bool = False,
) -> int:
    sys.setswitchinterval(SWITCH_S)
    renderer = RenderApart()
    app = create_app(engine, options, renderer)
    serving: Serving = app.state.serving
    await serving.adapters.start()
    await serving.search.start()
    limits = Limits(most_connections(options.max_connections), options.receive_timeout_s)
    config = uvicorn.Config(
        app,
        http=functools.partial(Connection, limits),  # type: ignore[arg-type]
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=bool(options.trusted_proxies),
        forwarded_allow_ips=addresses_of(options.trusted_proxies),
        timeout_keep_alive=options.keep_alive_s,
        timeout_graceful_shutdown=int(SETTLE_S),
        backlog=ACCEPTED_AT_ONCE,
        ssl_certfile=options.ssl_certfile,
        ssl_keyfile=options.ssl_keyfile,
    )
    try:
        sock.listen(BACKLOG)
    except OSError as error:
        host, port = sock.getsockname()[:2]
        raise _bind_error(host, port, error) from None
    asyncio.get_running_loop().set_exception_handler(log_shortages_rarely())
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # clients' mistakes are answered, not logged
    server = _Uvicorn(config)
    running = asyncio.create_task(server.serve(sockets=[sock]))
    death = asyncio.create_task(_death(engine))
    tls = options.ssl_certfile is not None
    try:
        while not server.started:
            await asyncio.sleep(0.005)
            if running.done():
                running.result()
        sock.listen(BACKLOG)  # uvicorn has lowered it
        if isinstance(engine.chat_template, ChatTemplate):
            renderer.start(engine.chat_template)
        keep_from_collector()
        ready(engine)
        await asyncio.wait((running, death, signals.first, succession), return_when=asyncio.FIRST_COMPLETED)
        if death.done():
            code = ENGINE_DIED
            log.error("transect: error: the engine has stopped (%s): start the server again", death.result())
            server.force_exit = not await _settle(serving, SETTLE_S)
            await asyncio.sleep(RED_S)
        elif succession.done() and not signals.first.done():
            code = DRAINED
            await _leave_socket(server, serving)
            open_ones = _until_none(server.server_state.connections, tls)
            await _drain(serving, engine, signals, death, options.drain_timeout_s, open_ones)
            server.force_exit = True
        elif held and (code := _code(signals)) == DRAINED:
            await _leave_socket(server, serving)
            open_ones = _until_none(server.server_state.connections, tls, closing=True)
            server.force_exit = not await _drain(serving, engine, signals, death, options.grace_s, open_ones)
        else:
            code = _code(signals)
            serving.draining = True
            refuse_half_sent(server.server_state.connections, DRAINING)
            settled = await _drain(serving, engine, signals, death, options.grace_s if code == DRAINED else 0.0)
            server.force_exit = not settled  # clients that have not read their answers by now are not waited for
        return code
    finally:
        death.cancel()
        renderer.close()
        serving.search.close()
        server.should_exit = True
        await asyncio.gather(running, death, return_exceptions=True)
        for writer in (serving.tracing, serving.captures):
            if writer is not None:
                await asyncio.to_thread(writer.close)


async def _death(engine: Engine) -> str | None:
    """Wait for the end of the engine process, and return the known cause."""
    while (health := await engine.health()).state != "dead":
        await asyncio.sleep(HEALTH_CHECK_S)
    return health.detail


async def _leave_socket(server: uvicorn.Server, serving: Serving) -> None:
    """Accept no more connections, in this process alone, and close each connection after its answer.

    asyncio accepts a connection in one pass of its loop, attaches it to its server in the next one, and tells the
    protocol in the third. A server that is closed in between drops the connection without a message. So leave the
    accepted connections these passes before closing.
    """
    loop = asyncio.get_running_loop()
    for each in server.servers:
        for sock in each.sockets:
            loop.remove_reader(sock.fileno())
    for _ in range(PASSES):
        await asyncio.sleep(0)
    for each in server.servers:
        each.close()
    serving.handed_over = True


async def _until_none(connections: set[Any], tls: bool, closing: bool = False) -> None:
    """Wait until there are no connections: those of idle clients are closed after ``keep_alive_s``, or with ``closing``
    at once, and those without a request after ``SILENT_S``. That is also the least wait with ``tls``, since connections
    are unknown during their handshakes."""
    began = time.monotonic()
    while connections or (tls and time.monotonic() - began < SILENT_S):
        for each in list(connections) if closing else ():
            if each.idle or (each.silent and time.monotonic() - began > SILENT_S):
                each.shutdown()
        await asyncio.sleep(0.05)


async def _drain(
    serving: Serving,
    engine: Any,
    signals: _Signals,
    death: asyncio.Task[str | None],
    grace_s: float,
    done: Awaitable[object] | None = None,
) -> bool:
    """Let running requests finish; after the grace period, or at a second signal, the rest get one clean error.
    ``done`` ends the wait instead of the last request's end. Returns True if all have ended."""
    waiting = [asyncio.ensure_future(each) for each in (done or serving.idle.wait(), signals.again.wait())]
    await asyncio.wait((*waiting, death), timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
    for each in waiting:
        each.cancel()
    if serving.in_flight:
        await engine.shutdown()
    return await _settle(serving, SETTLE_S)


async def _settle(serving: Serving, limit_s: float) -> bool:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            await serving.idle.wait()
    return not serving.in_flight
