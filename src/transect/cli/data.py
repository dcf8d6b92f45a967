"""``transect data``: prepare what a model is trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

application = typer.Typer(no_args_is_help=True, help="Prepare training data.", rich_markup_mode=None)


@application.callback()
def data() -> None:
    """Prepare training data."""


@application.command()
def tokenize(
    inputs: Annotated[list[Path], typer.Argument(help="Text files, or JSONL with text or messages.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The token file, a directory ending in .tokens.")],
    model: Annotated[str, typer.Option(help="Whose tokenizer and chat template to use.")] = "smollm2-135m",
    workers: Annotated[int | None, typer.Option(help="Processes; by default one for each core.")] = None,
) -> None:
    """Tokenize files on all cores into a file that training maps. After an interruption, run it again: it continues."""
    from rich.progress import Progress

    from ..train.tokenize import tokenize

    with Progress(transient=True) as bar:
        task = bar.add_task("tokenizing")
        tokens, documents = tokenize(
            inputs, output, model, workers=workers, progress=lambda d, t: bar.update(task, completed=d, total=t)
        )
    print(f"{output}: {tokens:,} tokens in {documents:,} documents")
