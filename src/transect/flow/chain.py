"""The chain of a flow: runs its steps in order, skips those whose inputs did not change, resumes after a kill.

A step's key is the hash of its name and inputs: settings, contents of files, digests of earlier outcomes. If an outcome
with that key exists, the step is skipped. Else its work starts, or continues, in a folder of that key. A step that does
not pass ends the chain; a failed one too, with the error as reason.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .digests import differences, key_of
from .folder import FlowFolder
from .settings import FlowConfig
from .steps.registry import steps as all_steps
from .steps.step import FlowStep, InterruptedStep, StepContext, StepOutcome

WAITING, RUNNING, DONE, STOPPED, FAILED, LEFT_OUT = "waiting", "running", "done", "stopped", "failed", "left out"


@dataclass(slots=True)
class StepState:
    """State of a step in ``chain.json``.

    Attributes:
        state: ``waiting``, ``running``, ``done``, ``stopped`` (it did not pass), ``failed`` or ``left out``.
        key: hash of its inputs; empty if they are not known yet.
        kept: the outcome is of an earlier run.
        began: Unix time of the start, in seconds; 0 if it has not started.
        seconds: duration; of all attempts that were not killed.
        problem: text of the error of a failed step.
        outcome: result, and figures while it runs.
        inputs: inputs with this key.
    """

    name: str
    state: str = WAITING
    key: str = ""
    kept: bool = False
    began: float = 0.0
    seconds: float = 0.0
    problem: str = ""
    outcome: dict[str, Any] = field(default_factory=dict)
    inputs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """An entry of a plan: ``action`` is ``skip``, ``run``, ``resume``, ``repeat`` or ``leave out``; ``reason`` says
    why."""

    name: str
    action: str
    work: str
    reason: str


class FlowChain:
    """A flow that runs.

    Args:
        steps: in their order; None for all that are shipped.
        tell: prints a line of progress.
        should_stop: returns True if the process was asked to end.
    """

    def __init__(
        self,
        config: FlowConfig,
        steps: Mapping[str, FlowStep] | None = None,
        tell: Callable[[str], None] = print,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.config = config
        self.folder = FlowFolder(config.folder)
        self._steps = all_steps() if steps is None else steps
        self._tell, self._should_stop = tell, should_stop

    def plan(self) -> list[PlannedStep]:
        """List what a run would do, without writing anything.

        Raises:
            ValueError: an input cannot be read.
        """
        earlier = self._earlier()
        outcomes: dict[str, StepOutcome] = {}
        found: list[PlannedStep] = []
        unknown = stopped = ""
        last = self._last_kept()
        folders: dict[str, Path] = {}
        for step in self._steps.values():
            if step.name not in self.config.tables:
                found.append(PlannedStep(step.name, "leave out", "", f"the file has no table [{step.name}]"))
                continue
            context = self._context(step, outcomes, folders)
            if stopped:
                found.append(PlannedStep(step.name, "leave out", "", f"{stopped} does not pass"))
                continue
            if unknown:
                found.append(PlannedStep(step.name, "run", step.plan(context), f"{unknown} runs before it"))
                continue
            inputs = plain(step.inputs(context))
            key = key_of([step.name, inputs])
            kept = self.folder.outcome(step.name, key)
            if kept is not None:
                outcome = StepOutcome.from_dict(kept)
                seen = self._context(step, outcomes, folders, key, is_last=step.name == last)
                try:
                    reason = self._lost(step, seen, outcome)
                except ValueError as error:  # a server that is away: a plan says so, and a run fails
                    reason = str(error)
                if not reason:
                    outcomes[step.name], folders[step.name] = outcome, self.folder.work(step.name, key)
                    found.append(PlannedStep(step.name, "skip", outcome.reason, "its inputs did not change"))
                    stopped = "" if outcome.passed else step.name
                    continue
                found.append(PlannedStep(step.name, "repeat", step.plan(context), reason))
            elif self.folder.work(step.name, key).exists():
                found.append(PlannedStep(step.name, "resume", step.plan(context), "an earlier run did not finish it"))
            else:
                old = earlier.get(step.name, {}).get("inputs")
                changed = differences(old, inputs) if old else []
                reason = f"changed: {', '.join(changed)}" if changed else "it has not run with these inputs"
                found.append(PlannedStep(step.name, "run", step.plan(context), reason))
            unknown = step.name
        return found

    def run(self) -> list[StepState]:
        """Run what is not done yet, and return the states of all steps.

        Raises:
            ValueError: a step failed; its state has the message too.
            InterruptedStep: ``should_stop`` returned True; the next run resumes.
        """
        with self.folder.locked():
            last = self._last_kept()
            states = [StepState(name, WAITING if name in self.config.tables else LEFT_OUT) for name in self._steps]
            outcomes: dict[str, StepOutcome] = {}
            folders: dict[str, Path] = {}
            for state in states:
                if state.state == LEFT_OUT:
                    continue
                outcome = self._advance(state, states, outcomes, folders, last)
                outcomes[state.name], folders[state.name] = outcome, self.folder.work(state.name, state.key)
                if not outcome.passed:
                    break
            self._write(states)
            return states

    def _advance(
        self,
        state: StepState,
        states: list[StepState],
        outcomes: Mapping[str, StepOutcome],
        folders: Mapping[str, Path],
        last: str,
    ) -> StepOutcome:
        """Run or skip one step; raises as ``run``."""
        step = self._steps[state.name]
        began = time.time()
        try:
            if self._should_stop():
                raise InterruptedStep
            state.inputs = plain(step.inputs(self._context(step, outcomes, folders)))
            state.key = key_of([step.name, state.inputs])
            context = self._context(step, outcomes, folders, state.key, states, state, step.name == last)
            kept = self.folder.outcome(step.name, state.key)
            if kept is not None:
                outcome = StepOutcome.from_dict(kept)
                reason = self._lost(step, context, outcome)
                if not reason:
                    state.began, state.seconds, state.kept = kept.get("began", 0.0), kept.get("seconds", 0.0), True
                    self._end(state, outcome)
                    return outcome
                self.folder.tell(step=step.name, event="repeat", reason=reason)
                self._tell(f"{step.name}: again, because {reason}")
            state.state, state.began = RUNNING, began
            self._write(states)
            self.folder.tell(step=step.name, event="start", key=state.key, work=step.plan(context))
            self._tell(f"{step.name}: {step.plan(context)}")
            outcome = StepOutcome(**plain(step.run(context).to_dict()))
        except InterruptedStep:
            state.state, state.problem = WAITING, "interrupted"
            self._write(states)
            raise
        except Exception as error:
            state.state, state.problem = FAILED, str(error)
            self._note_failure(states, step.name, error)
            raise
        state.seconds = time.time() - began
        self.folder.write_outcome(
            step.name,
            state.key,
            {**outcome.to_dict(), "inputs": state.inputs, "began": state.began, "seconds": state.seconds},
        )
        self._end(state, outcome)
        self._write(states)
        self.folder.tell(step=step.name, event="end", passed=outcome.passed, reason=outcome.reason)
        self._tell(f"{step.name}: {outcome.reason}")
        return outcome

    @staticmethod
    def _end(state: StepState, outcome: StepOutcome) -> None:
        state.state, state.outcome = DONE if outcome.passed else STOPPED, outcome.to_dict()

    def _note_failure(self, states: list[StepState], name: str, error: Exception) -> None:
        """Record a failure; a disk that refuses this too must not hide the first error."""
        try:
            self._write(states)
            self.folder.tell(step=name, event="failed", reason=str(error))
        except ValueError:
            self._tell(f"{name}: its failure could not be recorded in {self.folder.path}")

    def _context(
        self,
        step: FlowStep,
        outcomes: Mapping[str, StepOutcome],
        folders: Mapping[str, Path],
        key: str = "",
        states: list[StepState] | None = None,
        state: StepState | None = None,
        is_last: bool = True,
    ) -> StepContext:
        def show(figures: Mapping[str, Any]) -> None:
            assert states is not None and state is not None
            state.outcome = {"figures": plain(figures)}
            self._write(states)

        return StepContext(
            model=self.config.name,
            root=self.config.path.parent,
            folder=self.folder.work(step.name, key),
            tables=self.config.tables,
            before=dict(outcomes),
            folders=dict(folders),
            is_last=is_last,
            tell=lambda line: self._tell(f"{step.name}: {line}"),
            show=show if state is not None else lambda figures: None,
            should_stop=self._should_stop,
        )

    @staticmethod
    def _lost(step: FlowStep, context: StepContext, outcome: StepOutcome) -> str:
        """Return the reason why a kept outcome cannot be used; empty if it can."""
        missing = [name for name in outcome.files.values() if not (context.folder / name).exists()]
        return f"{context.folder / missing[0]} is missing" if missing else step.lost(context, outcome)

    def _write(self, states: list[StepState]) -> None:
        self.folder.write_chain(
            {
                "name": self.config.name,
                "file": str(self.config.path),
                "updated": time.time(),
                "steps": [dataclasses.asdict(state) for state in states],
            }
        )

    def _earlier(self) -> dict[str, dict[str, Any]]:
        """Return the states of the latest run, by name of the step."""
        chain = self.folder.chain() or {}
        return {state["name"]: state for state in chain.get("steps", [])}

    def _last_kept(self) -> str:
        """Return the name of the last step that would be skipped."""
        outcomes: dict[str, StepOutcome] = {}
        folders: dict[str, Path] = {}
        last = ""
        for step in self._steps.values():
            if step.name not in self.config.tables:
                continue
            try:
                inputs = plain(step.inputs(self._context(step, outcomes, folders)))
            except ValueError:  # the run itself reports it, in the step's turn
                break
            key = key_of([step.name, inputs])
            kept = self.folder.outcome(step.name, key)
            if kept is None:
                break
            outcomes[step.name], folders[step.name] = StepOutcome.from_dict(kept), self.folder.work(step.name, key)
            last = step.name
            if not outcomes[step.name].passed:
                break
        return last


def plain(values: Any) -> Any:
    """Return values as JSON would return them: tuples as lists, paths as text, keys as text."""
    return json.loads(json.dumps(values, default=str))
