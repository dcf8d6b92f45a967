"""The release of a candidate beside the current version, as a canary: it gets a share of the traffic of a name."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..rollout.remote import RemoteServer
from .step import FlowStep, StepContext, StepOutcome

CLOSE = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowRelease:
    """The release of a flow's model. Without this table the gate alone decides.

    Attributes:
        server: address of a server that was started with ``--enable-lora`` and ``--allowed-lora-dir``.
        name: name that clients give as ``model``; empty for the flow's name.
        share: share of the traffic for the candidate.
        key_variable: environment variable with the operator's key.
        timeout_s: seconds to wait for an answer of the server.
    """

    server: str = "http://127.0.0.1:8000"
    name: str = ""
    share: float = 0.1
    key_variable: str = "TRANSECT_ADMIN_API_KEY"
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        if not self.server.startswith(("http://", "https://")):
            raise ValueError(f"release.server must begin with http:// or https://, not {self.server!r}")
        if not 0 < self.share < 1:
            raise ValueError(f"release.share is a share, more than 0 and less than 1, not {self.share}")
        if not self.timeout_s > 0:
            raise ValueError(f"release.timeout_s must be more than 0 seconds, not {self.timeout_s}")

    @contextmanager
    def remote(self) -> Iterator[RemoteServer]:
        """Open the server."""
        server = RemoteServer(self.server, os.environ.get(self.key_variable, ""), self.timeout_s)
        try:
            yield server
        finally:
            server.close()


def release_name(context: StepContext) -> str:
    """Return the name that clients give."""
    return context.tables["release"].name or context.model


def serve(context: StepContext, server: RemoteServer, shares: Mapping[str, float]) -> dict[str, float]:
    """Split the released name among registered versions, and return the shares by their names on the server.

    Args:
        shares: by name of the version; ``""`` stands for the server's own model.

    Raises:
        ValueError: a version is a whole model, its files are missing, or the server refuses it.
    """
    catalog = context.tables["register"].catalog(context)
    weights = {}
    for name, share in shares.items():
        if not name:
            weights[server.base()] = share
            continue
        version = catalog.version(name)
        if version is None:
            raise ValueError(
                f"{catalog.path / name} is missing: restore it, or run the flow with another register.path"
            )
        if version.model.adapter is None:
            raise ValueError(
                f"{name} is a whole model, and versions of a release are adapters of one server: set task to lora in "
                "the run, or leave out [release] and [watch]"
            )
        server.load(name, Path(version.model.adapter))
        weights[name] = share
    server.release(release_name(context), weights)
    return weights


def canary_shares(context: StepContext) -> dict[str, float]:
    """Return the shares of the current version and the candidate."""
    share = context.tables["release"].share
    return {current_version(context): 1 - share, context.output("register", "version"): share}


def current_version(context: StepContext) -> str:
    """Return the name of the version that the gate has compared with; ``""`` for the base."""
    return str(context.output("gate", "version"))


def differs(server: RemoteServer, name: str, weights: Mapping[str, float]) -> str:
    """Return the difference of a release from these shares in a few words; empty if there is none."""
    found = server.weights(name)
    if found.keys() == weights.keys() and all(abs(found[each] - weights[each]) < CLOSE for each in weights):
        return ""
    now = ", ".join(f"{model} {share:.0%}" for model, share in found.items()) or "nothing"
    return f"{server.address} releases {now} as {name}"


def _inputs(context: StepContext) -> Mapping[str, Any]:
    return {
        "name": release_name(context),
        "share": context.tables["release"].share,
        "version": context.output("register", "version"),
        "digest": context.output("register", "digest"),
        "against": current_version(context),
    }


def _plan(context: StepContext) -> str:
    settings: FlowRelease = context.tables["release"]
    return f"give the candidate {settings.share:.0%} of the traffic of {release_name(context)} at {settings.server}"


def _lost(context: StepContext, outcome: StepOutcome) -> str:
    if not context.is_last:
        return ""
    with context.tables["release"].remote() as server:
        return differs(server, release_name(context), outcome.outputs["weights"])


def _run(context: StepContext) -> StepOutcome:
    with context.tables["release"].remote() as server:
        weights = serve(context, server, canary_shares(context))
    current, candidate = weights
    shares = ", ".join(f"{model} {share:.0%}" for model, share in weights.items())
    return StepOutcome(
        reason=f"{release_name(context)} is now {shares}",
        figures=weights,
        outputs={"weights": weights, "name": release_name(context), "current": current, "candidate": candidate},
    )


RELEASE = FlowStep(
    name="release",
    place=50,
    settings=FlowRelease,
    inputs=_inputs,
    plan=_plan,
    run=_run,
    missing="out",
    lost=_lost,
)
