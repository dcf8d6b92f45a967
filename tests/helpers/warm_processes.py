"""Python processes of the package that start in 0.05 s, because torch and the package are imported already.

A test that starts ``python -m transect ...`` spends 1 to 3 seconds of processor time on imports, as does each engine
process. ``install`` lets ``subprocess`` ask a helper process, which has imported both, to clone itself in place of
``fork`` and ``exec``. A clone is a child of the process that asked, with the requested arguments, environment, working
directory, streams and group, and runs the module as ``__main__``. It has a helper of its own for its own children.

A process starts as usual where imports matter: with another interpreter or its options, with another package on the
path, with other values of variables that libraries read while they are imported, if the program looks at
``sys.modules``, within ``cold()``, and always with ``--prove``.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import inspect
import io
import json
import os
import platform
import re
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

MODULES = ("torch", "transect.cli", "transect.cli.serve", "transect.cli.generate", "transect.cli.train",
           "transect.engine.build", "transect.engine.ranks", "transect.engine.frontends.async_engine",
           "transect.engine.frontends.llm", "transect.server.process", "transect.parallel.launch",
           "transect.parallel.rank", "transect.train.loop.trainer")  # fmt: skip
READ_ON_IMPORT = re.compile(r"(PYTHON|TRITON|OMP|MKL|OPENBLAS|TORCH|PYTORCH|ATEN|KINETO|LD_|HF_|XDG_|HOME$)")
"""Variables whose values libraries may have read already."""
READ_LATER = re.compile(r"(PYTHONPATH|PYTHONUNBUFFERED|TORCHINDUCTOR_CACHE_DIR|TORCH_NCCL_)")
"""Exceptions from that. Torch sets the third one when it compiles, and the package the last for its ranks."""
OTHER_HELPER = {"TRITON_INTERPRET"}
"""Variables for whose other values there are other helpers: many tests compile kernels instead of interpreting them."""
ITSELF = re.compile(r"sys\.modules|importtime|faulthandler|tracemalloc|sys\.flags")
"""A program that contains one of these looks at its own process."""
ABOVE = 200
"""Descriptors of a new process are moved above this number, before each gets the number that was asked for."""
PACKAGE = re.compile(r"^\s*(?:import|from) (?:transect|torch)\b", re.MULTILINE)
MOST = 100_000
"""Bytes of a request, well below the limit of a Unix socket."""
CLONE = 0x01000000 | 0x00200000 | 0x00008000 | signal.SIGCHLD
"""Flags of ``clone``: the thread's number is set in the child and cleared at its end, as ``fork`` does, and the new
process is a child of this one's parent."""
SYSCALL_OF_CLONE = 56
_warm = True


class Warm:
    """The asking side: connections to helpers of this process, by the values that their imports have read. A helper
    starts at the first request.

    Args:
        control: the connection to a helper that runs already; then no others are started.
    """

    def __init__(self, control: socket.socket | None = None) -> None:
        self._environment = dict(os.environ)
        self._controls = {} if control is None else {_read_by_imports(self._environment): control}
        self._may_start, self._pid, self._lock = control is None, os.getpid(), threading.Lock()

    def start(self, arguments: list[str], cwd: str, environment: dict[str, str], group: int | None, session: bool,
              descriptors: dict[int, int]) -> int | None:  # fmt: skip
        """Clone a helper, and return the clone's process id; None if a process must be started as usual.

        Args:
            descriptors: descriptors of this process by their numbers in the new one.
        """
        if os.getpid() != self._pid or not _finds_the_same(environment):
            return None
        request = json.dumps([arguments, cwd, environment, os.getpgrp() if group is None else group, session,
                              sorted(os.sched_getaffinity(0)), list(descriptors)]).encode()  # fmt: skip
        read = _read_by_imports(environment)
        with self._lock:
            if len(request) > MOST:
                return None
            if read not in self._controls:
                other = {name for name, _ in read ^ _read_by_imports(self._environment)}
                if not self._may_start or not other <= OTHER_HELPER:
                    return None
                kept = {name: value for name, value in self._environment.items() if name not in OTHER_HELPER}
                self._controls[read] = _helper(kept | dict(read))
            control = self._controls[read]
            with contextlib.suppress(OSError):
                socket.send_fds(control, [request], list(descriptors.values()))
            answer = control.recv(64)
        return int(answer) if answer else None


