"""The ``transect`` command: one thin file per sub-command, over the levels below.

A command's file is imported when its name is given (``settings.LazyGroup``), and imports heavy modules when it runs, so
that ``transect --help`` is fast. ``main`` prints any error of a command as one line.

* Models: ``pull.py`` fetches one, ``models.py`` lists them, ``export.py`` writes one for other programs,
  ``quantize.py`` rounds one to fewer bits, ``eval.py`` measures its quality.
* Answers: ``generate.py``, ``chat.py``; ``demo.py``: a server that answers eight people at once (``demo_view.py``,
  ``demo_picture.py``).
* Servers: ``serve.py``; ``cluster.py``: a fleet; ``reload.py``: new engines in a running server; ``drill.py``: the
  death of a replica; ``top.py``: the present state of a server.
* Training: ``train.py``; ``sweep.py``: over a grid of settings; ``data.py``: prepares data; ``plot.py``: curves;
  ``board.py``: runs and reports in the browser; ``predicted.py``: the predicted step times of a run.
* Flows: ``flow.py``; ``flow_watch.py``: captured requests of a flow's server.
* Plans: ``memory.py``, ``memory_training.py``: memory of serving and training (``memory_tables.py`` prints it);
  ``plan.py``: layouts of a run; ``plan_serving.py``: a service; ``plan_calibrate.py``: a profile of a measured server;
  ``plan_workload.py``: traces; ``plan_drills.py``: failures of a fleet.
* Measurements: ``bench.py``, ``bench_*.py``: benchmarks of engine, server and operators; ``hardware.py``: measured
  rates of this machine; ``explain.py``: time by cause, replay, backward passes; ``roofline.py``: limits of a device.
* Kernels: ``inspect.py``: machine code; ``trace.py``: a run in the interpreter; ``tune.py``, ``tune_card.py``,
  ``tune_model.py``: the fastest choices on this device.
* Learning: ``learn.py``: the graded ladder; ``learn_use.py``: a student's code inside the product.
* Shared: ``settings.py``: groups of commands, origins of options, help; ``engine_options.py``: options from the
  settings of engine and server; ``environment.py``: environment variables; ``session.py``: an engine for one command;
  ``searching.py``: options of searches.
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
