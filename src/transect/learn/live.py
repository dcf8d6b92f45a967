"""A student's piece inside the product: a folder that puts it there, and counts its calls in every process.

``placed`` makes the folder from the rung's record (``Live``) for the length of a run. ``hook.py`` calls ``place`` in
each process that imports a module which the piece goes into.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import json
import mmap
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from .record import Live, Rung
from .registry import get

BYTES = 8
"""Bytes of one counter."""


class Launches:
    """A function of (grid, arguments) in the place of a Triton kernel, which is called as ``kernel[grid](...)``."""

    def __init__(self, launch: Callable[..., Any]) -> None:
        self.launch = launch

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return functools.partial(self.launch, grid)


class Placed:
    """The folder of a run.

    Attributes:
        environment: for the processes of the run.
    """

    def __init__(self, rung: Rung, folder: Path) -> None:
        self.rung, self.folder = rung, folder
        before = os.environ.get("PYTHONPATH")
        self.environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *([before] if before else [])])}

    def calls(self) -> dict[str, int]:
        """Count the calls of each function of the piece, over all processes."""
        names = counted(self.rung)
        found = dict.fromkeys(names, 0)
        for file in self.folder.glob("calls.*"):
            data = memoryview(file.read_bytes()).cast("Q")
            for name, number in zip(names, data, strict=True):
                found[name] += number
        return found

    def failure(self) -> str:
        """Describe the first error that the piece raised; empty if there was none."""
        found = sorted(self.folder.glob("failed.*"), key=lambda file: file.stat().st_mtime_ns)
        return found[0].read_text() if found else ""

    def report(self) -> str:
        """Write a line that proves that the piece ran.

        Raises:
            ValueError: it raised an error, or was never called.
        """
        if failure := self.failure():
            raise ValueError(failure)
        calls = {name: number for name, number in self.calls().items() if number}
        if not calls:
            raise ValueError(f"the run never called your {self.rung.name}: nothing is shown of it")
        processes = len(list(self.folder.glob("calls.*")))
        where = "in one process" if processes == 1 else f"in {processes} processes"
        return f"your {self.rung.name} ran {where}: " + ", ".join(f"{n} {c:,} times" for n, c in calls.items())


def refusal(rung: Rung) -> str:
    """Say in a sentence why a rung cannot run inside the product; empty if it can."""
    if rung.live is not None:
        return ""
    where = f"; its idea lives in src/transect/{rung.shipped}" if rung.shipped else ""
    reason = rung.apart or "it teaches a step on the way, and no command runs that step by itself"
    return f"{rung.name} has no place inside a command: {reason}{where}"


@contextmanager
def placed(rung: Rung, program: Path) -> Iterator[Placed]:
    """Make the folder that puts ``program`` into the product, for the length of the block.

    Raises:
        ValueError: the rung has no place there; the message says why.
    """
    if reason := refusal(rung):
        raise ValueError(reason)
    live = rung.live
    assert live is not None
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        shutil.copy(Path(__file__).parent / "hook.py", folder / "sitecustomize.py")
        modules = sorted({target.partition(":")[0] for target in live.pieces if ":" in target})
        record = rung.own_file or f"{__package__}.rungs.{rung.road}.{rung.name}"
        plan = {"program": str(program.resolve()), "record": record, "modules": modules}
        (folder / "piece.json").write_text(json.dumps(plan))
        (folder / "piece.py").write_text(
            f"from pathlib import Path\n\nfrom {__name__} import piece\n\nPiece = piece(Path(__file__).parent)\n"
        )
        yield Placed(rung, folder)


def place(module: ModuleType, folder: Path) -> None:
    """Replace the attributes of a module of the product that the piece of ``folder`` stands for."""
    live, mine = _loaded(folder)
    for target, adapt in live.pieces.items():
        name, _, path = target.partition(":")
        if name != module.__name__:
            continue
        *owners, attribute = path.split(".")
        owner = functools.reduce(getattr, owners, module)
        shipped = getattr(owner, attribute)
        setattr(owner, attribute, getattr(mine, attribute) if adapt is None else adapt(mine, shipped))


def piece(folder: Path) -> Any:
    """Return the piece of ``folder`` for a command that takes it by an option or an argument."""
    live, mine = _loaded(folder)
    (adapt,) = (adapt for target, adapt in live.pieces.items() if ":" not in target)
    assert adapt is not None
    return adapt(mine, None)


def own_module(folder: Path) -> ModuleType:
    """Load the student's program of ``folder``, with its calls counted."""
    return _loaded(folder)[1]


