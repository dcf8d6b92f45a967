"""``transect flow watch``, ``flow feedback`` and ``flow captures``: what a server has captured."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from .engine_options import BUILTIN
from .settings import output_file

if TYPE_CHECKING:
    from ..flow.watch.report import DriftReport

ALARMED = 3
"""Exit code of a watch that raised an alarm."""

Captures = Annotated[Path, typer.Argument(help="The --capture-dir of a server.")]
Version = Annotated[str, typer.Option(help="Only of this version: a model's or an adapter's name.")]


def register(application: typer.Typer) -> None:
    """Add the commands to ``transect flow``."""
    for command in (watch, feedback, captures):
        application.command()(command)


def watch(
    directory: Captures,
    reference: Annotated[Path, typer.Option(help="Files of training data, or a directory of captures of a good time.")],
    follow: Annotated[bool, typer.Option("--follow", help="Test each window when it is full, until Ctrl-C.")] = False,
    window: Annotated[int, typer.Option(help="Requests in a window, one of each user and conversation.")] = 256,
    false_alarms: Annotated[float, typer.Option(help="Probability of any alarm in a window without drift.")] = 1e-3,
    schema_failures: Annotated[float, typer.Option(help="Accepted rate of answers without their form.")] = 0.01,
    version: Version = "",
    model: Annotated[str, typer.Option(help="Model for vectors of texts, run here; none: no vectors.")] = BUILTIN,
    embeddings: Annotated[str | None, typer.Option(help="Server for vectors of texts, in place of --model.")] = None,
    judge: Annotated[str | None, typer.Option(help="Server with a model that grades answers.")] = None,
    judge_prompt: Annotated[
        Path | None, typer.Option(help="File with the question to the judge, with {prompt} and {answer}.")
    ] = None,
    key: Annotated[str | None, typer.Option(help="API key for --embeddings and --judge.")] = None,
    every: Annotated[float, typer.Option(help="--follow: seconds between looks at the directory.")] = 60.0,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Compare captured requests and answers with a reference. Exit 3 if an alarm is raised."""
    from ..flow.watch import follow as following
    from ..flow.watch import models
    from ..flow.watch.drift import Baseline, DriftSettings, check_window
    from ..flow.watch.records import reference_in
    from ..flow.watch.report import write_report

    settings = DriftSettings(window=window, false_alarms=false_alarms, schema_failures=schema_failures)
    found = reference_in(reference)
    current = following.newest_window(directory, settings, version)
    embed: Any = None
    if embeddings is not None:
        embed = models.embed_at(embeddings, key=key)
    elif model != "none":
        embed = models.embed_here(model)
    grade = None
    if judge is not None:
        asked = models.JUDGE if judge_prompt is None else judge_prompt.read_text()
        grade = models.judge_at(judge, key=key, prompt=asked)
    baseline = Baseline.of(found, settings, embed, grade)
    if follow:
        for report in following.follow(directory, baseline, settings, embed, grade, version, every):
            _print(report, json)
    report = check_window(baseline, current, settings, embed, grade)
    write_report(directory, report, 1)
    _print(report, json)
    return ALARMED if report.alarms else 0


def feedback(
    directory: Captures,
    out: Annotated[Path, output_file(help="File of rows to write, JSON lines.")],
    kind: Annotated[Literal["pairs", "labels"], typer.Option(help="pairs for dpo and orpo, labels for kto.")] = "pairs",
    version: Version = "",
) -> int:
    """Write feedback as rows for preference training. Exit 1 if there is none to use."""
    import json

    from ..flow.watch.captures import read
    from ..flow.watch.feedback import feedback_rows

    found = feedback_rows(read(directory), kind, version)
    out.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in found.rows))
    print(f"{len(found.rows)} rows in {out}")
    for reason, count in found.left_out.items():
        print(f"left out {count}: {reason}", file=sys.stderr)
    return 0 if found.rows else 1


def captures(
    directory: Captures,
    delete_user: Annotated[str | None, typer.Option(help="Delete all records of this user id.")] = None,
    client: Annotated[str | None, typer.Option(help="--delete-user: only of the API key of this name.")] = None,
) -> int:
    """Count captured records by version, or delete those of a user."""
    from collections import Counter

    from ..flow.watch import captures as files

    if delete_user is not None:
        if not directory.is_dir():
            raise ValueError(f"there is no directory {directory}: name the --capture-dir of a server")
        print(f"deleted {files.delete_user(directory, delete_user, client)} records")
        return 0
    if client is not None:
        raise ValueError("--client limits --delete-user: give both, or leave it out")
    counts = Counter((str(each.get("model")), str(each.get("kind"))) for each in files.read(directory))
    for (model, kind), count in sorted(counts.items()):
        print(f"{model}: {count} x {kind}")
    size = sum(path.stat().st_size for path in files.segments(directory))
    print(f"{sum(counts.values())} records, {size / 2**20:.1f} MiB")
    return 0


def _print(report: DriftReport, as_json: bool) -> None:
    if as_json:
        import json
        from dataclasses import asdict

        print(json.dumps({**asdict(report), "alarms": report.alarms}), flush=True)
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("test", "reference", "window", "statistic", "p", "alarm at p of", "")
    for test in report.tests:
        sides = ("", "") if test.name.endswith("vectors") else (f"{test.reference:.3g}", f"{test.window:.3g}")
        figures = f"{test.statistic:.4f}", f"{test.p:.2g}", f"{test.level:.2g}"
        table.add_row(test.name, *sides, *figures, "ALARM" if test.alarm else "")
    console = Console()
    console.print(table, markup=False)
    said = ", ".join(report.alarms) or "no alarm"
    console.print(f"{report.observations} requests: {said}", markup=False)
