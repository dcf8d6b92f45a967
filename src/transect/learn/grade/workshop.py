"""Starts the children that run programs, and holds the clock: it stands in the grader's process, not in theirs."""

from __future__ import annotations

import contextlib
import inspect
import os
import secrets
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..record import PLACES, Rung
from . import sandbox, wire
from .session import COMPILERS

TIMEOUT_S = 60.0
START_S = 120.0
MOST_PRINTED = 4000


class ProgramFailed(Exception):
    """A program did not do what was asked; the message is for the student."""


@dataclass(slots=True)
class ProgramRun:
    """The outcome of some calls."""

    outputs: list[Any]
    inputs: list[list[Any]]
    """Arguments as they are after the calls, if asked for."""
    seconds: float
    """Seconds of one round of all calls by the grader's clock, the cost of asking taken off."""
    count: int
    shared: bool
    """Results of different calls lie in the same memory."""
    alarms: list[str] = field(default_factory=list)


class Submission:
    """One program in a child of its own."""

    def __init__(self, workshop: Workshop, rung: Rung, path: Path, device: str) -> None:
        self.rung = rung
        self.alarms: list[str] = []
        self.timeout = TIMEOUT_S
        self._workshop = workshop
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115 (it lives as long as the child)
        self._connection, theirs = socket.socketpair()
        self._child = workshop.start(theirs, self._printed.fileno())
        theirs.close()
        drives = {entry: inspect.getsource(function) for entry, function in rung.drives.items()}
        self.ask(
            "load",
            source=path.read_text(),
            file=path.name,
            kind=rung.kind,
            drives=drives,
            device=device,
            allows=list(rung.allows),
            places=[*PLACES, *rung.permits],
            forbids=list(rung.forbids),
        )

    def ask(self, what: str, **arguments: Any) -> dict[str, Any]:
        """Send a message and wait for the answer.

        Raises:
            ProgramFailed: the program raised, ended its process, took too long, or wrote into the grader's connection.
        """
        nonce = secrets.token_hex(8)
        self._connection.settimeout(self.timeout)
        try:
            wire.send(self._connection, {"do": what, "with": arguments, "nonce": nonce})
            reply = wire.receive(self._connection)
        except TimeoutError:
            self.close()
            raise ProgramFailed(f"it did not return within {self.timeout:.0f} s") from None
        except (wire.Ended, OSError):
            raise ProgramFailed(f"it ended its process without returning a result{self.last_words()}") from None
        except ValueError as error:
            raise ProgramFailed(f"it wrote into the grader's connection: {error}") from None
        if not isinstance(reply, dict) or reply.get("nonce") != nonce:
            raise ProgramFailed("it wrote into the grader's connection")
        self.alarms = reply.get("alarms", [])
        if "error" in reply:
            raise ProgramFailed(reply["error"])
        return reply

    def run(
        self,
        calls: Sequence[tuple[str, Sequence[Any]]],
        *,
        count: str = "",
        reuse: bool = False,
        rounds: int = 1,
        warm: bool = False,
        inputs: bool = False,
    ) -> ProgramRun:
        """Make calls, and take their results after the clock has stopped.

        Args:
            rounds: times that all are made; the results are those of the last, and the seconds those of one round.
            warm: make as many before the clock starts: the first launch compiles the kernel, and an idle GPU is slow.
            inputs: return the arguments as they are after the calls.
        """
        self.ask("inputs", calls=[[entry, list(arguments)] for entry, arguments in calls], reuse=reuse)
        if warm:
            self.ask("go", count="", rounds=rounds)
        idle = min(self._timed("", dry=True)[0] for _ in range(3))
        seconds, reply = self._timed(count, rounds=rounds)
        found = self.ask("outputs", inputs=inputs)
        made = ProgramRun(
            found["outputs"], found["inputs"], max((seconds - idle) / rounds, 1e-9), reply["count"], found["shared"]
        )
        made.alarms = self.alarms
        return made

    def _timed(self, count: str, dry: bool = False, rounds: int = 1) -> tuple[float, dict[str, Any]]:
        began = time.perf_counter()
        reply = self.ask("go", count=count, rounds=0 if dry else rounds)
        return time.perf_counter() - began, reply

    def last_words(self) -> str:
        """Return the end of the program's prints."""
        self._printed.seek(0)
        text = self._printed.read()[-MOST_PRINTED:].decode(errors="replace").strip()
        return f"; it printed: {text.splitlines()[-1][:200]}" if text else ""

    def close(self) -> None:
        """End the child."""
        self._connection.close()
        self._workshop.end(self._child)
        self._printed.close()

    def __enter__(self) -> Submission:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()


