"""The ``transect`` command: one thin file per sub-command, over the levels below.

* ``pull.py``: fetch a model. ``models.py``: which there are. ``generate.py``: continue one prompt. ``chat.py``: talk to
  a model.
* ``serve.py``: the OpenAI-compatible server. ``demo.py``: that server answering eight people at once.
  ``cluster.py``: a fleet of replicas. ``reload.py``: new engines in a running server.
  ``drill.py``: a replica that is killed in the middle of answers.
* ``train.py``: train or fine-tune a model; ``sweep.py``: over a grid of settings.
* ``flow.py``: the whole life of a model; ``flow_watch.py``: what its server has captured.
* ``data.py``: prepare what it is trained on. ``plot.py``: its curves. ``board.py``: runs and reports in the browser.
  ``predicted.py``: what was expected of its steps.
  ``memory.py``: what serving will need, or training (``memory_training.py``), in tables (``memory_tables.py``).
  ``plan.py``: the best way to spread a run; ``plan_serving.py``: a service;
  ``plan_calibrate.py``: a measured server to plan with; ``plan_workload.py``: traces;
  ``plan_drills.py``: failures of a fleet.
* ``eval.py``: how good a model is. ``export.py``: a run's adapter or model for other programs; ``quantize.py``: a model
  in fewer bits.
* ``bench.py``, ``bench_*.py``: benchmarks of engine, server and operators. ``hardware.py``: what this machine can do.
* ``explain.py``: where the time of requests and runs goes, replay, a backward pass. ``top.py``: what a server does now.
  ``roofline.py``: what a device allows.
* ``learn.py``: the graded ladder, from a dot product to a fleet; ``learn_use.py``: runs a student's piece inside the
  product.
* ``inspect.py``: what an operator's kernels compile to. ``tune.py``, ``tune_card.py``, ``tune_model.py``: find the
  fastest of them here. ``trace.py``: follows a kernel through the interpreter.
* ``engine_options.py``: options from settings of engine and server. ``settings.py``: the commands in groups, where
  options may come from, and their help.
  ``environment.py``: variables of the environment.
  ``session.py``: an engine for the length of a command. ``searching.py``: options of searches.
  ``demo_view.py``, ``demo_picture.py``: what the demo shows.

A command's file is imported when its name is given (``settings.LazyGroup``), and imports what is heavy when it runs, so
that ``transect --help`` is quick. A command fails with ``ValueError`` (or any error) and ``main`` makes it one line.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

USAGE, STOPPED, INTERRUPTED = 2, 3, 130
"""Exit codes: wrong input; a training run that stopped because of what it saw; Ctrl-C."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit: 0 when all went well, 2 after one line on stderr, 130 quietly after Ctrl-C."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a letter of an answer still gets the rest
    try:
        code = _run(list(sys.argv[1:] if arguments is None else arguments))
    except KeyboardInterrupt:
        code = INTERRUPTED
    if code == INTERRUPTED:
        # Past this point nothing is left to clean up, and a second Ctrl-C must not find a traceback to print.
        _flush()
        os._exit(INTERRUPTED)
    sys.exit(code)


def _run(arguments: list[str]) -> int:
    debug = "--debug" in arguments or bool(os.environ.get("TRANSECT_DEBUG"))
    try:
        import typer.main

        command = typer.main.get_command(_application())
        result = command.main(args=arguments, prog_name="transect", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except BrokenPipeError:
        return _reader_gone()
    except Exception as error:
        if debug:
            raise
        if type(error).__name__ == "Abort":  # how older typer versions report Ctrl-C
            return INTERRUPTED
        if type(error).__name__ == "NoArgsIsHelpError":
            try:
                print(error.format_message(), flush=True)  # type: ignore[attr-defined]
            except BrokenPipeError:
                return _reader_gone()
            return 0
        print(f"transect: error: {_one_line(error)}", file=sys.stderr)
        return STOPPED if type(error).__name__ == "TrainingStopped" else USAGE


def _reader_gone() -> int:
    """Suppress errors after the reader of our output has closed the pipe (`| head`), also at the interpreter's exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1


def _application() -> Any:
    import typer

    from . import environment, settings

    application = typer.Typer(
        cls=settings.LazyGroup,
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": environment.PREFIX},
    )

    @application.callback()
    def options(
        debug: bool = typer.Option(False, "--debug", help="Show a traceback where a command fails."),
        version: bool = typer.Option(
            False,
            "--version",
            help="Show the version and end.",
            is_eager=True,
            callback=_show_version,
            allow_from_autoenv=False,
        ),
    ) -> None:
        """Run, serve and train language models; every measured time is shown with its hardware limit."""

    return application


def _show_version(wanted: bool) -> None:
    if wanted:
        import typer

        from .. import __version__

        print(f"transect {__version__}")
        raise typer.Exit


def _one_line(error: Exception) -> str:
    formatted = getattr(error, "format_message", None)  # usage errors know how to say what is wrong
    if formatted is not None:
        context = getattr(error, "ctx", None)
        command = context.command_path if context else "transect"
        text = " ".join(formatted().rstrip(".").split())
        return f"{text} See {command} --help" if text.endswith("?") else f"{text}; see {command} --help"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    text = " ".join(str(error).split())
    if isinstance(error, ValueError) or type(error).__name__ in ("EngineDeadError", "TrainingStopped", "Unavailable"):
        return text
    return f"{type(error).__name__}: {text} (this should not happen; `transect --debug ...` shows where)"


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
