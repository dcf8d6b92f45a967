"""The interface of a step: a record with its settings, its inputs, its plan and its work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ...train.config.parse import build


class InterruptedStep(Exception):
    """A step was asked to stop before its end; it resumes when the flow runs again."""


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """Result of a step.

    Attributes:
        reason: the result in one sentence, with its numbers.
        passed: False stops the chain here.
        figures: numbers and texts to show.
        outputs: plain values for later steps: digests, names.
        files: files and folders for later steps, by name: paths relative to the step's folder.
    """

    reason: str
    passed: bool = True
    figures: Mapping[str, Any] = field(default_factory=dict)
    outputs: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> StepOutcome:
        """Build the outcome from values of ``to_dict``; others are ignored."""
        return cls(values["reason"], values["passed"], values["figures"], values["outputs"], values["files"])


@dataclass(frozen=True, slots=True)
class StepContext:
    """Surroundings of a step.

    Attributes:
        model: name of the model that the flow makes.
        root: folder of the flow's file; relative paths in it start here.
        folder: folder for the step's files, of its inputs alone. What is there when the step starts is from an earlier
            run with the same inputs.
        tables: settings of all steps, by name.
        before: outcomes of earlier steps, by name. In a plan some are missing.
        folders: folders of these steps.
        is_last: no later step has ended.
        tell: prints a line of progress.
        show: replaces the figures of the running step in ``chain.json``.
        should_stop: returns True if the flow was asked to stop; a long step then raises ``InterruptedStep``.
    """

    model: str
    root: Path
    folder: Path
    tables: Mapping[str, Any]
    before: Mapping[str, StepOutcome]
    folders: Mapping[str, Path] = field(default_factory=dict)
    is_last: bool = True
    tell: Callable[[str], None] = lambda line: None
    show: Callable[[Mapping[str, Any]], None] = lambda figures: None
    should_stop: Callable[[], bool] = lambda: False

    def path(self, name: str) -> Path:
        """Return the path of a file that the flow's file names."""
        return self.root / Path(name).expanduser()

    def output(self, step: str, name: str, default: Any = None) -> Any:
        """Return a value that an earlier step has put out; ``default`` if there is none."""
        return self.before[step].outputs.get(name, default) if step in self.before else default

    def file(self, step: str, name: str) -> Path | None:
        """Return the path of a file that an earlier step has made; None if there is none of this name."""
        found = self.before[step].files.get(name) if step in self.before else None
        return None if found is None else self.folders[step] / found

    def check_stop(self) -> None:
        """Raise InterruptedStep if the flow was asked to stop."""
        if self.should_stop():
            raise InterruptedStep


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowStep:
    """The record of a step.

    Attributes:
        name: name in messages, and of its table in the flow's file.
        place: position in the chain; lower runs earlier.
        settings: frozen dataclass of its table.
        inputs: everything that the result depends on, as plain values. The step is skipped if an earlier run has ended
            with equal ones.
        plan: the step's work in one sentence; outcomes of earlier steps may be missing.
        run: the work. After a kill it is called again with the same folder and continues there.
        missing: action for a file without the step's table: run it with ``defaults``, leave it ``out``, or ``refuse``
            the file.
        lost: the reason why the effect of an earlier run is gone, such as a server that has forgotten a model; empty if
            it is still there. A step whose effect is gone runs again, as does one whose files are.
        read: builds the settings from a table; the second argument precedes a key in messages.
    """

    name: str
    place: int
    settings: type
    inputs: Callable[[StepContext], Mapping[str, Any]]
    plan: Callable[[StepContext], str]
    run: Callable[[StepContext], StepOutcome]
    missing: str = "defaults"
    lost: Callable[[StepContext, StepOutcome], str] = lambda context, outcome: ""
    read: Callable[[type, Mapping[str, Any], str], Any] = build
