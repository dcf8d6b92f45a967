"""The number of replicas: a policy of ``engine/scheduling/policies/scaling.py``, its decisions with reasons in a log,
and the alarm of an autoscaler that cannot see. Plain Python, without Ray."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..engine.scheduling.policies.scaling import Backlog, Concurrency, Fixed, Policy, Scaler, Seen
from .settings import FleetSettings

LOG = "decisions.jsonl"
"""Name of the log in the fleet's folder; when it is full, it continues in a new file, and one old file is kept."""
MOST_LOG_BYTES = 8 << 20
BLIND = "AutoscalerBlind"
"""Name of the alarm: no decision in two periods, or decisions without metrics."""


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision. ``at``: seconds since 1970. ``blind``: the metrics of replicas were missing."""

    at: float
    replicas: int
    before: int
    reason: str
    blind: bool
    seen: Mapping[str, float]


class Decider:
    """Decides about the number of replicas, at most once in each interval.

    Args:
        policy, target_s, tokens_per_s, each, patience_s, interval_s: see ``ScalingSettings``.
        least, most: bounds of the number.
        folder: for the log; None for none.
    """

    def __init__(
        self,
        policy: str,
        target_s: float,
        tokens_per_s: float | None,
        each: float,
        interval_s: float,
        patience_s: float,
        least: int,
        most: int,
        folder: str | None,
    ) -> None:
        self.interval_s, self.least, self.most = interval_s, least, most
        policies: dict[str, Policy] = {
            "backlog": Backlog(target_s, tokens_per_s or 0.0),
            "concurrency": Concurrency(each),
            "fixed": Fixed(least),
        }
        self._policy = policies[policy]
        self._scaler = Scaler(self._policy, least, most, patience_s)
        self._folder = None if folder is None else Path(folder)
        self.last: Decision | None = None

    @classmethod
    def of(cls, settings: FleetSettings, log: bool = True) -> Decider:
        """Make the decider of a fleet."""
        return cls(**arguments(settings, log))

    def due(self, now: float) -> bool:
        """Return True if an interval has passed since the last decision; ``now`` in seconds since 1970."""
        return self.last is None or now - self.last.at >= self.interval_s

    def decide(self, now: float, seen: Seen | None, here: int, missing: int = 0) -> Decision:
        """Decide, and write the decision to the log.

        Args:
            now: seconds since 1970.
            seen: the fleet; None if no replica's metrics are known, or there is no replica.
            here: replicas that are wanted so far.
            missing: replicas whose metrics are not known. If there are any, the number does not fall.
        """
        if seen is None:
            wanted = min(self.most, max(self.least, here))
            reason = "no metrics of any replica: the number stays" if missing else "no replica is ready yet"
        else:
            wanted = self._scaler.engines(seen)
            reason = self._reason(seen, wanted, here)
            if missing and wanted < here:
                wanted, reason = here, f"no metrics of {missing} replicas: the number does not fall ({reason})"
        shown = {} if seen is None else {name: round(float(value), 3) for name, value in seen._asdict().items()}
        self.last = Decision(now, wanted, here, reason, missing > 0, shown)
        self._write(self.last)
        return self.last

    def _reason(self, seen: Seen, wanted: int, here: int) -> str:
        policy = self._policy
        if isinstance(policy, Backlog):
            rate = seen.tokens_per_s or policy.tokens_per_s
            if rate <= 0:
                text = "the rate of a replica is not known yet"
            else:
                needed = seen.queued_tokens / rate / max(1, seen.ready)
                text = (
                    f"{seen.queued_tokens} queued tokens at {rate:.0f} tokens/s keep {seen.ready} replicas busy for "
                    f"{needed:.1f} s, the target is {policy.target_s:g} s"
                )
        elif isinstance(policy, Concurrency):
            text = f"{seen.waiting + seen.running} requests, {policy.each:g} for each replica"
        else:
            text = "the number is fixed"
        floor = policy.wanted(seen)
        if wanted > floor + 1 and wanted > self.least and wanted <= here:
            text += f"; fewer would do, but more were needed within the last {self._scaler.patience:g} s"
        if floor > self.most:
            text += f"; max is {self.most}"
        return text

    def _write(self, decision: Decision) -> None:
        if self._folder is not None:
            write(self._folder, decision)


def arguments(settings: FleetSettings, log: bool = True) -> dict[str, Any]:
    """Return the arguments of ``Decider`` for a fleet, as values that JSON can hold."""
    own = settings.scaling
    names = ("policy", "target_s", "tokens_per_s", "each", "interval_s", "patience_s")
    found: dict[str, Any] = {name: getattr(own, name) for name in names}
    folder = str(settings.place) if log else None
    return found | {"least": settings.replicas.min, "most": settings.replicas.most, "folder": folder}


def write(folder: Path, decision: Decision) -> None:
    """Add a decision to a fleet's log."""
    line = json.dumps({name: getattr(decision, name) for name in Decision.__slots__})
    file = folder / LOG
    with contextlib.suppress(OSError):  # a full disk must not stop the fleet; the missing lines raise the alarm
        folder.mkdir(parents=True, exist_ok=True)
        if file.exists() and file.stat().st_size > MOST_LOG_BYTES:
            file.replace(file.with_suffix(".old.jsonl"))
        with file.open("a", encoding="utf-8") as out:
            out.write(line + "\n")


def newest(folder: Path, count: int = 1) -> list[dict[str, Any]]:
    """Return the newest decisions of a fleet's log, oldest first."""
    try:
        with (folder / LOG).open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - 2048 * count))
            lines = file.read().splitlines()
    except OSError:
        return []
    found = []
    for line in lines[-count:]:
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found


def is_blind(last: Mapping[str, Any] | None, interval_s: float, now: float | None = None) -> bool:
    """Return True if the newest decision is older than two intervals, or was made without metrics of all replicas."""
    if last is None:
        return True
    return bool(last["blind"]) or (time.time() if now is None else now) - float(last["at"]) > 2 * interval_s
