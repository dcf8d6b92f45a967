"""Watches a student's program from inside its process: which torch operators it calls, and what it reaches for.

Three layers. Modes of torch see every operator, by dispatch and not by text. An audit hook of Python, which cannot be
taken out again, sees processes, threads, files, sockets, imports and introspection. A record of the functions of torch,
time and the builtins shows which of them the program has replaced.

What this cannot do is written in docs/learn/grading.md: a program in the same process that is written against this
file can get around it. The clock and the expected answers are therefore in another process.
"""

from __future__ import annotations

import _thread
import builtins
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

AUDITED = {
    "subprocess.Popen": "starts another process",
    "os.system": "starts another process",
    "os.exec": "starts another process",
    "os.fork": "starts another process",
    "os.forkpty": "starts another process",
    "os.posix_spawn": "starts another process",
    "socket.__new__": "opens a socket",
    "socket.connect": "opens a socket",
    "ctypes.dlopen": "loads a library",
    "ctypes.cdata/buffer": "reaches into memory by address",
    "ctypes.cdata": "reaches into memory by address",
    "ctypes.string_at": "reaches into memory by address",
    "mmap.__new__": "maps memory",
    "gc.get_objects": "searches this process for the grader",
    "gc.get_referrers": "searches this process for the grader",
    "gc.get_referents": "searches this process for the grader",
    "sys._getframe": "searches this process for the grader",
    "sys._current_frames": "searches this process for the grader",
    "sys.settrace": "replaces the counter of the grader",
    "sys.setprofile": "replaces the counter of the grader",
    "sys.addaudithook": "watches the grader",
    "signal.signal": "catches signals",
    "os.kill": "sends signals",
    "os.putenv": "changes the environment",
}
"""Events of Python's audit hook, and the reason why a solution does not need them."""

DIRECT = ("sys._getframe", "sys._current_frames")
"""Events that Python's own library raises for honest programs (dataclasses): they count from the program itself."""

HOST = ("numpy", "tolist", "__array__", "__dlpack__", "item", "__reduce_ex__", "untyped_storage", "storage")
"""Ways out of a tensor; a kernel rung computes on the device."""

TURN_OFF = {
    torch._C: ("_DisableTorchDispatch", "DisableTorchFunction", "DisableTorchFunctionSubclass",
               "_pop_torch_dispatch_stack", "_pop_torch_function_stack", "_set_dispatch_mode",
               "_unset_dispatch_mode"),
    torch.utils._python_dispatch: ("_disable_current_modes", "_pop_mode", "_pop_mode_temporarily"),
    torch.overrides: ("_pop_mode", "_pop_mode_temporarily"),
}  # fmt: skip
"""Functions of torch that turn its modes off."""

THREADS = {_thread: ("start_new_thread", "start_joinable_thread"),
           threading: ("_start_new_thread", "_start_joinable_thread")}  # fmt: skip
THREAD = "starts a thread: work outside of the measured call"


