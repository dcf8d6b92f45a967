"""Judges that an operator wrote in Python, each in a process of its own with limits on time and memory.

``Verifier`` is the process as its owner sees it. The function is called as ``function(question, answer)``; it returns a
number, a truth value, or None where it has nothing to say. A call that takes too long, needs too much memory, raises or
ends the process leaves the answer without a score; the next call starts the process again. Requests name a verifier and
never bring code.

Run as ``python -m transect.search.programs SOCKET FILE FUNCTION MEMORY``. The process imports nothing of the engine.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import resource
import subprocess
import sys
import threading
import weakref
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

TIME_LIMIT_S = 5.0
MEMORY_LIMIT_BYTES = 1 << 30
"""Most bytes beyond the memory that the process has when it starts."""
START_LIMIT_S = 60.0
"""Seconds that importing the file may take."""
log = logging.getLogger("transect.search")


class Verifier:
    """A function in another process; threads take turns.

    Args:
        place: ``FILE.py:FUNCTION``.
        time_limit_s: seconds that one call may take.
        memory_limit_bytes: most bytes that the function may allocate.

    Raises:
        ValueError: there is no such file, or ``place`` has another form.
    """

    def __init__(
        self, place: str, time_limit_s: float = TIME_LIMIT_S, memory_limit_bytes: int = MEMORY_LIMIT_BYTES
    ) -> None:
        file, _, function = place.rpartition(":")
        if not file.endswith(".py") or not function.isidentifier():
            raise ValueError(f"a verifier is FILE.py:FUNCTION, not {place!r}")
        if not Path(file).is_file():
            raise ValueError(f"the verifier {place} has no file {Path(file).resolve()}")
        self._words = str(Path(file).resolve()), function
        self._place, self._time_limit_s, self._memory_limit_bytes = place, time_limit_s, memory_limit_bytes
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._end: weakref.finalize[..., Verifier] | None = None
        self._turn = threading.Lock()

    @property
    def pid(self) -> int | None:
        """Process id, if there is a process."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process, and wait until it has imported the file.

        Raises:
            ValueError: importing fails or takes too long; the message has the reason.
        """
        with self._turn:
            self._started()

    def __call__(self, question: str, answer: str) -> float | None:
        """Return the function's score; None if it has none, or has failed."""
        with self._turn:
            try:
                connection = self._started()
                connection.send_bytes(json.dumps([question, answer]).encode())
                if not connection.poll(self._time_limit_s):
                    raise EOFError(f"it took more than {self._time_limit_s:g} s")
                reply = json.loads(connection.recv_bytes())
            except (OSError, EOFError, ValueError) as error:
                log.warning("the verifier %s gave no score: %s", self._place, error or "its process ended")
                self.close()
                return None
            if "error" in reply:
                log.warning("the verifier %s gave no score: %s", self._place, reply["error"])
                return None
            score: float | None = reply["score"]
            return score

    def close(self) -> None:
        """End the process."""
        end, self._end = self._end, None
        self._process = self._connection = None
        if end is not None:
            end()

    def _started(self) -> Connection:
        if self._connection is not None:
            return self._connection
        ours, theirs = Pipe()
        words = (str(theirs.fileno()), *self._words, str(self._memory_limit_bytes))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "transect.search.programs", *words],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            process_group=0,  # Ctrl-C in a terminal is the owner's business
        )
        theirs.close()
        self._end = weakref.finalize(self, _end, self._process, ours)
        try:
            reply = json.loads(ours.recv_bytes()) if ours.poll(START_LIMIT_S) else {"error": "its file takes too long"}
        except (OSError, EOFError):
            reply = {"error": "its process ended"}
        if "error" in reply:
            self.close()
            raise ValueError(f"the verifier {self._place} cannot be used: {reply['error']}")
        self._connection = ours
        return ours


def named_places(given: tuple[str, ...], option: str) -> dict[str, str]:
    """Parse ``NAME=PLACE`` texts.

    Raises:
        ValueError: a text has another form, or a name comes twice.
    """
    found: dict[str, str] = {}
    for text in given:
        name, _, place = text.partition("=")
        if not name or not place:
            raise ValueError(f"{option} takes NAME=PLACE, not {text!r}")
        if name in found:
            raise ValueError(f"{option} names {name} twice: give each a name of its own")
        found[name] = place
    return found


def _end(process: subprocess.Popen[bytes], connection: Connection) -> None:
    process.kill()
    process.wait()
    connection.close()


def main() -> None:
    """Run the process: import the file, then answer calls until the owner closes the connection."""
    connection, file, name = Connection(int(sys.argv[1])), sys.argv[2], sys.argv[3]
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with open("/proc/self/statm") as statm:
        size = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + int(sys.argv[4]),) * 2)
    try:
        spec = importlib.util.spec_from_file_location(Path(file).stem, file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        function = getattr(module, name)
    except BaseException as error:  # the file is the operator's: anything may happen in it
        connection.send_bytes(json.dumps({"error": f"{type(error).__name__}: {error}"}).encode())
        return
    connection.send_bytes(b"{}")
    while True:
        try:
            question, answer = json.loads(connection.recv_bytes())
        except EOFError:
            return
        reply: dict[str, float | str | None]
        try:
            score = function(question, answer)
            reply = {"score": None if score is None else float(score)}
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        connection.send_bytes(json.dumps(reply).encode())


if __name__ == "__main__":
    main()
