"""Commands and scripts inside the test's process, which needs no second start of Python and torch."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from transect.cli import main

UNLIKE_HERE = "inspect" if os.environ.get("TRITON_INTERPRET") == "1" else "trace"
"""The command that needs what is not here, Triton's compiler or its interpreter: it takes a process of its own."""


def run_here(*arguments: str, stdin: str = "") -> CompletedProcess[str]:
    """``transect ARGUMENTS`` without a process of its own: its exit code and what it wrote.

    Raises:
        ValueError: the command needs a process of its own.
    """
    if arguments[:1] == (UNLIKE_HERE,):
        raise ValueError(f"transect {arguments[0]} chooses how Triton is imported: start a process")
    out, errors = io.StringIO(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(errors),
        pytest.raises(SystemExit) as stopped,
    ):
        patch.setattr(sys, "stdin", io.StringIO(stdin))
        patch.setattr(sys, "argv", ["transect", *arguments])  # results record it
        main()
    return CompletedProcess(["transect", *arguments], int(stopped.value.code or 0), out.getvalue(), errors.getvalue())


@contextlib.contextmanager
def beside(folder: Path) -> Iterator[None]:
    """The modules of a folder of scripts can be imported by their names, and are forgotten afterwards."""
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        try:
            yield
        finally:
            for name in set(sys.modules) - before:
                if Path(getattr(sys.modules[name], "__file__", None) or "/").parent == folder:
                    del sys.modules[name]


def script_here(file: Path, *arguments: str) -> CompletedProcess[str]:
    """``python FILE ARGUMENTS`` without a process of its own."""
    out, errors, code = io.StringIO(), io.StringIO(), 0
    with beside(file.parent), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(file), *arguments])
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            try:
                runpy.run_path(str(file), run_name="__main__")
            except SystemExit as stopped:
                code = stopped.code if isinstance(stopped.code, int) else int(stopped.code is not None)
                if isinstance(stopped.code, str):
                    print(stopped.code, file=sys.stderr)
    return CompletedProcess([str(file), *arguments], code, out.getvalue(), errors.getvalue())
