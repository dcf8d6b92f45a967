"""``transect explain``: analyses of requests, runs and programs, one per sub-command."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from .settings import output_file

application = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@application.callback()
def explain() -> None:
    """Explain the time of a request or of any PyTorch program, replay a server's run, show loss.backward()."""


@application.command("backward")
def backward(
    subject: Annotated[str, typer.Argument(help="A model, or a Python file that assigns `loss` or defines `loss()`.")],
    tokens: Annotated[int, typer.Option(help="Tokens of a model's batch: random ones, in two documents.", min=4)] = 64,
    task: Annotated[str, typer.Option(help="Task of a model: finetune, or lora (a frozen base).")] = "finetune",
    precision: Annotated[str, typer.Option(help="Precision of a model: float32 or bfloat16.")] = "float32",
    device: Annotated[str, typer.Option(help="Device of a model: auto, cpu or cuda.")] = "auto",
    load_format: Annotated[str, typer.Option(help="dummy: random weights in the shape of a model.")] = "auto",
    every: Annotated[bool, typer.Option("--every", help="Show every node, also of equal layers.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show each node of loss.backward() in order, what it saved, its bytes, its time.

    A Python file runs with __name__ set to "__explain__"; its function `loss()` is called twice and measured the second
    time. A model runs one packed batch through the training model, twice as well.
    """
    import dataclasses
    import json

    from ..explain.backward.losses import explain_model, explain_script
    from ..explain.backward.text import lines
    from ..train.config import TrainConfig

    if subject.endswith(".py"):
        found = explain_script(Path(subject))
    else:
        settings = {"task": task, "precision": precision, "device": device, "load_format": load_format}
        found = explain_model(TrainConfig.from_dict({"model": subject, **settings}), tokens)
    if as_json:
        totals = {"activation_bytes": found.activation_bytes, "weight_bytes": found.weight_bytes, "peak": found.peak}
        print(json.dumps(dataclasses.asdict(found) | totals, indent=1))
        return
    for line in lines(found, every=every):
        print(line)


Log = Annotated[str, typer.Argument(help="A file that --decision-log wrote, or the URL of a server.")]
ApiKey = Annotated[str | None, typer.Option(help="The server's operator key.", envvar="TRANSECT_API_KEY")]
Preset = Annotated[str | None, typer.Option(help="Floors of this device; see `transect hardware --preset list`.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@application.command("request")
def request(
    source: Log,
    request_id: Annotated[str, typer.Argument(help="The id of the answer, or of the engine's request.")],
    choice: Annotated[int, typer.Option(help="Number of the choice.", min=0)] = 0,
    preset: Preset = None,
    api_key: ApiKey = None,
    as_json: Json = False,
) -> None:
    """Split a request's time into parts, from its arrival to its last token."""
    import json

    from ..explain.engine.bill import bill
    from ..explain.engine.rates import rates_for
    from ..explain.engine.sources import open_logs
    from ..explain.engine.work import StepWork

    logs = open_logs(source, api_key)
    log = next((log for log in logs if log.has(request_id)), logs[0])
    found = bill(log, request_id, StepWork.of(log.header, rates_for(log.header, preset)), choice)
    print(json.dumps(found.to_dict(), indent=1) if as_json else "\n".join(found.lines()))


@application.command("replay")
def replay(
    source: Log,
    setting: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="A change: max_num_batched_tokens=512, num_blocks=900, batching=static, preset=h200."
        ),
    ] = None,
    preset: Preset = None,
    as_json: Json = False,
    api_key: ApiKey = None,
    engine: Annotated[int, typer.Option(help="Number of the engine, if there are several.", min=0)] = 0,
) -> None:
    """Run a decision log through the scheduler again, unchanged or with other settings (--set, repeatable).

    Unchanged, every decision must be the same. With --set the output predicts latencies and tokens/s. Settings are
    those of the scheduler; preset=NAME is another device, quantization=int4 another format.
    """
    import dataclasses
    import json

    from ..explain.engine.rates import rates_for
    from ..explain.engine.replay import replay as again
    from ..explain.engine.sources import open_log
    from ..explain.engine.what_if import what_if
    from ..explain.engine.work import StepWork

    log = open_log(source, api_key, engine)
    if setting:
        predicted = what_if(log, StepWork.of(log.header, rates_for(log.header, preset)), setting)
        print(json.dumps(predicted.to_dict(), indent=1) if as_json else "\n".join(predicted.lines()))
        return
    found = again(log)
    if as_json:
        print(json.dumps(dataclasses.asdict(found), indent=1))
    elif found.difference is None:
        print(f"{found.decisions} decisions over {found.rows} rows replayed, all the same")
    if found.difference is not None:
        raise ValueError(f"the replay differs at {found.difference}")


AGAIN_S = 10.0
"""Longest run, in seconds, of a program without steps that is repeated to time it."""
HtmlFile = Annotated[Path | None, output_file("--html", help="Write the report as a self-contained page.")]
JsonFile = Annotated[Path | None, output_file("--json", help="Write all figures to this file.")]


@application.command("run", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def run(
    context: typer.Context,
    command: Annotated[list[str], typer.Argument(help="python SCRIPT ARGUMENTS, or torchrun ..., after --.")],
    preset: Annotated[str | None, typer.Option(help="Floors of this device.")] = None,
    keep_trace: Annotated[Path | None, output_file(help="Keep the profiler's trace in this file.")] = None,
    stacks: Annotated[bool, typer.Option(help="Sample the Python stack.")] = True,
    apply: Annotated[
        bool, typer.Option("--apply", help="Try the changes that need no edit, and measure their gains.")
    ] = False,
    energy: Annotated[bool, typer.Option("--energy", help="Measure joules of the run (RAPL, NVML).")] = False,
    grid: Annotated[float, typer.Option(help="Grams of CO2e per kWh of your grid.", min=0)] = 400.0,
    seconds: Annotated[float, typer.Option(help="Stop the program after this time; 0: no limit.", min=0)] = 0.0,
    window: Annotated[float, typer.Option(help="Seconds of steps to profile; 0: the whole program.", min=0)] = 3.0,
    once: Annotated[bool, typer.Option("--once", help="Never run the program twice to time it.")] = False,
    html: HtmlFile = None,
    as_json: JsonFile = None,
) -> None:
    """Run a PyTorch program, split its time by cause, and suggest changes.

    The first steps warm up, the next ones are timed without profiling, and steps of --window seconds are profiled. A
    program without steps is profiled as a whole; one of a few seconds then runs once more, without profiling.
    The command may also be torchrun, accelerate launch or another launcher: ranks are compared.
    Ctrl-C or --seconds ends the program, and what ran until then is explained.
    With --apply it runs a dozen times more, of a program with steps some of them, with the same standard input.
    """
    import dataclasses

    from ..explain.program.job import launches

    if launches(words := [*command, *context.args]):
        _explain_job(words, window, preset or "", stacks, as_json)
        return
    from ..costs.presets import preset as find
    from ..explain.energy import Energies
    from ..explain.program.apply import applied, kept
    from ..explain.program.explain import Explain, explain_script
    from ..explain.program.script import Input, ScriptFailed

    script = dataclasses.replace(_script(words, sys.stdin if apply or not once else None), seconds=seconds)
    keep_trace, html, as_json = (file and file.absolute() for file in (keep_trace, html, as_json))
    ceilings = None if preset is None else find(preset).ceilings()
    failed: ScriptFailed | None = None
    with Energies(energy, grid) as energies:
        try:
            explain = Explain(ceilings, stacks=stacks, trace=keep_trace, window_s=window, progress=_progress)
            found = explain_script(script, explain, again_s=0.0 if once else AGAIN_S)
        except ScriptFailed as error:
            failed, found = error, error.found
    found.facts.update(energies.facts)
    _show(found, as_json, html)
    for line in energies.lines:
        print(line)
    if failed is not None:
        raise failed
    again = dataclasses.replace(script, stdin=script.stdin or Input(io.BytesIO()), seconds=0.0)  # it ended by itself
    if apply and not found.interrupted:
        done = []
        for each in applied(again, found, _progress):
            print(each, flush=True)
            done.append(each)
        if line := kept(again, found, done):
            print(line)


def _explain_job(words: list[str], window: float, preset: str, stacks: bool, as_json: Path | None) -> None:
    import json

    from ..explain.program.job import run_job

    found = run_job(words, window_s=window, preset=preset, stacks=stacks)
    print(found)
    if as_json is not None:
        as_json.write_text(json.dumps(found.to_dict(), indent=1) + "\n", "utf-8")
    if found.status:
        raise ValueError(f"`{' '.join(words)}` ended with exit status {found.status}")


def _progress(line: str) -> None:
    """Print a stage of the analysis for a person."""
    print(f"transect explain: {line} ...", file=sys.stderr, flush=True)


def _script(words: list[str], stdin: Any) -> Any:
    """Return the script of a command line. ``stdin``: is kept as it is read, for a script that runs more than once."""
    from ..explain.program.script import Input, Script

    if words and words[0].startswith("--"):
        raise ValueError(f"{words[0]} is not an option of transect explain run; see its --help")
    if words and re.fullmatch(r"python[\d.]*t?", Path(words[0]).name):
        words = words[1:]
    if words[:1] == ["-u"]:
        words = words[1:]
    module = words[:1] == ["-m"]
    words = words[module:]
    if not words or words[0].startswith("-"):
        more = f", not {words[0]}" if words else ""
        raise ValueError(f"give a script or -m and a module: transect explain run -- python train.py --steps 10{more}")
    given = None
    if stdin is not None and not stdin.isatty():
        given = Input(stdin.buffer if hasattr(stdin, "buffer") else io.BytesIO(stdin.read().encode()))
    return Script(words[0], tuple(words[1:]), module, given)


@application.command("trace")
def trace(
    file: Annotated[Path, typer.Argument(help="torch.profiler's .json or .json.gz, or .sqlite of nsys export.")],
    preset: Annotated[str | None, typer.Option(help="Device of the trace; default: this machine.")] = None,
    html: HtmlFile = None,
    as_json: JsonFile = None,
) -> None:
    """Split the time of a recorded trace by cause. Files can have any size."""
    from rich.console import Console
    from rich.progress import Progress

    from ..costs.presets import preset as find
    from ..explain.program.explain import explain_trace, machine_ceilings
    from ..explain.program.trace_file import read_trace

    ceilings = machine_ceilings() if preset is None else find(preset).ceilings()
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("reading", total=1.0)
        recorded = read_trace(file, lambda share: progress.update(task, completed=share))
    _show(explain_trace(recorded, ceilings), as_json, html)


def _show(found: Any, as_json: Path | None, html: Path | None) -> None:
    import json

    from ..explain.program.report_html import page

    print(found)
    if as_json is not None:
        as_json.write_text(json.dumps(found.to_dict(), indent=1) + "\n", "utf-8")
    if html is not None:
        html.write_text(page(found), "utf-8")