def _finds_the_same(environment: dict[str, str]) -> bool:
    """Return True if a process with this ``PYTHONPATH`` would import the same files as the helper."""
    added = {Path(each).resolve() for each in _paths(environment)} - {Path(each).resolve() for each in sys.path}
    replaced = ("transect", "torch", "sitecustomize.py", "usercustomize.py")
    return not any((folder / name).exists() for folder in added for name in replaced)


def _read_by_imports(environment: dict[str, str]) -> frozenset[tuple[str, str]]:
    names = {name for name in environment if READ_ON_IMPORT.match(name) and not READ_LATER.match(name)}
    return frozenset((name, environment[name]) for name in names)


def install() -> bool:
    """Let ``subprocess`` start warm processes, where this system can."""
    if sys.platform != "linux" or platform.machine() != "x86_64" or Path("/dev/nvidiactl").exists():
        return False
    if getattr(subprocess.Popen._execute_child, "warm", False) is False:  # type: ignore[attr-defined]
        _replace(Warm())
    return True


@contextlib.contextmanager
def cold() -> Iterator[None]:
    """Start the processes of this block as usual, for tests of a start and an end themselves."""
    global _warm
    _warm = False
    try:
        yield
    finally:
        _warm = True


def _replace(warm: Warm) -> None:
    start_as_usual = subprocess.Popen._execute_child  # type: ignore[attr-defined]
    names = list(inspect.signature(start_as_usual).parameters)

    def execute(*positional: Any) -> None:
        given = dict(zip(names, positional, strict=True))
        popen, pid = given["self"], None
        if _warm and (arguments := _to_run(given)) is not None:
            pairs = ((0, "p2cread"), (1, "c2pwrite"), (2, "errwrite"))
            descriptors = {number: number if given[name] == -1 else given[name] for number, name in pairs}
            descriptors |= {each: each for each in given["pass_fds"]}
            environment = dict(os.environ) if given["env"] is None else {**given["env"]}
            group = None if given["process_group"] == -1 else given["process_group"]
            cwd = os.path.abspath(given["cwd"] or ".")
            pid = warm.start(arguments, cwd, environment, group, given["start_new_session"], descriptors)
        if pid is None:
            start_as_usual(*positional)
            return
        popen.pid, popen._child_created = pid, True
        popen._close_pipe_fds(*(given[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread",
                                                          "errwrite")))  # fmt: skip

    execute.warm = True  # type: ignore[attr-defined]
    subprocess.Popen._execute_child = execute  # type: ignore[attr-defined]


def _to_run(given: dict[str, Any]) -> list[str] | None:
    """Return the arguments after the interpreter if they are a module or program of the package, else None."""
    arguments = given["args"]
    plain = not given["shell"] and given["close_fds"] and given["preexec_fn"] is None and given["executable"] is None
    user = any(given[name] not in (None, -1) for name in ("gid", "gids", "uid", "umask"))
    if not plain or user or isinstance(arguments, str | bytes | os.PathLike):
        return None
    words = [os.fsdecode(each) for each in arguments]
    if len(words) < 2 or words[0] != sys.executable:
        return None
    if words[1] in ("-m", "-c") and len(words) < 3:
        return None
    if words[1] == "-m":
        known = words[2].split(".")[0] in ("transect", "stub_engine")
    else:
        is_file = words[1].endswith(".py") and Path(words[1]).is_file()
        program = words[2] if words[1] == "-c" else Path(words[1]).read_text() if is_file else ""
        known = PACKAGE.search(program) is not None and not ITSELF.search(program)
    return words[1:] if known else None


