"""The child's side of grading: loads one program, calls it as the grader asks, and hands out what it returned.

A run has three messages, so that the grader's clock covers the calls and nothing else: the inputs come first, then "go"
is answered when all calls have returned, and the outputs are asked for after the clock has stopped.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .counting import Count, counting
from .watch import Watch
from .wire import Ended, receive, send

COMPILERS = ("g++", "c++", "clang++")
PLAIN = (int, float, bool, str, bytes, type(None))


class NotCompiled(Exception):
    """A C++ program is refused by its compiler."""


class Session:
    """One program in this process."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.device = "cpu"
        self.watch: Watch | None = None
        self.module: Any = None
        self.drives: dict[str, Callable[..., Any]] = {}
        self.inputs: list[tuple[str, list[Any]]] = []
        self.outputs: list[Any] = []
        self.path = ""

    def serve(self) -> None:
        """Answer messages until the grader hangs up."""
        replies: dict[str, Callable[..., dict[str, Any]]] = {
            "load": self.load,
            "inputs": self.take_inputs,
            "go": self.go,
            "outputs": self.give_outputs,
            "compile": self.compile_kernel,
        }
        while True:
            try:
                message = receive(self.connection)
            except Ended:
                return
            try:
                reply = replies[message["do"]](**message.get("with", {}))
            except BaseException as error:
                reply = {"error": self.describe(error), "kind": type(error).__name__}
            if self.watch is not None:
                self.watch.check_replaced()
                reply["alarms"] = list(self.watch.alarms)
            send(self.connection, {**reply, "nonce": message.get("nonce")})

    def load(
        self, source: str, file: str, kind: str, drives: dict[str, str], device: str, **watched: Any
    ) -> dict[str, Any]:
        """Load a program from a file of this child's own; a C++ program is compiled first."""
        path = str(Path(tempfile.mkdtemp()) / file)
        Path(path).write_text(source)
        self.path, self.device = path, device
        if kind == "cpp":
            self.module = compile_cpp(path)
            self.watch = Watch(path, kernel=False, **watched)
        else:
            self.watch = Watch(path, kernel=kind == "triton", **watched)
            spec = importlib.util.spec_from_file_location(Path(path).stem, path)
            assert spec is not None and spec.loader is not None
            self.module = importlib.util.module_from_spec(spec)
            sys.modules[Path(path).stem] = self.module
            for name in [each for each in sys.modules if each == "transect" or each.startswith("transect.")]:
                del sys.modules[name]
            for name in watched["allows"]:  # their files are opened before the watch begins
                importlib.import_module(name)
            self.watch.begin()
            with self.watch:
                spec.loader.exec_module(self.module)
        for entry, source in drives.items():
            space: dict[str, Any] = {}
            exec(compile(textwrap.dedent(source), "<driver>", "exec"), space)
            self.drives[entry] = next(value for value in space.values() if getattr(value, "__name__", "") != "" and
                                      getattr(value, "__code__", None) is not None)  # fmt: skip
        return {}

    def take_inputs(self, calls: list[tuple[str, list[Any]]], reuse: bool = False) -> dict[str, Any]:
        """Keep the arguments of some calls, on the device. ``reuse``: later calls get theirs in the overwritten tensors
        of the first."""
        self.inputs = [(entry, [_to(value, self.device) for value in arguments]) for entry, arguments in calls]
        self.reuse = reuse
        return {}

    def go(self, count: str = "", rounds: int = 1) -> dict[str, Any]:
        """Make the calls, ``rounds`` times; 0 makes none, to find what asking costs. The answer leaves when all have
        returned and the device has nothing left to do."""
        assert self.watch is not None
        self.outputs = []
        with self.watch, self._counting(count) as counted:
            for _ in range(rounds):
                self.outputs = []
                for index, (entry, arguments) in enumerate(self.inputs):
                    used = self._written_over(arguments) if self.reuse and index else arguments
                    result = self.call(entry, used)
                    if problem := not_plain(result):
                        raise TypeError(problem)
                    self.outputs.append(_copied(result) if self.reuse else result)
        if self.device != "cpu":
            torch.cuda.synchronize()
        return {"count": counted.value}

    @contextmanager
    def _counting(self, kind: str) -> Iterator[Count]:
        """Count inside the block; a C++ program is compiled once more, with calls at its loads and stores. The count
        stays 0 if that fails: a compiler may not know how, and a program with atomics needs functions that are not
        there."""
        assert self.watch is not None
        if kind != "lines of cache":
            with counting(kind, self.watch) as count:
                yield count
            return
        fast, count = self.module, Count()
        with suppress(NotCompiled, OSError):
            self.module = compile_cpp(self.path, counted=True)
        try:
            yield count
        finally:
            if self.module is not fast:
                self.module.transect_fetched_bytes.restype = ctypes.c_long
                count.value, self.module = self.module.transect_fetched_bytes(), fast

    def _written_over(self, arguments: list[Any]) -> list[Any]:
        """Write the numbers of this call into the tensors of the first one."""
        pairs = list(zip(self.inputs[0][1], arguments, strict=True))
        for old, new in pairs:
            if isinstance(old, torch.Tensor):
                old.copy_(new)
        return [old if isinstance(old, torch.Tensor) else new for old, new in pairs]

    def call(self, entry: str, arguments: list[Any]) -> Any:
        """Call the program once."""
        if entry in self.drives:
            return self.drives[entry](self.module, *arguments)
        function = getattr(self.module, entry, None)
        if function is None:
            raise AttributeError(f"the program has no function {entry!r}")
        return function(*arguments)

    def give_outputs(self, inputs: bool) -> dict[str, Any]:
        """Return the results, the present values of the arguments if ``inputs``, and True in ``shared`` if results
        share memory."""
        places = [_addresses(value) for value in self.outputs]
        shared = any(a & b for i, a in enumerate(places) for b in places[:i])
        after = [list(arguments) for _, arguments in self.inputs] if inputs else []
        return {"outputs": [_bare(value) for value in self.outputs], "inputs": after, "shared": shared}

    def compile_kernel(self, name: str, target: str, **declared: Any) -> dict[str, Any]:
        """Compile one kernel of the program for a GPU that need not be there."""
        from transect.learn.grade.compiling import compiled

        return {"compiled": compiled(getattr(self.module, name), name, target, **declared)}

    def describe(self, error: BaseException) -> str:
        """Describe an error with its line in the student's own file."""
        if isinstance(error, NotImplementedError | NotCompiled):
            return str(error)
        frames = reversed(traceback.extract_tb(error.__traceback__))
        line, text = next(((f.lineno, f.line or "") for f in frames if f.filename == self.path), (None, ""))
        if isinstance(error, SyntaxError) and error.filename == self.path:
            line = error.lineno
        where = "" if line is None else f"line {line}: "
        source = f" (`{text}`)" if text else ""
        return f"{where}{type(error).__name__}: {str(error)[:1300]}{source[:200]}"


