"""Runs a Python script, or a module like ``python -m``, inside of this process, and reports how it ended.

What a script changes for the whole process (arguments, import path, folder, standard streams) is changed back, so that
a report lands where it was asked for, and the script can run again.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import runpy
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

OURS = (__file__, runpy.__file__, "<frozen runpy>")
"""Files whose frames a traceback shows above the script's own frames."""


@dataclass(frozen=True, slots=True)
class ScriptEnding:
    """End of a script. ``failed``: reason in one line, empty after success. ``error``: the exception raised.
    ``interrupted``: True after Ctrl-C."""

    failed: str = ""
    error: Exception | None = None
    interrupted: bool = False
    status: int = 0
    """The exit status that ``python`` would end with."""


class ScriptFailed(ValueError):
    """A script ended with an error. ``found``: the explanation of what ran until then."""

    def __init__(self, message: str, found: Any = None) -> None:
        super().__init__(message)
        self.found = found


class Input:
    """A standard input that each run of a script reads from its beginning. It is only read on demand: an input may stay
    open for ever, and most scripts never read theirs."""

    def __init__(self, source: io.BufferedIOBase) -> None:
        self.source, self.kept = source, bytearray()

    def again(self) -> io.TextIOWrapper:
        """Return the whole input as text: the part that earlier runs have read, then the rest."""
        return io.TextIOWrapper(io.BufferedReader(_Again(self)), encoding="utf-8", errors="surrogateescape")


class _Again(io.RawIOBase):
    def __init__(self, of: Input) -> None:
        self._of, self._at = of, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        kept = self._of.kept
        if self._at == len(kept):
            kept += self._of.source.read1(len(buffer))
        part = kept[self._at : self._at + len(buffer)]
        buffer[: len(part)] = part
        self._at += len(part)
        return len(part)


@dataclass(frozen=True, slots=True)
class Script:
    """A script to run.

    Args:
        path: the file; or the name of a module, where ``module`` is set.
        arguments: the script's own arguments.
        stdin: its standard input; None for that of this process.
        seconds: time after which it is interrupted, as by Ctrl-C; 0 for never.
    """

    path: str | Path
    arguments: tuple[str, ...] = ()
    module: bool = False
    stdin: Input | None = None
    seconds: float = 0.0

    @property
    def name(self) -> str:
        """Name of the script in reports."""
        return str(self.path)

    def check(self) -> None:
        """Check that the script exists.

        Raises:
            ValueError: there is none.
        """
        if not self.module:
            if not Path(self.path).is_file():
                raise ValueError(f"there is no script {self.path}: give a Python file, or -m and a module")
            return
        with _as_it_was():
            sys.path.insert(0, os.getcwd())
            try:
                known = importlib.util.find_spec(self.name) is not None
            except (ImportError, ValueError):
                known = False
        if not known:
            raise ValueError(f"there is no module {self.path}: give one that `python -m` finds here")

    def run(self, *, show: bool = True) -> ScriptEnding:
        """Run the script as ``python`` would, its threads to their ends; a child that it forked ends with the script.

        Args:
            show: print the traceback of an error, as ``python`` does.
        """
        process, threads = os.getpid(), set(threading.enumerate())
        with _as_it_was():
            if self.stdin is not None:
                sys.stdin = self.stdin.again()
            try:
                with _alarm(self.seconds):
                    ending = self._run(show)
                    for thread in threading.enumerate():
                        if thread not in threads and not thread.daemon:
                            thread.join()  # as the interpreter does at its end
            except KeyboardInterrupt:
                ending = ScriptEnding(interrupted=True, status=130)
            if os.getpid() != process:
                with contextlib.suppress(OSError, ValueError):
                    sys.stdout.flush()
                os._exit(ending.status & 0xFF)
        return ending

    def _run(self, show: bool) -> ScriptEnding:
        sys.argv = [self.name, *self.arguments]
        try:
            if self.module:
                sys.path.insert(0, os.getcwd())
                runpy.run_module(self.name, run_name="__main__", alter_sys=True)
            else:
                sys.path.insert(0, str(Path(self.path).resolve().parent))
                runpy.run_path(self.name, run_name="__main__")
        except SystemExit as stopped:
            code = stopped.code
            if code in (None, 0):
                return ScriptEnding()
            status = isinstance(code, int)
            if show and not status:
                print(code, file=sys.stderr)
            said = f"{self.name} ended with {'exit status ' if status else ''}{code}"
            return ScriptEnding(said, status=int(code) if status else 1)
        except Exception as error:
            if show:
                traceback.print_exception(type(error), error, _own(error.__traceback__))
            place = f" ({found})" if (found := _place(error)) else ""
            return ScriptEnding(f"{self.name} failed with {type(error).__name__}: {error}{place}", error, status=1)
        return ScriptEnding()


@contextlib.contextmanager
def _as_it_was() -> Iterator[None]:
    """Restore the process-wide state that scripts change."""
    argv, path, folder = sys.argv, list(sys.path), os.getcwd()
    streams = sys.stdin, sys.stdout, sys.stderr
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path
        sys.stdin, sys.stdout, sys.stderr = streams
        os.chdir(folder)


@contextlib.contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """Raise KeyboardInterrupt inside the block after ``seconds``; 0 for never."""
    if not seconds:
        yield
        return
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _own(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback from the script's first frame on."""
    while trace is not None and trace.tb_frame.f_code.co_filename in OURS:
        trace = trace.tb_next
    return trace


def _place(error: BaseException) -> str:
    """Return the innermost line of an error, as ``file:line``."""
    frames = traceback.extract_tb(_own(error.__traceback__))
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
