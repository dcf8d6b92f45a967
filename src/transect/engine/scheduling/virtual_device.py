"""An executor without a device: steps take given times on a virtual clock, and draw given tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ...costs.steps import StepLoad
from ...costs.warmth import Warmth
from .batch import Handle, ScheduledBatch, StepResult
from .clock import VirtualClock

StepSeconds = Callable[[ScheduledBatch], float]
"""Seconds of a step on the device."""


class VirtualDevice:
    """An executor whose steps take predicted times, in sequence.

    Args:
        clock: moved to a step's end when its result is asked for.
        seconds: of a step on the device.
        host: seconds of the host before each step.
        latency: seconds from the beginning of a step until its tokens are known, where the device works on several
            steps at a time; None if they are ``seconds``.
        warmth: slowdown by recent work; None if there is none.

    Attributes:
        outputs: tokens that each sequence draws, by its number.
        free_at: when the device is done with all steps. known_at: when the tokens of the last are known.
        steps, busy: number of steps, and their seconds in all.
        lessons: work, mean seconds and number of like steps that the engine has not learned from yet (``leap.py``).
    """

    def __init__(
        self,
        clock: VirtualClock,
        seconds: StepSeconds,
        host: float = 0.0,
        latency: StepSeconds | None = None,
        warmth: Warmth | None = None,
    ) -> None:
        self.clock, self.seconds, self.host, self.latency, self.warmth = clock, seconds, host, latency, warmth
        self.outputs: dict[int, Iterator[int]] = {}
        self.free_at = self.known_at = self.busy = 0.0
        self.steps = 0
        self.lessons: list[tuple[StepLoad, float, int]] = []
        self.is_void: Callable[[int, int], bool] = lambda seq_id, step: False
        """Function of a sequence and a step that is True if a grammar has forced the token, so that it is known
        already."""

    def submit(self, batch: ScheduledBatch) -> Handle:
        """Start the step when the previous one is done."""
        self.clock.advance(self.host)
        seconds, began = self.seconds(batch), max(self.free_at, self.clock.now())
        if self.warmth is not None:
            seconds = self.warmth.step(batch.num_tokens, began, seconds)
        self.free_at = began + seconds
        self.busy += seconds
        self.steps += 1
        self.known_at = self.free_at if self.latency is None else began + self.latency(batch)
        return Pending(self, batch, self.known_at)

    def newest(self, batch: ScheduledBatch) -> Handle:
        """Return the handle of ``batch`` as the last step of the device."""
        self.known_at = self.free_at
        return Pending(self, batch, self.free_at)


@dataclass(slots=True)
class Pending:
    """A step in flight; done at ``until``."""

    device: VirtualDevice
    batch: ScheduledBatch
    until: float
    known: StepResult | None = None

    def draw(self) -> None:
        """Do nothing: no draw waits."""

    @property
    def over(self) -> bool:
        """True once the device has finished the step."""
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
                    if row.drafts:
                        tokens[name], result.accepted[name] = _verify(row.drafts, outputs[name])
                        continue
                    tokens[name] = 0 if device.is_void(name, batch.step) else next(outputs[name])
                if row.prompt_logprobs is not None:
                    result.prompt_logprobs[row.seq_id] = ()
        return self.known


def _verify(drafts: Sequence[int], coming: Iterator[int]) -> tuple[int, list[int]]:
    """Take the leading drafts that equal the tokens to come; returns the token after them, and them."""
    accepted: list[int] = []
    token = next(coming)
    for draft in drafts:
        if draft != token:
            break
        accepted.append(draft)
        token = next(coming)
    return token, accepted
