"""The end of a flow: the candidate becomes the current version, or is rolled back, with the reason written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..rollout.rule import PROMOTE as PROMOTE_IT
from .release import current_version, differs, release_name, serve
from .step import FlowStep, StepContext, StepOutcome


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowPromotion:
    """The promotion of a flow's model.

    Attributes:
        automatic: promote by the rule of the watch, or by the gate where there is no watch; false leaves the candidate
            as it is, for a person to promote by running the flow with ``--set promote.automatic=true``.
    """

    automatic: bool = True


def _decision(context: StepContext) -> tuple[bool, str]:
    """Return True to promote, and the reason."""
    if "watch" in context.before:
        return context.output("watch", "action") == PROMOTE_IT, str(context.output("watch", "reason"))
    return True, f"the gate {context.before['gate'].reason}, and the flow has no [watch]"


def _inputs(context: StepContext) -> Mapping[str, Any]:
    return {
        "settings": asdict(context.tables["promote"]),
        "version": context.output("register", "version"),
        "digest": context.output("register", "digest"),
        "promote": list(_decision(context)),
        "release": context.output("release", "weights"),
    }


def _plan(context: StepContext) -> str:
    if not context.tables["promote"].automatic:
        return "leave the candidate for a person to promote"
    if "gate" not in context.before and "watch" not in context.tables:
        return "promote the candidate if it passes the gate"
    if "watch" not in context.before and "watch" in context.tables:
        return "promote the candidate or roll it back, by the rule of the watch"
    return "promote the candidate" if _decision(context)[0] else "roll the candidate back"


def _shares(context: StepContext, promoted: bool) -> dict[str, float]:
    return {str(context.output("register", "version")) if promoted else current_version(context): 1.0}


def _lost(context: StepContext, outcome: StepOutcome) -> str:
    if not context.tables["promote"].automatic:
        return ""  # else checked always: a new watch has given the candidate its share again
    catalog = context.tables["register"].catalog(context)
    current = catalog.current(context.model)
    promoted, version = outcome.passed, str(context.output("register", "version"))
    if promoted and (current is None or current.name != version):
        return ""  # a later flow has promoted another version
    if "release" not in context.tables:
        return ""
    with context.tables["release"].remote() as server:
        if not promoted:
            return f"{version} has traffic again" if server.weights(release_name(context)).get(version) else ""
        return differs(server, release_name(context), {version: 1.0})


def _run(context: StepContext) -> StepOutcome:
    version = str(context.output("register", "version"))
    if not context.tables["promote"].automatic:
        return StepOutcome(f"{version} waits for a person: run the flow with --set promote.automatic=true")
    promoted, reason = _decision(context)
    if "release" in context.tables:
        with context.tables["release"].remote() as server:
            serve(context, server, _shares(context, promoted))
    catalog = context.tables["register"].catalog(context)
    found = catalog.version(version)
    assert found is not None
    if promoted:
        catalog.promote(found, reason)
        return StepOutcome(f"{version} is the current version: {reason}", outputs={"current": version})
    catalog.reject(found, reason)
    back = current_version(context) or "the base"
    return StepOutcome(f"{version} was rolled back to {back}: {reason}", passed=False, outputs={"current": back})


PROMOTE = FlowStep(name="promote", place=70, settings=FlowPromotion, inputs=_inputs, plan=_plan, run=_run, lost=_lost)
