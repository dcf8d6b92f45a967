"""Progress bar of a loading model, on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..costs.model import weight_bytes
from ..costs.storage import Storage
from .resolve import ModelSource


@contextmanager
def progress(source: ModelSource) -> Iterator[Callable[[int], object]]:
    """Show a progress bar if stderr is a terminal; yield a function to call with each weight's bytes."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("loading"), *Progress.get_default_columns(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(source.name, total=weight_bytes(source.config, Storage()))
        yield lambda count: bar.advance(task, count)
