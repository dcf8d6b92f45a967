"""An engine on a virtual clock: the shipping ``EngineCore`` and ``Scheduler`` on a device whose steps take given times.

``explain/engine/simulate.py`` runs the requests of a decision log here, and ``plan/`` those of a workload. ``run`` is
the loop of the engine process (``frontends/process.py``): it plans as late as that one, and takes requests until then.
Steps in which the same sequences decode can be taken together (``leap.py``), which changes no decision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from ...costs.steps import StepLoad
from .batch import Handle, ScheduledBatch, StepResult
from .clock import VirtualClock
from .core import LOOK, EngineCore
from .leap import leap
from .outputs import EngineOutput
from .request import Request
from .scheduler import Scheduler
from .scheduler_config import SchedulerConfig

StepSeconds = Callable[[ScheduledBatch], float]
"""Seconds of a step on the device."""
DecodeSeconds = Callable[[StepLoad], float]
"""The same of a step that only decodes."""


@dataclass(slots=True)
class Timeline:
    """One choice of a request on the clock of its engine, in seconds.

    Attributes:
        moments: when each of its tokens was known.
        cached: prompt tokens that the prefix cache held.
        reason: why it ended; empty while it goes on.
    """

    request_id: str
    index: int
    moments: list[float] = field(default_factory=list)
    cached: int = 0
    reason: str = ""


class VirtualDevice:
    """An executor whose steps take predicted times, one after the other.

    Args:
        clock: moved to a step's end when its result is asked for.
        seconds: of a step on the device.
        host: seconds of the host before each step.
        latency: seconds from the beginning of a step until its tokens are known, where the device works on several
            steps at a time; None if they are ``seconds``.

    Attributes:
        outputs: tokens that each sequence draws, by its number.
        free_at: when the device is done with all steps. known_at: when the tokens of the last are known.
        steps, busy: number of steps, and their seconds in all.
    """

    def __init__(
        self, clock: VirtualClock, seconds: StepSeconds, host: float = 0.0, latency: StepSeconds | None = None
    ) -> None:
        self.clock, self.seconds, self.host, self.latency = clock, seconds, host, latency
        self.outputs: dict[int, Iterator[int]] = {}
        self.free_at = self.known_at = self.busy = 0.0
        self.steps = 0
        self.is_void: Callable[[int, int], bool] = lambda seq_id, step: False
        """Tells of a sequence and a step that the token is known already: a grammar forced it."""

    def submit(self, batch: ScheduledBatch) -> Handle:
        """Begin the step when the one before is done."""
        self.clock.advance(self.host)
        seconds, began = self.seconds(batch), max(self.free_at, self.clock.now())
        self.free_at = began + seconds
        self.busy += seconds
        self.steps += 1
        self.known_at = self.free_at if self.latency is None else began + self.latency(batch)
        return Pending(self, batch, self.known_at)

    def newest(self, batch: ScheduledBatch) -> Handle:
        """Return the handle of ``batch`` as the last step that the device has to do."""
        self.known_at = self.free_at
        return Pending(self, batch, self.free_at)


@dataclass(slots=True)
class Pending:
    """A step on its way; done at ``until``."""

    device: VirtualDevice
    batch: ScheduledBatch
    until: float
    known: StepResult | None = None

    def draw(self) -> None:
        """Nothing waits for it."""

    @property
    def over(self) -> bool:
        """True once the device is done with the step."""
        return self.device.clock.time >= self.until

    def result(self) -> StepResult:
        """Move the clock to the end of the step, and draw its tokens."""
        device, batch = self.device, self.batch
        device.clock.advance(max(0.0, self.until - device.clock.time))
        if self.known is None:
            result = self.known = StepResult({})
            tokens, outputs = result.tokens, device.outputs
            for row in batch.rows:
                for draw in row.draws:
                    name = draw.seq_id
                    tokens[name] = 0 if device.is_void(name, batch.step) else next(outputs[name])
                if row.prompt_logprobs is not None:
                    result.prompt_logprobs[row.seq_id] = ()
        return self.known


class SimulatedEngine:
    """An engine on a clock of its own.

    Args:
        config: of the scheduler.
        seconds: of a step on the device.
        lag: as of ``EngineCore``.
        host: seconds of the host before each step.
        decodes: seconds of a step that only decodes. If given, steps in which the same sequences decode are taken
            together; outputs must end by their length then, not by stop tokens.
        latency: as of ``VirtualDevice``.
        now: seconds at which the clock begins.

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
    ) -> None:
        self.clock = VirtualClock()
        self.clock.advance(now)
        self.device = VirtualDevice(self.clock, seconds, host, latency)
        self.scheduler = Scheduler(config, self.clock)
        self.device.is_void = self.scheduler.jumps.is_void
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
            self.device.outputs[first + choice] = drawn
            self.lines[name, choice] = Timeline(name, choice)

    def step(self) -> list[EngineOutput]:
        """Take one step of the engine loop, and note when its tokens came."""
        outputs = self.core.step()
        now, lines = self.clock.time, self.lines
        for output in outputs:
            line = lines.get((output.request_id, output.index))
            if line is None:  # its client has left before
                continue
            if output.new_token_ids:
                line.moments.extend([now] * len(output.new_token_ids))
            if output.finish_reason is not None:
                line.reason, line.cached = output.finish_reason, output.num_cached_tokens
                self.done.append(lines.pop((output.request_id, output.index)))
        return outputs

    def run(self, until: float = math.inf) -> None:
        """Run until the clock reaches ``until``, when somebody comes, or until nothing is left to do. A step that has
        begun by then is finished."""
        core, clock = self.core, self.clock
        while core.has_work:
            wait = self._wait_to_plan()
            if clock.time + wait >= until:
                break
            clock.advance(wait)
            self.step()
            if self._decodes is not None:
                self._leap(until, self._decodes)
        if until < math.inf:
            clock.advance(max(0.0, until - clock.time))

    def _wait_to_plan(self) -> float:
        """Seconds until the engine plans its next step: as predicted, or when it sees that the step is over."""
        wait = self.core.time_to_plan(math.inf)
        if wait > LOOK:
            wait = min(wait, max(LOOK, self.device.known_at - self.clock.time + LOOK / 2))
        return wait

    def _leap(self, until: float, seconds: DecodeSeconds) -> None:
        moments = leap(self.core, self.device, until, seconds)
        if moments:
            for seq in self.scheduler.running:
                self.lines[seq.request_id, seq.index].moments.extend(moments)
