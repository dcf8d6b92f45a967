"""The engine loop: one call of ``EngineCore.step`` plans a batch, runs it and hands out what is new.

With ``lag=0`` a step is planned when all tokens are known. With ``lag=1`` step n + 1 is planned and submitted while
step n is still on the device, so that the device never waits for Python; the scheduler then works with sequences whose
last token is not known yet. A sequence that step n turns out to have finished has by then one token too many under way,
which is thrown away. The outputs are the same. Draws under a grammar wait, on the device, until the tokens of the step
before are known (``Handle.draw``); what comes before them in a step does not. In a pipeline they wait for nothing: its
steps have only sequences whose tokens are known.

A request that comes while step n runs takes part in step n + 1 if that is not planned yet. So a server plans late: it
waits for messages until ``time_to_plan`` says that the device will soon want the next step.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...costs.steps import StepLoad
from .batch import Executor, Handle, ScheduledBatch
from .decisions import DecisionLog
from .drafters.drafter import Timed
from .outputs import EngineOutput, SchedulerStats
from .request import Request
from .scheduler import Scheduler

SHORTEST_LEAD = 3e-4
"""Seconds by which a step is submitted before the device finishes the previous one, in addition to the planning
time."""
LOOK = 1e-3
"""Seconds after which a waiting loop checks again: predictions may be too long, and the step over."""
LATE = 5e-5
"""Seconds of waiting for a result below which the step counts as over before the next was submitted."""

MASKED = 1e-5
"""Seconds of ``Handle.draw`` above which it may have made masks of grammars."""
EARLIER = 0.9
"""Assumed share of the predicted time for a step that ended before it could be timed."""


class Lesson(NamedTuple):
    """Times of a step, to learn from."""

    load: StepLoad
    seconds: float
    cycle: float = 0.0
    """Seconds from the result of the step before, without those of a draft model."""
    drafted: bool = False
    """The step verified drafts."""
    drafting: Sequence[Timed] = ()
    """Steps of a draft model."""


class EngineCore:
    """Drive a ``Scheduler`` and an ``Executor``.

    Args:
        scheduler: holds all requests.
        executor: runs the batches in the order of their submission.
        lag: 0, or 1 to plan one step ahead of the executor; in a pipeline, the number of steps in flight beside
            the newest.
        decisions: log of the scheduler's decisions; None for no log.

    Raises:
        ValueError: ``lag`` is none of these.
    """

    def __init__(
        self, scheduler: Scheduler, executor: Executor, *, lag: int = 0, decisions: DecisionLog | None = None
    ) -> None:
        depth = scheduler.config.pipeline_depth
        if not 0 <= lag <= max(1, depth - 1):
            raise ValueError(f"lag must be 0 or 1, or less than pipeline_depth ({depth}), got {lag!r}")
        self.scheduler = scheduler
        self.executor = executor
        self.lag = lag
        self.decisions = decisions
        self.idle: Callable[[], object] | None = None
        """Function that takes part in a step without a batch while other ranks may have one (``sharing.py``)."""
        self._in_flight: deque[StepInFlight] = deque()
        self._ready: list[EngineOutput] = []
        self._timed = scheduler.config.itl_target is not None
        self._learns = self._timed or scheduler.speculation is not None
        self._work = 0, StepLoad(0)
        """Number of the last step whose work was counted, and that work."""
        self._ended = 0.0
        """Time of the last step's result, in seconds of the scheduler's clock."""
        self._more_to_do = False
        """There was unfinished work after the last result."""
        self._planning = {False: 0.0, True: 0.0}
        """Smoothed seconds of planning and submitting a step; True: a step without a graph."""
        self._graph = scheduler.config.graph_tokens or math.inf
        self._launched_large = False
        """True if the newest step has no graph."""
        self._waited = False
        """True if ``time_to_plan`` delayed the step that is planned next."""
        self.on_device = False
        """True while the executor works or waits for its device: the only place where a step may take long."""
        self._failure = ""
        """Reason for taking back steps, until that is done."""

    def add(self, request: Request) -> None:
        """Queue a request. Raises the errors of ``Scheduler.add``, which leave other requests undisturbed."""
        self._finish_taking_back()
        self.scheduler.add(request)
        if self.decisions is not None:
            self.decisions.added(request)

    def abort(self, request_id: str, choice: int | None = None) -> None:
        """End a request, or one choice of it, now. Its last outputs come with the next ``step``; unknown ids (a request
        that has just ended) are ignored. KV blocks are free again at once, or when the step in flight is done."""
        self._finish_taking_back()
        ended = self.scheduler.abort(request_id, choice)
        if ended and self.decisions is not None:
            self.decisions.aborted(request_id, choice)
        self._ready.extend(ended)

    @property
    def has_work(self) -> bool:
        """True while ``step`` has something to compute, to wait for or to return."""
        return bool(self._ready or self._in_flight or self.scheduler.has_unfinished)

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache; running requests keep their KV."""
        self.scheduler.reset_prefix_cache()
        if self.decisions is not None:
            self.decisions.cache_reset()

    def stats(self) -> SchedulerStats:
        """Return gauges and counters of the scheduler, and of the executor if it keeps some."""
        stats = self.scheduler.stats()
        late = getattr(self.executor, "late_work", None)
        if late is not None:
            stats.late_captures, stats.late_compilations = late()
        return stats

    def time_to_plan(self, look: float = LOOK) -> float:
        """Return the seconds until the next call, at most ``look``; 0 to plan the next step now. Requests added until
        then are part of that step.

        The device wants its next step when the one in flight ends. When that will be is predicted, and the next step is
        handed over earlier by ``SHORTEST_LEAD`` and by what the prediction may be off. A step that was handed over too
        late counts as a large error, so that the next ones come earlier. If the step in flight is over before, it is
        time to plan at once. There is nothing to wait for where the prompts that are here fill the next step already.
        """
        if not self._timed or not self.lag or len(self._in_flight) != 1:
            return 0.0
        coming = self.scheduler.coming()
        if coming.full:
            return 0.0
        running = self._in_flight[0]
        if getattr(running.handle, "over", False):
            return 0.0
        work = self._work_of(running.batch)
        end = max(running.submitted, self._ended) + self.scheduler.times.soonest(work)
        planning = self._planning[coming.tokens > self._graph]
        seconds = end - planning - SHORTEST_LEAD - self.scheduler.clock.now()
        self._waited = self._waited or seconds > 0
        return min(max(seconds, 0.0), look)

    def step(self) -> list[EngineOutput]:
        """Submit at most one batch, wait for at most one, and return the new outputs. Cheap when there is no work.

        In a pipeline a second batch is submitted as soon as tokens have arrived, unless steps are sized by time.

        If anything raises, KeyboardInterrupt included, all steps in flight are taken back, and the exception propagates
        to the caller. The engine stays usable: the next call recomputes the unfinished requests from their known
        tokens.
        """
        self._finish_taking_back()
        try:
            return self._step()
        except BaseException as error:
            self._failure = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            self._finish_taking_back(error)
            raise

    def keep(self, outputs: list[EngineOutput]) -> None:
        """Return outputs of ``step`` once more with the next call, because the caller was interrupted."""
        self._ready[:0] = outputs

    def _finish_taking_back(self, cause: BaseException | None = None) -> None:
        """Take steps back after a failure, unless that is done. A second interruption leaves it to the next call."""
        if not self._failure:
            return
        abandon = getattr(self.executor, "abandon", None)
        self.on_device = True
        try:
            if abandon is not None:
                abandon()
        except Exception as error:  # the device is lost: the next step meets the same
            if cause is not None:
                cause.add_note(f"The device could not be brought to rest either: {error}")
        finally:
            self.on_device = False
        reason = f"a step of the engine failed: {self._failure}"
        self._in_flight.clear()
        self._work, self._waited, self._launched_large = (0, StepLoad(0)), False, False
        self._ended = self.scheduler.clock.now()
        partly = self.scheduler.committing is not None
        self._ready.extend(self.scheduler.take_back(reason))
        if self.decisions is not None:
            self.decisions.taken_back(reason, partly)
        self._failure = ""

    def _step(self) -> list[EngineOutput]:
        lag = 0 if self.scheduler.waits_for_tokens() else self.lag
        batch = self._submit() if len(self._in_flight) <= lag else None
        if batch is None and self.idle is not None:
            self.idle()
        if self._in_flight and (batch is None or len(self._in_flight) > self.lag or self.scheduler.drafting):
            self._take_result()
            if self._in_flight and self.scheduler.config.pipeline_depth == 1:
                self._draw(self._in_flight[0])
            # The first stage has nothing to do until then, and the caller takes its time. But other ranks hear what was
            # learned of a step's time only before the next call, and must plan the same.
            if self.scheduler.config.pipeline_depth > 1 and self.idle is None and not self._learns:
                self._submit()
        outputs, self._ready = self._ready, []
        return outputs

    def _submit(self) -> ScheduledBatch | None:
        """Plan a step and submit it, if there is something to compute."""
        now = self.scheduler.clock.now
        began = now()
        batch = self._plan()
        if batch is None:
            return None
        drafting = 0.0 if self.scheduler.speculation is None else self.scheduler.speculation.seconds_spent
        self.on_device = True
        handle = self.executor.submit(batch)
        self.on_device = False
        began += drafting
        launched = getattr(self.executor, "launched", "")
        self._in_flight.append(StepInFlight(batch, handle, began, launched, drafting=drafting))
        self._launched_large = large = not batch.again and batch.num_tokens > self._graph
        before = self._planning[large]
        self._planning[large] += (now() - began - before) * (0.1 if before else 1.0)
        if len(self._in_flight) == 1 or self.scheduler.config.pipeline_depth > 1:
            self._draw(self._in_flight[-1])  # in a pipeline all tokens of a step's sequences are known
        return batch

    def _plan(self) -> ScheduledBatch | None:
        log = self.decisions
        if log is None or not self.scheduler.has_unfinished:
            return self.scheduler.schedule()
        log.check_fill()
        began = log.now()
        batch = self.scheduler.schedule()
        log.planned(batch, began)
        return batch

    def _draw(self, step: StepInFlight) -> None:
        """Launch the draws of a step: all tokens before it are known."""
        now = self.scheduler.clock.now
        began = now()
        self.on_device = True
        step.handle.draw()
        self.on_device = False
        ended = now()
        waits = ended - began > MASKED and any(draw.constraint for row in step.batch.rows for draw in row.draws)
        step.drawn = ended if waits else 0.0

    def _take_result(self) -> None:
        """Wait for the oldest step in flight, and learn from it."""
        done = self._in_flight.popleft()
        now = self.scheduler.clock.now
        asked = now()
        self.on_device = True
        result = done.handle.result()
        self.on_device = False
        ended = now()
        learned, began = 0.0, max(done.submitted, self._ended)
        launching = self._timed and self._launched_large and self.lag > 0
        late = (self._waited or launching) and ended - asked < LATE
        speculation = self.scheduler.speculation
        if self._timed or (self._learns and (speculation is None or speculation.wants_times)):
            learned = self._learn(done, ended, late)
        self._ended = ended
        if late and launching:  # the next step has begun since, with the first of its kernels
            self._ended = began + learned
        self._ready.extend(self.scheduler.commit(done.batch, result))
        self._more_to_do = self.scheduler.has_unfinished
        if self.decisions is not None:
            self.decisions.done(done.batch, result, asked, ended, learned, done.launched, done.drawn)

    def _learn(self, done: StepInFlight, ended: float, late: bool) -> float:
        """Learn how long a step took. Returns the seconds."""
        work = self._work_of(done.batch)
        seconds = ended - max(done.submitted, self._ended)
        if late:  # it ended earlier, at an unknown time: sooner than predicted, or the next took long to launch
            seconds = min(seconds, (1.0 if self._launched_large else EARLIER) * self.scheduler.times.predict(work))
        lesson = Lesson(work, seconds)
        if self.scheduler.speculation is not None:
            drafted = any(row.drafts for row in done.batch.rows)
            # With the host's work in between, unless there was nothing to do.
            cycle = ended - self._ended - done.drafting if self._more_to_do else seconds
            lesson = Lesson(work, seconds, cycle, drafted, self.scheduler.speculation.take_measured())
        self.learn(lesson)
        self._waited = False
        return seconds

    def learn(self, lesson: Lesson) -> None:
        """Learn from a step that is done."""
        self.scheduler.times.learn(lesson.load, lesson.seconds)
        speculation = self.scheduler.speculation
        if speculation is not None:
            speculation.learn(lesson.drafting)
            if not lesson.load.pairs:
                speculation.timed(lesson.load, lesson.cycle, lesson.drafted)

    def _work_of(self, batch: ScheduledBatch) -> StepLoad:
        """Count the work of a step; cached while the same sequences decode."""
        step, work = self._work
        if batch.step != step:
            next_one = batch.step == step + 1 and self.scheduler.config.pipeline_depth == 1
            goes_on = batch.again and next_one and not (work.pairs or work.scored)
            if goes_on:
                work = work._replace(keys=work.keys + work.tokens)
            else:
                work = StepLoad.of(batch.spans(), batch.scored)
            self._work = batch.step, work
        return work


@dataclass(slots=True)
class StepInFlight:
    """A step in flight."""

    batch: ScheduledBatch
    handle: Handle
    submitted: float
    """Time of planning, in seconds of the scheduler's clock."""
    launched: str = ""
    """See ``Executor.launched``."""
    drawn: float = 0.0
    """Time at which the draws were launched, if they waited for masks of grammars."""
    drafting: float = 0.0
    """Seconds that a draft model took, before the step was submitted."""
