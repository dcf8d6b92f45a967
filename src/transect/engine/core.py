"""The engine loop: one call of ``EngineCore.step`` plans a batch, runs it and hands out what is new.

With ``lag=0`` a step is planned when all tokens are known. With ``lag=1`` step n + 1 is planned and submitted while
step n is still on the device, so that the device never waits for Python; the scheduler then works with sequences whose
last token is not known yet. A sequence that step n turns out to have finished has by then one token too many under way,
which is thrown away. The outputs are the same. Draws under a grammar wait, on the device, until the tokens of the step
before are known (``Handle.draw``); what comes before them in a step does not.
"""

from __future__ import annotations

from collections import deque

from .batch import Executor, Handle, ScheduledBatch
from .decisions import DecisionLog
from .outputs import EngineOutput, SchedulerStats
from .request import Request
from .scheduler import Scheduler


class EngineCore:
    """Drives a ``Scheduler`` and an ``Executor``.

    Args:
        scheduler: holds all requests.
        executor: runs the batches in the order of their submission.
        lag: 0, or 1 to plan one step ahead of the executor.
        decisions: writes down what is decided; None: nobody does.

    Raises:
        ValueError: ``lag`` is neither 0 nor 1.
    """

    def __init__(
        self, scheduler: Scheduler, executor: Executor, *, lag: int = 0, decisions: DecisionLog | None = None
    ) -> None:
        if lag not in (0, 1):
            raise ValueError(f"lag must be 0 or 1, got {lag!r}")
        self.scheduler = scheduler
        self.executor = executor
        self.lag = lag
        self.decisions = decisions
        self._in_flight: deque[tuple[ScheduledBatch, Handle]] = deque()
        self._ready: list[EngineOutput] = []

    def add(self, request: Request) -> None:
        """Queue a request. Raises what ``Scheduler.add`` raises; nothing else is disturbed by that."""
        self.scheduler.add(request)
        if self.decisions is not None:
            self.decisions.added(request)

    def abort(self, request_id: str, choice: int | None = None) -> None:
        """End a request, or one choice of it, now. Its last outputs come with the next ``step``; unknown ids (a request
        that has just ended) are no error. KV blocks are free again at once, or when the step in flight is done."""
        ended = self.scheduler.abort(request_id, choice)
        if ended and self.decisions is not None:
            self.decisions.aborted(request_id, choice)
        self._ready.extend(ended)

    @property
    def has_work(self) -> bool:
        """True while ``step`` has something to compute, to wait for or to hand out."""
        return bool(self._ready or self._in_flight or self.scheduler.has_unfinished)

    def reset_prefix_cache(self) -> None:
        """Forget the KV of finished prompts; requests that run keep theirs."""
        self.scheduler.reset_prefix_cache()
        if self.decisions is not None:
            self.decisions.cache_reset()

    def stats(self) -> SchedulerStats:
        """Gauges and counters of the scheduler."""
        return self.scheduler.stats()

    def step(self) -> list[EngineOutput]:
        """Submit at most one batch, wait for at most one, and return what became known. Cheap when there is no work."""
        batch = self._plan()
        if batch is not None:
            self._in_flight.append((batch, self.executor.submit(batch)))
            if len(self._in_flight) == 1:
                self._in_flight[0][1].draw()
        if self._in_flight and (batch is None or len(self._in_flight) > self.lag):
            done, handle = self._in_flight.popleft()
            self._ready.extend(self._take_in(done, handle))
            if batch is not None and self._in_flight:
                self._in_flight[0][1].draw()  # all tokens before it are known now
        outputs, self._ready = self._ready, []
        return outputs

    def _plan(self) -> ScheduledBatch | None:
        log = self.decisions
        if log is None or not self.scheduler.has_unfinished:
            return self.scheduler.schedule()
        log.check_fill()
        began = log.now()
        batch = self.scheduler.schedule()
        log.planned(batch, began)
        return batch

    def _take_in(self, batch: ScheduledBatch, handle: Handle) -> list[EngineOutput]:
        """Wait for a batch, and tell the scheduler what it drew."""
        log = self.decisions
        if log is None:
            return self.scheduler.commit(batch, handle.result())
        waited = log.now()
        result = handle.result()
        at = log.now()
        outputs = self.scheduler.commit(batch, result)
        log.done(batch, result, waited, at)
        return outputs
