"""Measured runs in a folder: the decision log of their server, and the clients' records, so that predictions can be
made again on another machine (``validation.py again``). Both files grow by a gzip member after each run."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import _paths  # noqa: F401
from transect.bench.levels import Level, Result
from transect.bench.load import Record, Run
from transect.bench.summary import summarize
from transect.engine.scheduling.decisions import read_records
from transect.explain.engine.log import DecisionRunLog, build

LOG, RUNS = "decisions.log.gz", "runs.jsonl.gz"


class KeptRuns:
    """The files of one server.

    Args:
        folder: None to keep nothing.
        log: the decision log that the server writes.
    """

    def __init__(self, folder: Path | None, log: Path) -> None:
        self._folder, self._log, self._taken = folder, log, 0
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            for name in (LOG, RUNS):
                (folder / name).unlink(missing_ok=True)

    def add(self, result: Result, **facts: Any) -> None:
        """Append a run, with facts by which its requests can be drawn again."""
        if self._folder is None:
            return
        records = [
            [each.due, each.sent, each.ended, each.input_tokens, each.output_tokens, each.error, *each.moments]
            for each in result.records
        ]
        level = [result.level.unit, result.level.value]
        row = facts | {"level": level, "began": result.began, "seconds": result.summary["seconds"], "records": records}
        text = json.dumps(row, separators=(",", ":"))
        with gzip.open(self._folder / RUNS, "at") as file:
            file.write(text + "\n")
        self.add_log()

    def add_log(self) -> None:
        """Append the new part of the decision log. The last second may come later."""
        if self._folder is not None and self._log.exists():
            with self._log.open("rb") as source:
                source.seek(self._taken)
                new = source.read()
            self._taken += len(new)
            with gzip.open(self._folder / LOG, "ab", compresslevel=3) as target:
                target.write(new)


def kept_runs(folder: Path) -> Iterator[tuple[dict[str, Any], Result]]:
    """Yield the facts and the result of each kept run."""
    with gzip.open(folder / RUNS, "rt") as lines:
        for line in lines:
            row = json.loads(line)
            records = [
                Record(due, sent, moments, ended, prompt, output, error)
                for due, sent, ended, prompt, output, error, *moments in row.pop("records")
            ]
            run = Run(records, row.pop("seconds"), 0.0, row.pop("began"))
            unit, value = row.pop("level")
            yield row, Result(Level(unit, value, []), summarize(run), records, run.began)


def kept_log(folder: Path, until: float) -> DecisionRunLog:
    """Read the kept decision log as it was at a moment of the engine's clock."""
    records = read_records(gzip.decompress((folder / LOG).read_bytes()))
    return build(each for each in records if getattr(each, "at", 0.0) < until)
