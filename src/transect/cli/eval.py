"""``transect eval``: perplexity of text files, and tasks of lm-evaluation-harness, through the engine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..spec.numbers.registry import listed, roundings
from .engine_options import WHERE_IT_RUNS, ModelArgument, engine_config, engine_settings, takes
from .settings import output_file

if TYPE_CHECKING:
    from ..engine.frontends.llm import LLM


@takes(*engine_settings(*WHERE_IT_RUNS, "adapter", "max_model_len", "max_num_seqs"))
def command(
    model: ModelArgument,
    text: Annotated[list[Path] | None, typer.Option(help="A text file to predict; repeatable.")] = None,
    tasks: Annotated[str | None, typer.Option(help="Tasks of the harness, comma-separated.")] = None,
    window: Annotated[int | None, typer.Option(help="--text: tokens of a window; default: the context.")] = None,
    stride: Annotated[int | None, typer.Option(help="--text: tokens between windows; default: half of one.")] = None,
    include: Annotated[Path | None, typer.Option(help="--tasks: a folder with task files of your own.")] = None,
    few_shot: Annotated[int | None, typer.Option(help="--tasks: examples before each question.")] = None,
    limit: Annotated[int | None, typer.Option(help="--tasks: questions of each task.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="--tasks: put questions into the chat template.")] = False,
    formats: Annotated[
        str | None,
        typer.Option(
            help=f"--text: compare number formats: plain, {listed(roundings(), 'and')}, and those of quantize."
        ),
    ] = None,
    calibrate: Annotated[
        Path | None, typer.Option(help="--formats: also those of 4 to 6 bits calibrated with this text.")
    ] = None,
    calibrate_tokens: Annotated[int, typer.Option(help="--calibrate: number of tokens to read.")] = 16384,
    plot: Annotated[Path | None, output_file(help="--formats: a picture, perplexity over bits.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    **settings: Any,
) -> None:
    """Measure perplexity on a text (--text), benchmark tasks (--tasks), or both."""
    if not text and not tasks:
        raise ValueError("say what to measure: --text FILE, or --tasks NAME,...")
    names = [name.strip() for name in tasks.split(",")] if tasks else []
    if names:
        from ..train.evaluation import harness  # noqa: F401  (says what is missing before a model is loaded)
    for path in text or ():
        if not path.is_file():
            raise ValueError(f"there is no file {path}")
    if formats is not None:
        meant = {"--tasks": tasks, "--stride": stride, "--adapter": settings.pop("adapter")}
        meant["--quantization"] = settings.pop("quantization")
        if others := [option for option, value in meant.items() if value is not None]:
            raise ValueError(
                f"{', '.join(others)} has no effect with --formats, which compares a model as it is: leave it out"
            )
        given = {name: value for name, value in settings.items() if value is not None}
        _formats(model, formats, text, window, given, plot, json, calibrate, calibrate_tokens)
        return
    if calibrate is not None:
        raise ValueError("--calibrate goes with --formats: give both, or transect quantize --calibrate")
    from dataclasses import fields

    from ..engine.frontends.llm import LLM

    adapter = settings["adapter"]
    config = engine_config(model, **settings, enable_prefix_caching=bool(names))
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    llm = LLM(values.pop("model"), **values)
    found: dict[str, Any] = {"model": model, **({"adapter": adapter} if adapter else {}), "kernels": llm.kernels}
    if text:
        found["text"] = _texts(llm, text, window, stride)
    if names:
        from ..train.evaluation.harness import run_tasks

        found["tasks"] = run_tasks(llm, model, names, include=include, few_shot=few_shot, limit=limit, chat=chat)
    if json:
        from json import dumps

        print(dumps(found, indent=1, default=str))
    else:
        _show(found)


def _formats(
    model: str,
    names: str,
    text: list[Path] | None,
    window: int | None,
    engine: dict[str, Any],
    plot: Path | None,
    json: bool,
    calibrate: Path | None,
    calibrate_tokens: int,
) -> None:
    """Compare all formats in one table. ``engine``: settings of the measuring ``LLM``, including its dtype."""
    from dataclasses import asdict

    from ..bench.compare_formats import draw, formats_of, measure_all
    from ..train.export.quantize import Calibration, takes_calibration

    if not text or len(text) > 1:
        raise ValueError("--formats compares on one text: give one --text FILE")
    if calibrate is not None and not calibrate.is_file():
        raise ValueError(f"there is no file {calibrate}")
    calibration = None if calibrate is None else Calibration(calibrate, calibrate_tokens)
    wanted = formats_of(names)
    if calibration is not None and not any(map(takes_calibration, wanted)):
        raise ValueError(
            f"--calibrate changes none of {', '.join(wanted)}: name a format of 4 to 6 bits, or leave it out"
        )
    dtype = engine.pop("dtype")
    found = measure_all(model, wanted, text[0], window=window, dtype=dtype, calibration=calibration, engine=engine)
    rows = list(found)
    if plot is not None:
        draw(rows, plot, model)
    if json:
        from json import dumps

        print(dumps([asdict(row) for row in rows], indent=1))
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{model} on {text[0]}", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("format", "perplexity", "95% interval", "bits a weight", "tokens/s", "MB of weights"):
        table.add_column(column, justify="left" if column == "format" else "right")
    for row in rows:
        between = f"{row.low:.3f} to {row.high:.3f}"
        speed = f"{row.tokens_per_second:.1f}"
        table.add_row(row.format, f"{row.perplexity:.3f}", between, f"{row.bits:.2f}", speed, f"{row.megabytes:.1f}")
    Console().print(table, highlight=False)


def _texts(llm: LLM, paths: list[Path], window: int | None, stride: int | None) -> dict[str, dict[str, float]]:
    from ..train.evaluation.perplexity import score_file

    scores = {str(path): score_file(llm, path, window=window, stride=stride) for path in paths}
    if len(scores) > 1:
        first, *others = scores.values()
        scores["all"] = sum(others, first)
    return {
        name: {
            "perplexity": score.perplexity,
            "bits_per_byte": score.bits_per_byte,
            "tokens": score.predicted,
            "bytes": score.size,
        }
        for name, score in scores.items()
    }


def _show(found: dict[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if "text" in found:
        table = Table(title="text", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        for column in ("file", "perplexity", "bits per byte", "tokens", "bytes"):
            table.add_column(column, justify="left" if column == "file" else "right")
        for name, row in found["text"].items():
            numbers = (f"{row['perplexity']:.4f}", f"{row['bits_per_byte']:.4f}", str(row["tokens"]), str(row["bytes"]))
            table.add_row(name, *numbers)
        console.print(table, highlight=False)
    if "tasks" in found:
        table = Table(title="tasks", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        for column in ("task", "metric", "value"):
            table.add_column(column, justify="right" if column == "value" else "left")
        for task, metrics in found["tasks"].items():
            for key, value in metrics.items():
                metric, _, filtered = key.partition(",")
                if filtered and isinstance(value, (int, float)) and not metric.endswith("_stderr"):
                    table.add_row(task, metric if filtered == "none" else f"{metric} ({filtered})", f"{value:.4f}")
        console.print(table, highlight=False)