class Watch:
    """Watches one program.

    Args:
        file: path of the program.
        allows: beginnings of names of modules that it may import from this package.
        kernel: only operators that make room are allowed, and tensors may not leave the device.
        places, forbids: names of those operators; of the operators that are not allowed.
    """

    def __init__(
        self, file: str, allows: Sequence[str], kernel: bool, places: Sequence[str], forbids: Sequence[str]
    ) -> None:
        self.file = file
        self.allows = tuple(allows)
        self.kernel = kernel
        self.places, self.forbids = frozenset(places), frozenset(forbids)
        self.launchers = _launchers()
        """Code of Triton that compiles a kernel and launches it; by identity, since a file's name can be faked."""
        self.alarms: list[str] = []
        self._on = False
        self._busy = threading.local()
        self._kept: list[tuple[Any, str, int]] = []
        self._operators = _Operators(self)
        self._functions = _Functions(self)

    def alarm(self, text: str) -> None:
        """Note what the program did; once each."""
        if text not in self.alarms:
            self.alarms.append(text)

    def begin(self) -> None:
        """Begin to watch; before the program is loaded."""
        self._set_tripwires()
        self._kept = [
            (place, name, id(value))
            for place in _places()
            for name, value in list(vars(place).items())
            if callable(value) and not name.startswith("__")
        ]
        self._on = True
        sys.addaudithook(self._audit)

    def __enter__(self) -> Watch:
        self._operators.__enter__()
        self._functions.__enter__()
        self._depth = torch._C._len_torch_dispatch_stack()
        return self

    def __exit__(self, *error: Any) -> None:
        if torch._C._len_torch_dispatch_stack() != self._depth:
            self.alarm("turns off the modes that watch torch's operators")
        self._functions.__exit__(*error)
        self._operators.__exit__(*error)

    def check_replaced(self) -> None:
        """Raise an alarm for functions of torch, time, random or the builtins that the program has replaced."""
        for place, name, before in self._kept:
            now = vars(place).get(name)
            if id(now) != before and not _torchs_own(now):
                self.alarm(f"replaces {getattr(place, '__name__', place)}.{name}")

    def operator(self, name: str) -> None:
        """Take note of a call of one of torch's operators."""
        if name in self.forbids:
            self.alarm(f"calls torch's {name}, which this rung is about")
        elif self.kernel and name not in self.places:
            self.alarm(f"calls torch's {name}: this rung computes in the kernel")

    def function(self, name: str) -> None:
        """Take note of a call of one of torch's functions, before dispatch."""
        if name in self.forbids:
            self.alarm(f"calls torch's {name}, which this rung is about")
        if self.kernel and name in HOST and self.from_program(3):
            self.alarm(f"takes a tensor out of the device by {name}: this rung computes in the kernel")

    def from_program(self, depth: int) -> bool:
        """Return True if the frame ``depth`` above is the program's own, frames of the import system excluded."""
        self._busy.here = True
        try:
            frame = sys._getframe(depth)
        finally:
            self._busy.here = False
        while frame is not None and frame.f_code.co_filename.startswith("<frozen importlib"):
            frame = frame.f_back  # type: ignore[assignment]
        return frame is not None and frame.f_code.co_filename == self.file

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._on or getattr(self._busy, "here", False):
            return
        if event == "import":
            module = str(arguments[0])
            ours = module == "transect" or module.startswith("transect.")
            if ours and not module_allowed(module, self.allows) and self.from_program(2):
                self.alarm(f"imports {module}: a rung is solved without the shipped solution")
        elif event == "open":
            path = str(arguments[0])
            if self.from_program(2) and path != self.file:
                self.alarm(f"opens the file {path!r}")
        elif event in AUDITED and (self.from_program(2) if event in DIRECT else self._in_stack()):
            self.alarm(AUDITED[event])

    def _in_stack(self) -> bool:
        """Return True if a frame of the program is anywhere above: the standard library starts processes on its behalf.

        Triton starts compilers and loads their output when a kernel is first launched on a GPU. The program
        does not cause that, unless Triton calls back into the program.
        """
        self._busy.here = True
        try:
            frame = sys._getframe(2)
        finally:
            self._busy.here = False
        while frame is not None:
            if frame.f_code in self.launchers:
                return False
            if frame.f_code.co_filename == self.file:
                return True
            frame = frame.f_back  # type: ignore[assignment]
        return False

    def _set_tripwires(self) -> None:
        for places, reason in ((TURN_OFF, "turns off the modes that watch torch's operators"), (THREADS, THREAD)):
            for place, names in places.items():
                for name in names:
                    original = getattr(place, name, None)
                    if original is not None:
                        setattr(place, name, self._tripwire(original, reason, whole=places is THREADS))

    def _tripwire(self, original: Any, reason: str, whole: bool) -> Callable[..., Any]:
        """Wrap ``original`` with an alarm if the program calls it; ``whole``: also if something that the program called
        does."""

        def called(*arguments: Any, **named: Any) -> Any:
            if self._on and (self._in_stack() if whole else self.from_program(2)):
                self.alarm(reason)
            return original(*arguments, **named)

        return called


class _Operators(TorchDispatchMode):
    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch
        self.bytes: int | None = None
        """Bytes that operators read and wrote, while a run is counted."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[-1]
        self.watch.operator(name)
        result = func(*args, **(kwargs or {}))
        if self.bytes is not None and name not in self.watch.places:
            self.bytes += _tensor_bytes(args) + _tensor_bytes(kwargs or {}) + _tensor_bytes(result)
        return result


class _Functions(TorchFunctionMode):
    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.watch.function(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


def module_allowed(module: str, allows: Sequence[str]) -> bool:
    """Return True for an allowed module, the packages above it and those within it."""
    return module == "transect" or any(
        module == name or name.startswith(f"{module}.") or module.startswith(f"{name}.") for name in allows
    )


def _tensor_bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, dict):
        return sum(map(_tensor_bytes, value.values()))
    return sum(map(_tensor_bytes, value)) if isinstance(value, list | tuple) else 0


def _torchs_own(function: Any) -> bool:
    """Return True for a Python function of torch: its compiler wraps some when it is first loaded."""
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename.startswith(_TORCH)


def _launchers() -> frozenset[CodeType]:
    jit = sys.modules.get("triton.runtime.jit")
    return frozenset() if jit is None else frozenset({jit.JITFunction.run.__code__})


_TORCH = f"{torch.__path__[0]}/"


def _places() -> list[Any]:
    found = [builtins, time, random, np, torch, torch.Tensor, torch.nn.functional, torch._C._VariableFunctions]
    if (triton := sys.modules.get("triton")) is not None:
        found += [triton, triton.language]
    return [place for place in found if hasattr(place, "__dict__")]
