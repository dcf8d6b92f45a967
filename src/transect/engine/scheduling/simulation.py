"""One engine on a virtual clock: the shipping ``EngineCore`` and ``Scheduler``, with given step times.

``explain/engine/simulate.py`` runs the requests of a decision log here, and ``plan/`` those of a workload. ``run`` is
the loop of the engine process (``frontends/process.py``): it plans as late as that one, and takes requests until then.
Steps in which the same sequences decode can be taken together (``leap.py``), which changes no decision.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from ...costs.warmth import Slowdown, Warmth
from .clock import VirtualClock
from .core import LOOK, EngineCore
from .drafters.planned import Ahead, PlannedDrafter, PlannedModel
from .leap import DecodeSeconds, leap, learn
from .outputs import EngineOutput
from .policies.model_speculation import ModelSpeculation
from .request import Request
from .scheduler import Scheduler
from .scheduler_config import SchedulerConfig
from .virtual_device import StepSeconds, VirtualDevice


@dataclass(slots=True)
class Timeline:
    """One choice of a request on the clock of its engine, in seconds.

    Attributes:
        moments: when each of its tokens was known.
        rows: of the step that drew the first token.
        cached: prompt tokens that the prefix cache held.
        reason: why it ended; empty before.
    """

    request_id: str
    index: int
    moments: list[float] = field(default_factory=list)
    rows: int = 0
    cached: int = 0
    reason: str = ""


class SimulatedEngine:
    """An engine on a virtual clock.

    Args:
        config: of the scheduler.
        seconds: of a step on the device.
        lag: as of ``EngineCore``.
        host: seconds of the host before each step.
        decodes: seconds of a step that only decodes. If given, steps in which the same sequences decode are taken
            together; outputs must end by their length then, not by stop tokens.
        latency: as of ``VirtualDevice``.
        now: seconds at which the clock begins.
        acceptance: chance that a draft is right if those before it are; with it ``config.speculation`` drafts.
        drafter: seconds of a step of the model that drafts, if one does.
        warming: effect of the device's work on its steps, if there is one.

    Attributes:
        done: choices that have ended since they were last taken away.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        seconds: StepSeconds,
        *,
        lag: int = 0,
        host: float = 0.0,
        decodes: DecodeSeconds | None = None,
        latency: StepSeconds | None = None,
        now: float = 0.0,
        acceptance: float | None = None,
        drafter: DecodeSeconds | None = None,
        warming: Slowdown | None = None,
    ) -> None:
        self.clock = VirtualClock()
        self.clock.advance(now)
        self.device = VirtualDevice(self.clock, seconds, host, latency, None if warming is None else Warmth(warming))
        self.scheduler = Scheduler(config, self.clock)
        self.device.is_void = self.scheduler.jumps.is_void
        speculation = self.scheduler.speculation
        if isinstance(speculation, ModelSpeculation) and acceptance is not None and drafter is not None:
            speculation.model = PlannedModel(self.device, acceptance, drafter, config.max_model_len)
        elif speculation is not None and acceptance is not None:
            speculation.drafter = PlannedDrafter(acceptance, self.device.outputs)
        self._looks_ahead = self.scheduler.speculation is not None
        self.core = EngineCore(self.scheduler, self.device, lag=lag)
        self.lines: dict[tuple[str, int], Timeline] = {}
        self.done: list[Timeline] = []
        self._decodes = decodes if config.pipeline_depth == 1 else None

    def add(self, request: Request, outputs: Iterable[Iterator[int]]) -> None:
        """Queue a request now; ``outputs``: the tokens that each of its choices draws.

        Raises:
            ValueError: it can never fit. ``QueueFull``: too many wait.
        """
        self.core.add(request)
        name = request.request_id
        first = self.scheduler.requests[name].leader.seq_id
        for choice, drawn in enumerate(outputs):
            self.device.outputs[first + choice] = Ahead(drawn) if self._looks_ahead else drawn
            self.lines[name, choice] = Timeline(name, choice)

    def step(self) -> list[EngineOutput]:
        """Run one step of the engine loop, and record the times of its tokens."""
        outputs = self.core.step()
        now, lines = self.clock.time, self.lines
        for output in outputs:
            line = lines.get((output.request_id, output.index))
            if line is None:  # its client has left before
                continue
            if output.new_token_ids:
                line.rows = line.rows or len(outputs)
                line.moments.extend([now] * len(output.new_token_ids))
            if output.finish_reason is not None:
                line.reason, line.cached = output.finish_reason, output.num_cached_tokens
                self.done.append(lines.pop((output.request_id, output.index)))
        return outputs

    def run(self, until: float = math.inf) -> None:
        """Run until the clock reaches ``until``, the time of the next arrival, or until there is no work. A step that
        has begun by then is finished."""
        core, clock = self.core, self.clock
        while core.has_work and clock.time < until:
            if self._decodes is not None and self._leap(until, self._decodes):
                continue
            if self.device.lessons:
                learn(self.core, self.device)
            wait = self._wait_to_plan()
            if clock.time + wait >= until:
                break
            clock.advance(wait)
            self.step()
        if until < math.inf:
            clock.advance(max(0.0, until - clock.time))

    def _wait_to_plan(self) -> float:
        """Return the seconds until the engine plans its next step: as predicted, or when it notices that the step is
        over."""
        wait = self.core.time_to_plan(math.inf)
        if wait > LOOK:
            wait = min(wait, max(LOOK, self.device.known_at - self.clock.time + LOOK / 2))
        return wait

    def _leap(self, until: float, seconds: DecodeSeconds) -> bool:
        """Take steps that only decode together; False if there are none."""
        found = leap(self.core, self.device, until, seconds)
        if found is None:
            return False
        for seq, tokens in found.tokens:
            name = seq.request_id, seq.index
            line = self.lines[name]
            line.rows = line.rows or len(found.tokens)
            line.moments.extend(found.moments[:tokens])
            if seq.finish_reason is not None:
                line.reason, line.cached = seq.finish_reason, seq.num_cached
                self.done.append(self.lines.pop(name))
        return True
