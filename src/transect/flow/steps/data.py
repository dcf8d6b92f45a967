"""The data of a flow: checked, cleaned, split without leaks, and kept as a version that is named by its content.

A version has three files of JSON lines (``train``, ``validation``, ``test``), with the columns that the trainer reads.
Its name is the hash of the three. Rows with similar questions share a split, so no question of the test is a rewording
of a trained one. Rows that overlap with a benchmark, or with a file of the gate, are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ...train.data.files import find
from ...train.data.layouts import check_columns
from ..digests import file_digest, key_of
from ..folder import write_bytes, write_json
from ..rows.cleaning import SPLITS, DataFindings, group_alike, overlapping, split, without_duplicates
from ..rows.reading import prompts_in, read_rows, write_rows
from .step import FlowStep, StepContext, StepOutcome


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowData:
    """Data of a flow.

    Attributes:
        files: files of rows (JSON, JSON lines, CSV, parquet) or text, relative to the flow's file.
        columns: the files' own names of columns, such as ``{question = "customer question"}``.
        on_bad_row: action for an unusable row: ``stop``, or ``skip`` and count it.
        validation_share: share of rows for the validation loss of the training run.
        test_share: share of rows for the gate's perplexity.
        group: column whose equal values keep rows in one split, such as the id of a user.
        near: Jaccard similarity of two questions, from which they are near-duplicates.
        near_duplicates: ``keep`` them in one split, or ``drop`` all but the first.
        benchmarks: files of questions that must not be trained on. Files of the gate are always among them.
        overlap: action for rows that overlap with a benchmark: ``drop`` them, or ``stop``.
        seed: seed of the split.
    """

    files: tuple[str, ...]
    columns: dict[str, str] = field(default_factory=dict, hash=False)
    on_bad_row: Literal["stop", "skip"] = "stop"
    validation_share: float = 0.1
    test_share: float = 0.1
    group: str = ""
    near: float = 0.8
    near_duplicates: Literal["keep", "drop"] = "keep"
    benchmarks: tuple[str, ...] = ()
    overlap: Literal["drop", "stop"] = "drop"
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.files:
            raise ValueError("data.files names no file: give at least one")
        if not 0 < self.near <= 1:
            raise ValueError(f"data.near is a similarity, more than 0 and at most 1, not {self.near}")
        for name in ("validation_share", "test_share"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"data.{name} is a share, at least 0 and less than 1, not {getattr(self, name)}")
        if self.validation_share + self.test_share >= 1:
            raise ValueError("data.validation_share and data.test_share leave no rows to train on: lower them")
        check_columns(self.columns)


def _benchmarks(context: StepContext) -> tuple[str, ...]:
    """Return the files that must not be trained on: named ones, and those of the gate."""
    gate = context.tables.get("gate")
    return (*context.tables["data"].benchmarks, *(gate.files() if gate is not None else ()))


def _inputs(context: StepContext) -> Mapping[str, Any]:
    settings: FlowData = context.tables["data"]
    names = {name: context.path(name) for name in (*settings.files, *_benchmarks(context))}
    for name, path in names.items():
        if not path.exists():
            place = "data.files" if name in settings.files else "data.benchmarks or the gate"
            raise ValueError(f"there is no file {path}: correct {place}")
    digests = {
        name: [file_digest(file) for file in sorted(path.rglob("*")) if file.is_file()]
        if path.is_dir()
        else file_digest(path)
        for name, path in names.items()
    }
    return {"settings": asdict(settings), "files": digests}


def _plan(context: StepContext) -> str:
    settings: FlowData = context.tables["data"]
    shares = f"{settings.validation_share:.0%} for validation and {settings.test_share:.0%} for the test"
    count = len(_benchmarks(context))
    against = f", leave out what overlaps with {count} benchmark file{'s' * (count != 1)}" if count else ""
    return f"check {', '.join(settings.files)}{against}, and split {shares}"


def _run(context: StepContext) -> StepOutcome:
    settings: FlowData = context.tables["data"]
    bad: Counter[str] = Counter()
    skipped = bad if settings.on_bad_row == "skip" else None
    names = [str(context.path(name)) for name in settings.files]
    files = find(names, "data.files")
    rows = list(read_rows(names, settings.columns, settings.group, skipped))
    if not rows:
        raise ValueError(f"{', '.join(settings.files)} hold no row that can be used: correct data.files")
    found = DataFindings()
    count = len(rows)
    context.check_stop()
    rows = without_duplicates(rows, found)
    questions = [text for name in _benchmarks(context) for text in prompts_in(context.path(name))]
    hits = overlapping(rows, questions, settings.near, found)
    if hits and settings.overlap == "stop":
        raise ValueError(
            f"{len(hits)} rows overlap with benchmarks ({found.examples['overlap'][0]}): remove them, or set "
            'data.overlap = "drop"'
        )
    rows = [row for index, row in enumerate(rows) if index not in hits]
    if not rows:
        raise ValueError("every row overlaps with a benchmark: give other data.files or gate files")
    context.check_stop()
    groups = group_alike(rows, settings.near, found)
    if settings.near_duplicates == "drop":
        kept = [index for index, group in enumerate(groups) if group == index]
        rows, groups = [rows[index] for index in kept], list(range(len(kept)))
    lots = split(rows, groups, (settings.validation_share, settings.test_share), settings.seed)
    parts = {name: [row for row, lot in zip(rows, lots, strict=True) if lot == name] for name in SPLITS}
    contents = {name: write_rows(part) for name, part in parts.items()}
    version = key_of([contents[name].decode() for name in SPLITS])
    for name, content in contents.items():
        write_bytes(content, context.folder / f"{name}.jsonl")
    figures = {
        "rows": count,
        "files": len(files),
        "layout": rows[0].layout,
        **{name: len(part) for name, part in parts.items()},
        "bad rows": sum(bad.values()),
        "duplicates": found.duplicates,
        "near-duplicates": found.near,
        "overlap": found.overlap,
        "conflicts": found.conflicts,
    }
    write_json(
        {**figures, "version": version, "bad": dict(bad), "examples": found.examples}, context.folder / "report.json"
    )
    dropped = [f"{figures[name]} {name}" for name in ("bad rows", "duplicates", "overlap") if figures[name]]
    left = f"; left out: {', '.join(dropped)}" if dropped else ""
    counts = ", ".join(f"{len(part)} {name}" for name, part in parts.items())
    return StepOutcome(
        reason=f"version {version}: {counts}{left}; {found.near} near-duplicates",
        figures=figures,
        outputs={
            "version": version,
            "layout": rows[0].layout,
            "digests": {name: key_of(contents[name].decode()) for name in SPLITS},
        },
        files={name: f"{name}.jsonl" for name in SPLITS if parts[name]},
    )


DATA = FlowStep(
    name="data", place=10, settings=FlowData, inputs=_inputs, plan=_plan, run=_run, missing="refuse"
)  # fmt: skip
