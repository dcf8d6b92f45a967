"""The watch: the candidate and the current version are compared in production, until the rule decides.

Counters come from the server's ``/metrics``. Their growth is kept in the step's folder, so neither a restart of the
server nor a kill of the flow loses requests that were seen. A server that has lost the release gets it again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..rollout.drifted import DriftCondition
from ..rollout.remote import Counts, RemoteServer, ServerUnreachable
from ..rollout.rule import PROMOTE, ROLL_BACK, WAIT, CanaryBars, CanaryLook, look
from ..rollout.tally import VersionTally
from ..watch.report import DRIFT_ALARMS
from .release import canary_shares, differs, release_name, serve
from .step import FlowStep, StepContext, StepOutcome

NAP_S = 0.2
"""Longest sleep between two checks for a request to stop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowWatch(CanaryBars):
    """The watch of a flow's release.

    Attributes:
        requests: requests of the candidate until the last look.
        looks: looks in all, after equal numbers of requests. A candidate that is surely worse is rolled back at any.
        confidence: level of all looks together.
        every_s: seconds between two readings of the counters.
        most_s: seconds after which the last look is taken, however few the requests.
        outage_s: seconds that the server may be away before the flow fails; it can be run again.
        captures: the server's ``--capture-dir``. With it the last look tests the candidate's captures for drift, as
            ``transect flow watch`` does; an alarm, or fewer than 16 captured requests, rolls the candidate back.
        reference: training data, or captures of a good time, to compare with; empty for the captures of the current
            version.
        drift: alarms that forbid a promotion.
        drift_model: model for vectors of texts, run here; empty for no tests of vectors.
        drift_window: newest captured requests of the candidate that are tested, one of each user and conversation.
        false_alarms: probability that the tests find drift where there is none.
    """

    requests: int = 200
    looks: int = 4
    confidence: float = 0.95
    every_s: float = 5.0
    most_s: float = 86400.0
    outage_s: float = 120.0
    captures: str = ""
    reference: str = ""
    drift: tuple[str, ...] = ("PromptDrift", "PromptLengthDrift", "RefusalDrift", "SchemaFailures")
    drift_model: str = ""
    drift_window: int = 256
    false_alarms: float = 1e-3

    def __post_init__(self) -> None:
        super(FlowWatch, self).__post_init__()
        for name in ("requests", "looks"):
            if getattr(self, name) < 1:
                raise ValueError(f"watch.{name} must be at least 1, not {getattr(self, name)}")
        if not 0.5 <= self.confidence < 1:
            raise ValueError(f"watch.confidence must be at least 0.5 and less than 1, not {self.confidence}")
        for name in ("every_s", "most_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"watch.{name} must be more than 0 seconds, not {getattr(self, name)}")
        if not self.outage_s >= 0:
            raise ValueError(f"watch.outage_s must be 0 seconds or more, not {self.outage_s}")
        if self.reference and not self.captures:
            raise ValueError("watch.reference is compared with captures: set watch.captures to the server's directory")
        known = set(DRIFT_ALARMS.values()) - {"JudgeScoreDrop"}  # a watch of a flow has no judge
        if unknown := set(self.drift) - known:
            raise ValueError(f"watch.drift has no alarm {min(unknown)!r}: choose from {', '.join(sorted(known))}")
        if not 0 < self.false_alarms < 1:
            raise ValueError(f"watch.false_alarms must be between 0 and 1, not {self.false_alarms}")


def _inputs(context: StepContext) -> Mapping[str, Any]:
    hidden = ("every_s", "outage_s")
    return {
        "settings": {name: value for name, value in asdict(context.tables["watch"]).items() if name not in hidden},
        "weights": context.output("release", "weights"),
        "version": context.output("register", "digest"),
    }


def _plan(context: StepContext) -> str:
    settings: FlowWatch = context.tables["watch"]
    bars = ", ".join(f"{name} +{bar:.0%}" for name, bar in settings.used().items()) or "no bars"
    bars += f"; no drift in {settings.captures}" if settings.captures else ""
    return f"watch {settings.requests} requests of the candidate in {settings.looks} looks ({bars})"


def _run(context: StepContext) -> StepOutcome:
    if "release" not in context.tables:
        raise ValueError("[watch] watches a release: add a table [release], or leave [watch] out")
    settings: FlowWatch = context.tables["watch"]
    if settings.captures and not context.path(settings.captures).is_dir():
        raise ValueError(
            f"watch.captures: there is no directory {context.path(settings.captures)}: name the --capture-dir of the "
            "server that [release] names, or leave it out"
        )
    tally = VersionTally(context.folder / "counts.json")
    with context.tables["release"].remote() as server:
        verdict = _watch(context, server, tally)
    figures = {"seconds": round(tally.seconds, 1), "looks": len(tally.looks), **_shown(context, tally)}
    return StepOutcome(
        reason=f"{verdict.action} after {len(tally.looks)} looks: {verdict.reason}",
        figures={**figures, "rates": verdict.rates, **({"drift": verdict.drift} if verdict.drift else {})},
        outputs={"action": verdict.action, "reason": verdict.reason},
    )


def _watch(context: StepContext, server: RemoteServer, tally: VersionTally) -> CanaryLook:
    """Read the counters until a look decides."""
    settings: FlowWatch = context.tables["watch"]
    name, shares = release_name(context), canary_shares(context)
    weights = context.output("release", "weights")
    seen = last = time.monotonic()
    while True:
        try:
            if reason := differs(server, name, weights):
                context.tell(f"releases the versions again, because {reason}")
                serve(context, server, shares)
            counts = server.counts(name)
            seen = time.monotonic()
        except ServerUnreachable as error:
            if time.monotonic() - seen > settings.outage_s:
                raise
            context.tell(str(error))
        else:
            grown = tally.add(counts, seen - last)
            last = seen
            verdict = _take_look(context, tally)
            if verdict is not None and verdict.action != WAIT:
                tally.write()
                return verdict
            if grown or verdict is not None or not tally.counts:
                tally.write()
                context.show(_shown(context, tally))
        _sleep(context, settings.every_s)


def _take_look(context: StepContext, tally: VersionTally) -> CanaryLook | None:
    """Look at the counts if enough requests have come since the last look."""
    settings: FlowWatch = context.tables["watch"]
    current, candidate = _pair(context, tally)
    due = settings.requests * (len(tally.looks) + 1) / settings.looks
    late = tally.seconds >= settings.most_s
    if candidate.get("requests", 0) < due and not late:
        return None
    last = late or len(tally.looks) + 1 >= settings.looks
    level = 1 - (1 - settings.confidence) / settings.looks
    found = look(candidate, current, settings, level, last=last)
    if found.action == PROMOTE and settings.captures:
        found = _without_drift(context, found)
    tally.looks.append({"action": found.action, "reason": found.reason, "seconds": tally.seconds, "rates": found.rates})
    if found.action == WAIT:
        context.tell(f"look {len(tally.looks)} of {settings.looks}: {found.reason}")
    return found


def _without_drift(context: StepContext, found: CanaryLook) -> CanaryLook:
    """Return a look that promotes, or one that rolls back because the candidate's captures have drifted."""
    settings: FlowWatch = context.tables["watch"]
    condition = DriftCondition(
        captures=context.path(settings.captures),
        reference=context.path(settings.reference) if settings.reference else None,
        alarms=settings.drift, model=settings.drift_model, window=settings.drift_window,
        false_alarms=settings.false_alarms,
    )  # fmt: skip
    reason, tests = condition.check(context.output("release", "candidate"), context.output("release", "current"))
    return CanaryLook(ROLL_BACK if reason else PROMOTE, reason or f"{found.reason}; no drift", found.rates, tests)


def _pair(context: StepContext, tally: VersionTally) -> tuple[Counts, Counts]:
    """Return the counts of the current version and of the candidate."""
    current, candidate = context.output("release", "current"), context.output("release", "candidate")
    return tally.counts.get(current, {}), tally.counts.get(candidate, {})


def _shown(context: StepContext, tally: VersionTally) -> dict[str, Any]:
    current, candidate = _pair(context, tally)
    return {
        "candidate requests": candidate.get("requests", 0),
        "current requests": current.get("requests", 0),
        "looks": len(tally.looks),
    }


def _sleep(context: StepContext, seconds: float) -> None:
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        context.check_stop()
        time.sleep(min(left, NAP_S))
    context.check_stop()


WATCH = FlowStep(name="watch", place=60, settings=FlowWatch, inputs=_inputs, plan=_plan, run=_run, missing="out")
