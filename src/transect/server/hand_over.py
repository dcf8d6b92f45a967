"""Hand a listening socket from one server process to the next, so that a restart refuses no connection.

Sockets come as systemd passes them (``sd_listen_fds(3)``): descriptors from 3 on, counted by ``LISTEN_FDS``, named by
``LISTEN_FDNAMES``, and meant for the process ``LISTEN_PID``. A socket unit of systemd does that, and so does a server
that starts its own successor: both processes then accept from one queue until the old one stops.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import socket
import sys
from collections.abc import Sequence

from ..hardware.cores import undivided

FIRST_FD = 3
"""The first descriptor that is passed on."""
HIGH_FD = 10
"""Lowest descriptor of the copies, above all descriptors that the new process expects."""
READY = "transect-ready"
"""Name of the pipe on which a successor says that it takes requests."""


class Inherited:
    """The descriptors that were passed to this process; none where the variables are meant for another one.

    The variables are removed, so that no child takes them for its own.
    """

    def __init__(self) -> None:
        found = {name: os.environ.pop(name, "") for name in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")}
        self._ready: int | None = None
        self.sockets: list[int] = []
        """Descriptors of listening sockets."""
        self.held = False
        """True if another process, such as systemd, keeps the sockets open after the end of this one."""
        if found["LISTEN_PID"] != str(os.getpid()) or not found["LISTEN_FDS"].isdecimal():
            return
        names = found["LISTEN_FDNAMES"].split(":")
        for index in range(int(found["LISTEN_FDS"])):
            fd = FIRST_FD + index
            os.set_inheritable(fd, False)
            if names[index : index + 1] == [READY]:
                self._ready = fd
            else:
                self.sockets.append(fd)
        self.held = bool(self.sockets) and self._ready is None

    def listening(self) -> socket.socket | None:
        """Return the socket to listen on; None if none was passed.

        Raises:
            ValueError: there are several, or it is not a stream socket.
        """
        if not self.sockets:
            return None
        if len(self.sockets) > 1:
            raise ValueError(f"{len(self.sockets)} sockets were passed (LISTEN_FDS), and a server listens on one")
        try:
            found = socket.socket(fileno=self.sockets[0])
        except OSError as error:
            raise ValueError(f"descriptor {FIRST_FD} (passed by LISTEN_FDS) is not a socket: {error}") from None
        if found.type != socket.SOCK_STREAM:
            raise ValueError("the socket that was passed (LISTEN_FDS) is not a stream socket: give ListenStream=")
        return found

    def say_ready(self) -> None:
        """Tell the process that started this one, if it waits for that."""
        if self._ready is not None:
            with contextlib.suppress(OSError):  # it has ended meanwhile
                os.write(self._ready, b"1")
            os.close(self._ready)
            self._ready = None


class Successor:
    """A new process with the command line of this one and its listening socket.

    Args:
        sock: listens already.
        command: by default that of this process.
    """

    def __init__(self, sock: socket.socket, command: Sequence[str] | None = None) -> None:
        command = command or [sys.executable, *sys.orig_argv[1:]]
        self._reading, writing = os.pipe()
        copies = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, HIGH_FD) for fd in (sock.fileno(), writing)]
        os.close(writing)
        try:
            with undivided():
                self.pid = os.posix_spawn(
                    "/bin/sh",
                    ["sh", "-c", 'LISTEN_PID=$$; export LISTEN_PID; exec "$@"', "sh", *command],
                    os.environ | {"LISTEN_FDS": str(len(copies)), "LISTEN_FDNAMES": f"http:{READY}"},
                    file_actions=[(os.POSIX_SPAWN_DUP2, fd, FIRST_FD + index) for index, fd in enumerate(copies)],
                )
        finally:
            for fd in copies:
                os.close(fd)

    async def ready(self) -> bool:
        """Wait until it takes requests; False if it ended before. Ends it if this is cancelled."""
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        loop.add_reader(self._reading, readable.set)
        try:
            await readable.wait()
            is_ready = os.read(self._reading, 1) == b"1"
        except asyncio.CancelledError:
            os.kill(self.pid, signal.SIGTERM)
            raise
        finally:
            loop.remove_reader(self._reading)
            os.close(self._reading)
        if not is_ready:
            await asyncio.to_thread(os.waitpid, self.pid, 0)
        return is_ready
