"""The cores of an engine on several ranks: rank 0 serves the callers, and the other ranks follow its orders.
``ranks.py`` explains why all ranks agree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from ..parallel.launch import Ranks
from .scheduling.core import EngineCore, Lesson, StepInFlight
from .scheduling.outputs import EngineOutput
from .scheduling.policies.admission import Admission
from .scheduling.request import Request

if TYPE_CHECKING:
    from ..checkpoints.peft_config import AdapterFiles
    from .adapters import AdapterStore

HOLD = "hold"
"""Method of ``AdapterStore`` by which other ranks hold the adapters that rank 0 holds."""


class Message(NamedTuple):
    """A call of a method of ``EngineCore``. ``group``: coordinate along the data axis of the ranks that make the call;
    None for all ranks."""

    method: str
    arguments: tuple[Any, ...]
    group: int | None = None


@dataclass(frozen=True, slots=True)
class Orders:
    """Messages from rank 0 to the others between two steps; a step follows them."""

    messages: tuple[Message, ...] = ()


class LeadingCore(EngineCore):
    """The engine of rank 0: executes calls, and makes the other ranks do the same."""

    def __init__(self, core: EngineCore, ranks: Ranks, adapters: AdapterStore | None = None) -> None:
        super().__init__(core.scheduler, core.executor, lag=core.lag, decisions=core.decisions)
        self.idle = core.idle
        self._ranks, self._adapters = ranks, adapters
        self._shared: dict[str, AdapterFiles] = {}
        """Adapters that the other ranks hold."""
        if adapters is not None:
            adapters.dropped = self._drop
        self._messages: list[Message] = []
        self._lost = ""
        """Exception after which the other ranks may have diverged."""

    def add(self, request: Request) -> None:
        self._check_together()
        super().add(request)
        if self._adapters is not None and request.adapter and request.adapter not in self._shared:
            files = self._shared[request.adapter] = self._adapters.files[request.adapter]
            self._messages.append(Message(HOLD, (files, True)))
        # A grammar stays in its process: the others compile it from the parameters.
        self._messages.append(Message("add", (msgspec.structs.replace(request, constraint=None),)))

    def _drop(self, adapter: str) -> None:
        files = self._shared.pop(adapter, None)
        if files is not None:
            self._messages.append(Message(HOLD, (files, False)))

    def abort(self, request_id: str, choice: int | None = None) -> None:
        super().abort(request_id, choice)
        self._messages.append(Message("abort", (request_id, choice)))

    def reset_prefix_cache(self) -> None:
        super().reset_prefix_cache()
        self._messages.append(Message("reset_prefix_cache", ()))

    def step(self) -> list[EngineOutput]:
        self._ranks.check()
        self._check_together()
        orders, self._messages = Orders(tuple(self._messages)), []
        try:
            self._ranks.world.announce(orders)
            return self._step_of_all()
        except BaseException as error:
            self._lost = type(error).__name__
            reason = self._ranks.explain(error) if isinstance(error, Exception) else error
            if reason is error:
                raise
            raise reason from error

    def _step_of_all(self) -> list[EngineOutput]:
        outputs = super().step()
        self._ranks.check()  # what a GPU computed with a rank that has ended is worth nothing
        return outputs

    def _check_together(self) -> None:
        if self._lost:
            raise RuntimeError(
                f"a step of this engine was interrupted ({self._lost}), and its other ranks may have continued: create "
                "another engine"
            )

    def release(self) -> None:
        """Release the other ranks, which wait for another job."""
        if self._ranks.failure is None:
            self._ranks.world.announce(None)

    def learn(self, lesson: Lesson) -> None:
        super().learn(lesson)
        self._tell_times(lesson)

    def _tell_times(self, lesson: Lesson) -> None:
        self._messages.append(Message("learned", (lesson,)))


class FollowingCore(EngineCore):
    """The engine of another rank. It receives learned step times, which may size later steps, from rank 0."""

    def __init__(self, core: EngineCore) -> None:
        super().__init__(core.scheduler, core.executor, lag=core.lag)
        self.idle = core.idle
        self.scheduler.waiting.admission = Admission()  # rank 0 has refused what is refused

    def learned(self, lesson: Lesson) -> None:
        """Learn from a step as measured on rank 0."""
        self.learn(lesson)

    def _learn(self, done: StepInFlight, ended: float, late: bool) -> float:
        if self.scheduler.speculation is not None:
            self.scheduler.speculation.take_measured()
        return 0.0