class Workshop:
    """A process that forks children; keep it for many programs.

    Args:
        device: ``cpu`` (kernels in Triton's interpreter) or ``cuda``.
        interpret: False for a workshop that compiles kernels.
        shut: in a sandbox without network, for programs of strangers.

    Raises:
        ValueError: ``shut``, and this machine has no sandbox, or Triton's interpreter cannot run with this NumPy; the
            message says what to install.
    """

    def __init__(self, device: str = "cpu", *, interpret: bool | None = None, shut: bool = False) -> None:
        self.device = device
        interpret = device == "cpu" if interpret is None else interpret
        if interpret:
            _check_interpreter()
        self._folder = tempfile.TemporaryDirectory()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control = ours
        command = [sys.executable, "-m", "transect.learn.grade.zygote", str(theirs.fileno())]
        if shut:
            command = sandbox.wrapped(command)
        environment = _environment(interpret, "/tmp" if shut else self._folder.name)
        self._process = subprocess.Popen(
            command, env=environment, pass_fds=[theirs.fileno()], cwd="/",
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )  # fmt: skip
        theirs.close()
        ready, _, _ = select.select([ours], [], [], START_S)
        if not ready or ours.recv(64) != b"ready":
            self._process.kill()
            assert self._process.stderr is not None
            words = self._process.stderr.read().decode(errors="replace").strip().splitlines()
            raise ValueError(f"the grader's child did not start{f': {words[-1]}' if words else ''}")

    def start(self, connection: socket.socket, printed: int) -> int:
        """Fork a child over a connection; its process id, in the child's own namespace."""
        socket.send_fds(self._control, [b"run"], [connection.fileno(), printed])
        return int(self._control.recv(64))

    def end(self, child: int) -> None:
        """End a child, if it has not ended."""
        with contextlib.suppress(OSError):
            self._control.send(f"kill {child}".encode())
            self._control.recv(64)

    def open(self, rung: Rung, path: Path, device: str = "") -> Submission:
        """Load a program in a child of its own. Kernels get their inputs on the workshop's device, others on the
        CPU, unless ``device`` says otherwise.

        Raises:
            ProgramFailed: it does not load.
            ValueError: this machine lacks Triton or a C++ compiler, which the rung needs.
        """
        if lacks := lacking(rung):
            raise ValueError(lacks)
        return Submission(self, rung, path, device or (self.device if rung.kind == "triton" else "cpu"))

    def close(self) -> None:
        """End the process."""
        self._control.close()
        self._process.kill()  # it has nothing to save, and Python takes seconds to end
        self._process.wait()
        if self._process.stderr is not None:
            self._process.stderr.close()
        self._folder.cleanup()

    def __enter__(self) -> Workshop:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()


@contextlib.contextmanager
def workshop(given: Workshop | None, **options: Any) -> Iterator[Workshop]:
    """Give the workshop that is there, else a new one for the length of the block."""
    if given is not None:
        yield given
        return
    with Workshop(**options) as made:
        yield made


def lacking(rung: Rung) -> str:
    """Say what a rung needs and this machine does not have; empty if nothing."""
    if rung.kind == "triton" and find_spec("triton") is None:
        return f"the kernels of {rung.name} need Triton: pip install '.[learn]' in the checkout, or pip install triton"
    if rung.kind == "cpp" and not any(map(shutil.which, COMPILERS)):
        return f"{rung.name} needs a C++ compiler ({', '.join(COMPILERS)}): install g++, for example by apt-get"
    return ""


def _check_interpreter() -> None:
    """Refuse versions of Triton and NumPy whose interpreted kernels fail, which would look like a student's mistake."""
    try:
        triton = version("triton")
    except PackageNotFoundError:
        return
    older = tuple(map(int, triton.split(".")[:2])) < (3, 7)
    if older and tuple(map(int, version("numpy").split(".")[:2])) > (2, 3):
        raise ValueError(
            f"the interpreter of triton {triton} fails with numpy {version('numpy')}: install numpy<2.4, or triton 3.7"
        )


def _environment(interpret: bool, temporary: str) -> Mapping[str, str]:
    """Build the environment of children: paths, and no secrets that the shell may hold."""
    kept = ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "CUDA_HOME", "TRITON_CACHE_DIR")
    found = {name: os.environ[name] for name in kept if name in os.environ}
    sources = os.pathsep.join([str(Path(__file__).resolve().parents[3]), os.environ.get("PYTHONPATH", "")])
    found |= {"PYTHONPATH": sources.rstrip(os.pathsep), "OMP_NUM_THREADS": "1", "TMPDIR": temporary}
    found |= {"TRITON_INTERPRET": "1"} if interpret else {}
    return found