def counted(rung: Rung) -> tuple[str, ...]:
    """Name the counted functions: those with holes."""
    return rung.holes


def _loaded(folder: Path) -> tuple[Live, ModuleType]:
    """Load the record and the student's program, once in each process."""
    plan = json.loads((folder / "piece.json").read_text())
    own = plan["record"].endswith(".py")
    rung: Rung = get(plan["record"]) if own else import_module(plan["record"]).RUNG
    assert rung.live is not None
    name = f"_your_{rung.name}_{folder.name}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, plan["program"])
        assert spec is not None and spec.loader is not None
        mine = importlib.util.module_from_spec(spec)
        sys.modules[name] = mine
        try:
            spec.loader.exec_module(mine)
        except Exception as error:
            _note(error, folder, plan["program"], "it cannot be loaded")
            raise
        _count(mine, rung, folder, plan["program"])
    return rung.live, sys.modules[name]


def _count(mine: ModuleType, rung: Rung, folder: Path, program: str) -> None:
    """Let each function with a hole count its calls in a file, which outlives the process."""
    names = counted(rung)
    file = folder / f"calls.{os.getpid()}"
    file.write_bytes(bytes(BYTES * len(names)))
    with file.open("r+b") as opened:
        counters = memoryview(mmap.mmap(opened.fileno(), 0)).cast("Q")
    for number, name in enumerate(names):
        *owners, attribute = name.split(".")
        owner: Any = functools.reduce(getattr, owners, mine)
        inner = vars(owner)[attribute]
        if isinstance(inner, FunctionType):
            setattr(owner, attribute, _counting(inner, name, counters, number, folder, program))
        elif not owners:
            setattr(mine, attribute, _CountingKernel(inner, counters, number))


def _counting(
    inner: FunctionType, name: str, counters: memoryview[int], number: int, folder: Path, program: str
) -> Callable[..., Any]:
    if inspect.isgeneratorfunction(inner):

        @functools.wraps(inner)
        def stepped(*arguments: Any, **named: Any) -> Any:
            counters[number] += 1
            try:
                return (yield from inner(*arguments, **named))
            except Exception as error:
                _note(error, folder, program, name)
                raise

        return stepped

    @functools.wraps(inner)
    def called(*arguments: Any, **named: Any) -> Any:
        counters[number] += 1
        try:
            return inner(*arguments, **named)
        except Exception as error:
            _note(error, folder, program, name)
            raise

    return called


class _CountingKernel:
    """A Triton kernel whose launches are counted. Calls from another kernel reach the kernel itself."""

    def __init__(self, kernel: Any, counters: memoryview[int], number: int) -> None:
        self._kernel, self._counters, self._number = kernel, counters, number

    def __getitem__(self, grid: Any) -> Any:
        self._counters[self._number] += 1
        return self._kernel[grid]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)


def _note(error: Exception, folder: Path, program: str, name: str) -> None:
    """Keep the first error of this process for the message of the command."""
    file = folder / f"failed.{os.getpid()}"
    if not file.exists():
        frames = traceback.extract_tb(error.__traceback__)
        line = next((frame.lineno for frame in reversed(frames) if frame.filename == program), None)
        where = f"{program}, {name}" + ("" if line is None else f", line {line}")
        file.write_text(f"your piece failed: {where}: {type(error).__name__}: {error}")
