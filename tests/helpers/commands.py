"""``transect`` commands inside the test's process, which needs no second start of Python and torch."""

from __future__ import annotations

import contextlib
import io
import sys
from subprocess import CompletedProcess

import pytest

from transect.cli import main

UNLIKE_HERE = ("inspect", "trace")
"""Commands that choose Triton's compiler or its interpreter before they import it: they need a process of their own."""


def run_here(*arguments: str, stdin: str = "") -> CompletedProcess[str]:
    """``transect ARGUMENTS`` without a process of its own: its exit code and what it wrote.

    Raises:
        ValueError: the command needs a process of its own.
    """
    if arguments[:1] and arguments[0] in UNLIKE_HERE:
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