def compile_cpp(path: str, *, counted: bool = False) -> Any:
    """Compile a C++ program and load it; ``counted``: with the functions of ``traffic.cpp`` at its loads and stores.

    Raises:
        NotCompiled: the message is the compiler's.
    """
    folder = Path(tempfile.mkdtemp())
    target = str(folder / "program.so")
    compiler = next(filter(shutil.which, COMPILERS), COMPILERS[0])
    common = [compiler, "-std=c++17", "-fPIC"]
    commands = [[*common, "-O3", "-march=native", "-shared", "-Wall", "-o", target, path]]
    if counted:
        instrumented, counter = str(folder / "program.o"), str(folder / "traffic.o")
        commands = [
            [*common, "-O1", "-fsanitize=thread", "-c", "-o", instrumented, path],
            [*common, "-O2", "-c", "-o", counter, str(Path(__file__).with_name("traffic.cpp"))],
            [*common, "-shared", "-o", target, instrumented, counter],
        ]
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise NotCompiled(f"it does not compile: {done.stderr.strip().replace(f'{Path(path).parent}/', '')[:1200]}")
    return ctypes.CDLL(target)


def not_plain(value: Any) -> str:
    """Say in a sentence that a result is more than plain values and tensors; such a result could be computed later."""
    if isinstance(value, list | tuple):
        return next(filter(None, map(not_plain, value)), "")
    if isinstance(value, dict):
        return next(filter(None, map(not_plain, [*value.keys(), *value.values()])), "")
    kind = type(value)
    if kind in PLAIN or kind in (torch.Tensor, torch.nn.Parameter, np.ndarray) or isinstance(value, np.generic):
        return ""
    return f"a result of the type {kind.__name__}: return tensors, numbers, strings, lists or dicts"


def _bare(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return torch.from_numpy(np.ascontiguousarray(value))
    if isinstance(value, torch.Tensor):
        return value.detach().contiguous()
    if isinstance(value, dict):
        return {key: _bare(each) for key, each in value.items()}
    return [_bare(each) for each in value] if isinstance(value, list | tuple) else value


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(each) for key, each in value.items()}
    return [_copied(each) for each in value] if isinstance(value, list | tuple) else value


def _addresses(value: Any) -> set[int]:
    if isinstance(value, torch.Tensor):
        return {value.data_ptr()} if value.numel() else set()
    if isinstance(value, dict):
        value = list(value.values())
    return set().union(*map(_addresses, value)) if isinstance(value, list | tuple) else set()


def _to(value: Any, device: str) -> Any:
    if isinstance(value, torch.Tensor):
        return value if device == "cpu" else value.to(device)
    if isinstance(value, dict):
        return {key: _to(each, device) for key, each in value.items()}
    return [_to(each, device) for each in value] if isinstance(value, list | tuple) else value


def serve_forked(connection: socket.socket, printed: int) -> None:
    """Serve one session in a forked child, with its prints going to ``printed``; then end."""
    code = 0
    try:
        os.setsid()
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(printed, 1)
        os.dup2(printed, 2)
        Session(connection).serve()
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        os._exit(code)
