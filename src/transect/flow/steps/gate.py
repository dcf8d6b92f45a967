"""The gate: the candidate is measured beside the current model, and stopped unless every measure is within its bars.

A measure compares with a confidence interval: a bar is met if the whole interval is on its good side, so a noisy gain
is not a pass. The level is shared among the measures (Bonferroni), so that many measures do not find a false gain.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ...train.config.parse import build
from ..catalog.models import FlowModel, model_of
from ..digests import file_digest
from ..folder import read_json, write_json
from ..gate.measure import GateMeasure, GateVerdict, Samples
from ..gate.perplexity import TEST
from ..gate.registry import measure_kind, measures
from .step import FlowStep, StepContext, StepOutcome


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowGate:
    """The gate of a flow; each further table in ``[gate]`` is a measure of its own name.

    Attributes:
        confidence: level of all intervals together.
        engine: settings of the engine that answers, as those of ``LLM``: ``max_model_len``, ``device``, ``dtype``.
        checks: measures by name, each with its settings; in the file, a table ``[gate.NAME]`` each.
    """

    confidence: float = 0.95
    engine: dict[str, Any] = field(default_factory=dict, hash=False)
    checks: dict[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if not 0.5 <= self.confidence < 1:
            raise ValueError(f"gate.confidence must be at least 0.5 and less than 1, not {self.confidence}")

    def kinds(self) -> dict[str, tuple[GateMeasure, Any]]:
        """Return the record and the settings of each check, by name."""
        return {name: (measure_kind(kind), settings) for name, (kind, settings) in self.checks.items()}

    def files(self) -> tuple[str, ...]:
        """Return the files of all checks, which must not be trained on."""
        return tuple(dict.fromkeys(file for kind, settings in self.kinds().values() for file in kind.files(settings)))

    def programs(self) -> tuple[str, ...]:
        """Return the files of the user's code that checks run."""
        return tuple(file for kind, settings in self.kinds().values() for file in kind.programs(settings))


def _read(kind: type, values: Mapping[str, Any], where: str) -> FlowGate:
    """Build the settings; a table that is none of them is a check."""
    checks = {}
    plain_values = dict(values)
    for name, table in values.items():
        if name == "engine" or not isinstance(table, Mapping):
            continue
        del plain_values[name]
        entries = dict(table)
        measure = measure_kind_of(name, entries, where)
        try:
            checks[name] = (measure.name, build(measure.settings, entries, f"{where}{name}."))
        except ValueError as error:
            text = str(error)
            raise ValueError(text if f"{where}{name}." in text else f"{where}{name}.{text}") from None
    if "checks" in plain_values:
        raise ValueError(f"the setting {where}checks is not known: give each check a table [{where}NAME]")
    return FlowGate(**{**asdict(build(kind, plain_values, where)), "checks": checks})


def measure_kind_of(name: str, entries: dict[str, Any], where: str) -> GateMeasure:
    """Return the measure of a check, and take its name out of the table: ``measure``, or else the check's own name.

    Raises:
        ValueError: there is no such measure.
    """
    kind = entries.pop("measure", name)
    if kind not in measures():
        hint = f"set {where}{name}.measure" if kind == name else f"{where}{name}.measure cannot be {kind!r}: it must be"
        raise ValueError(f"{hint} {'to ' if kind == name else ''}one of {', '.join(measures())}")
    return measure_kind(kind)


def compared_with(context: StepContext) -> tuple[str, str, FlowModel]:
    """Return name, version and model to compare with: the current version; without one, the base.

    A candidate that is registered already keeps the model that it was compared with then: a flow that is done stays
    done when a later one has promoted another version.
    """
    catalog = context.tables["register"].catalog(context)
    candidate = context.output("train", "digest")
    known = next((each for each in catalog.lineages(context.model) if each["digest"] == candidate), None)
    if known is None:
        found = catalog.current(context.model)
    else:
        found = catalog.version(known["against"]) if known["against"] else None
    if found is not None:
        return found.name, found.name, found.model
    base = context.output("train", "base")
    return base, "", model_of(base)