def _helper(environment: dict[str, str]) -> socket.socket:
    """Start a helper as a child of this process, and return the connection to it."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with there:
        command = [sys.executable, __file__, str(there.fileno())]
        subprocess.Popen(command, env=environment, pass_fds=[there.fileno()], stdin=subprocess.DEVNULL, process_group=0)
    return here


def _paths(environment: dict[str, str]) -> list[str]:
    return [each for each in environment.get("PYTHONPATH", "").split(os.pathsep) if each]


def main(descriptor: int) -> NoReturn:
    """Import everything and serve requests."""
    gc.disable()
    del sys.path[0]
    for name in MODULES:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    _serve(socket.socket(fileno=descriptor))


def _serve(control: socket.socket) -> NoReturn:
    """Clone this process for each request, until the other side hangs up; clones run what was asked for."""
    thread = _place_of_thread()
    while True:
        request, descriptors, _, _ = socket.recv_fds(control, MOST + 1, 64)
        if not request:
            os._exit(0)
        if _clone(thread) == 0:
            _run(_become(control, *json.loads(request), descriptors))
        for each in descriptors:
            os.close(each)


def _place_of_thread() -> int:
    """Find where the C library keeps the number of the only thread; a clone has another one."""
    assert len(os.listdir("/proc/self/task")) == 1, "the imports have started threads"
    ctypes.pythonapi.pthread_self.restype = ctypes.c_size_t
    start = ctypes.pythonapi.pthread_self()
    numbers = (ctypes.c_int32 * 512).from_address(start)
    (place,) = (i for i, number in enumerate(numbers) if number == os.getpid())
    return start + 4 * place


def _clone(thread: int) -> int:
    """Do what ``os.fork`` does, but as a child of this process's parent."""
    api = ctypes.pythonapi
    api.PyOS_BeforeFork()
    pid = api.syscall(*map(ctypes.c_long, (SYSCALL_OF_CLONE, CLONE, 0, 0, thread, 0)))
    (api.PyOS_AfterFork_Parent if pid else api.PyOS_AfterFork_Child)()
    return pid


def _become(control: socket.socket, arguments: list[str], cwd: str, environment: dict[str, str], group: int,
            session: bool, cores: list[int], numbers: list[int], descriptors: list[int]) -> list[str]:  # fmt: skip
    """Take over the surroundings of the process that was asked for, and return its arguments."""
    if session:
        os.setsid()
    else:
        with contextlib.suppress(PermissionError, ProcessLookupError):  # a group that has ended
            os.setpgid(0, group)
    os.sched_setaffinity(0, cores)
    moved = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, ABOVE) for each in (control.detach(), *descriptors)]
    os.closerange(3, ABOVE)
    for number, each in zip(numbers, moved[1:], strict=True):
        os.dup2(each, number)
        os.close(each)
    here, given = _paths(dict(os.environ)), _paths(environment)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    tempfile.tempdir = None
    sys.path[:] = [*given, *(each for each in sys.path if each not in here)]
    sys.orig_argv[:] = [sys.executable, *arguments]
    _open_streams(bool(environment.get("PYTHONUNBUFFERED")))
    os.write(moved[0], str(os.getpid()).encode())
    os.close(moved[0])
    _start_own_helper()
    return arguments


def _open_streams(unbuffered: bool) -> None:
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115
    for name, number in (("stdout", 1), ("stderr", 2)):
        errors = "backslashreplace" if number == 2 else None
        if unbuffered:
            raw = io.FileIO(number, "w", closefd=False)
            made = io.TextIOWrapper(raw, "utf-8", errors, write_through=True)  # type: ignore[type-var]
        else:
            made = open(number, "w", 1 if number == 2 or os.isatty(number) else -1, errors=errors, closefd=False)  # noqa: SIM115
        setattr(sys, name, made)
        setattr(sys, f"__{name}__", made)


def _start_own_helper() -> None:
    """Fork a helper for the children of this process, which has one thread yet."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork():
        there.close()
        _replace(Warm(here))
        return
    here.close()
    os.setpgid(0, 0)
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    os.chdir("/")
    _serve(there)


def _run(arguments: list[str]) -> NoReturn:
    """Run a module or a program as ``python`` does, but end without taking apart what was imported."""
    gc.enable()
    kind, *others = arguments
    code: Any = None
    try:
        if kind == "-m":
            what = others.pop(0)
            sys.modules.pop(what, None)  # imported for others; this one is the main module
            sys.path.insert(0, os.getcwd())
            sys.argv[:] = [what, *others]
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        elif kind == "-c":
            program = others.pop(0)
            sys.path.insert(0, "")
            sys.argv[:] = ["-c", *others]
            sys.modules["__main__"] = module = types.ModuleType("__main__")
            exec(compile(program, "<string>", "exec"), module.__dict__)
        else:
            sys.path.insert(0, os.path.dirname(os.path.abspath(kind)))
            sys.argv[:] = arguments
            runpy.run_path(kind, run_name="__main__")
    except SystemExit as stopped:
        code = stopped.code
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
    except OSError:
        sys.exit(120)
    sys.stderr.flush()
    os._exit((code or 0) & 255)


if __name__ == "__main__":
    main(int(sys.argv[1]))
