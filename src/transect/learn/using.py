"""Runs the live server with a student's piece inside."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .live import OPTIONS
from .record import Rung

PROGRAM = '''"""Puts {path} into the live engine."""

import importlib.util

from transect.learn.live import live_scheduler

spec = importlib.util.spec_from_file_location("mine", {path!r})
mine = importlib.util.module_from_spec(spec)
spec.loader.exec_module(mine)
Scheduler = live_scheduler(mine.Scheduler)
'''


@contextmanager
def server_options(rung: Rung, program: Path) -> Iterator[list[str]]:
    """Yield the options of ``transect serve`` that run the program of a rung in the server, for the length of the
    block.

    Raises:
        ValueError: the server has no place for this rung.
    """
    if rung.name != "scheduler":
        raise ValueError(f"only the rung scheduler can run inside the live server yet, not {rung.name}")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "live_scheduler.py"
        file.write_text(PROGRAM.format(path=str(program.resolve())))
        yield ["--scheduler-cls", f"{file}:Scheduler", *OPTIONS]