def _inputs(context: StepContext) -> Mapping[str, Any]:
    settings: FlowGate = context.tables["gate"]
    _, _, current = compared_with(context)
    return {
        "settings": {
            **asdict(settings),
            "checks": {name: [k.name, asdict(s)] for name, (k, s) in settings.kinds().items()},
        },
        "files": {name: file_digest(context.path(name)) for name in (*settings.files(), *settings.programs())},
        "test": context.output("data", "digests", {}).get(TEST),
        "candidate": context.output("train", "digest"),
        "current": current.digest,
    }


def _plan(context: StepContext) -> str:
    settings: FlowGate = context.tables["gate"]
    if not settings.checks:
        return "pass every model: the gate has no checks"
    bars = "; ".join(f"{name}: {kind.describe(bars)}" for name, (kind, bars) in settings.kinds().items())
    against = compared_with(context)[0] if "train" in context.before else "the current model"
    return f"measure against {against} ({bars})"


def _run(context: StepContext) -> StepOutcome:
    settings: FlowGate = context.tables["gate"]
    against, version, current = compared_with(context)
    outputs = {"against": against, "version": version}
    checks = settings.kinds()
    if not checks:
        return StepOutcome("passed: the gate has no checks", outputs=outputs)
    folder = context.file("train", "model")
    assert folder is not None
    candidate = model_of(str(folder), base=context.output("train", "base"))
    samples = _samples(context, checks, candidate, current)
    confidence = 1 - (1 - settings.confidence) / len(checks)
    verdicts: dict[str, GateVerdict] = {}
    for name, (kind, bars) in checks.items():
        try:
            verdicts[name] = kind.judge(samples[name], bars, confidence)
        except ValueError as error:
            raise ValueError(f"gate.{name}: {error}") from None
    failed = [f"{name}: {verdict.reason}" for name, verdict in verdicts.items() if not verdict.passed]
    figures = {name: verdict.to_dict() for name, verdict in verdicts.items()}
    count = f"{len(checks)} check{'s' * (len(checks) != 1)}"
    reason = f"{len(failed)} of {count} against {against} failed: {'. '.join(failed)}"
    if not failed:
        reason = f"passed {count} against {against}"
    return StepOutcome(reason, not failed, figures, outputs)


def _samples(
    context: StepContext, checks: Mapping[str, tuple[GateMeasure, Any]], candidate: FlowModel, current: FlowModel
) -> dict[str, Samples]:
    """Take the samples of every check; those of an earlier run that was killed are kept."""

    def path(name: str) -> Path:
        if name != TEST:
            return context.path(name)
        found = context.file("data", TEST)
        if found is None:
            raise ValueError("the data have no test split: set data.test_share, or gate.perplexity.file")
        return found

    found: dict[str, Samples] = {}
    engines = tested = None
    try:
        for name, (kind, settings) in checks.items():
            file = context.folder / f"samples-{name}.json"
            kept = read_json(file)
            if kept is None:
                context.check_stop()
                if tested is None:
                    from ..gate.subject import AdaptedSubject, TestEngines  # imports the engine, which takes seconds

                    engines = TestEngines([candidate, current], context.tables["gate"].engine)
                    tested = AdaptedSubject(candidate, engines), AdaptedSubject(current, engines)
                context.tell(f"measures {name}")
                try:
                    kept = kind.take(*tested, settings, path)
                except ValueError as error:
                    raise ValueError(f"gate.{name}: {error}") from None
                write_json(kept, file)
            found[name] = kept
            context.show({"measured": f"{len(found)} of {len(checks)}"})
    finally:
        if engines is not None:
            engines.close()
    return found


GATE = FlowStep(name="gate", place=30, settings=FlowGate, inputs=_inputs, plan=_plan, run=_run, read=_read)
