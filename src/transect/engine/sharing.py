"""One engine whose ranks along the data axis have requests of their own (data parallel).

The ranks that stand at one place of the data axis are a *group*: it has requests, a scheduler and a KV cache of its
own. Groups may share the experts of a model (expert parallel), and compute every layer's experts together. So they
take their steps together: rank 0 says "step", and each rank runs the batch that its group plans or, where that has
none, takes part without tokens (``Executor.idle``). Groups that share nothing could do without, as the engines behind
a server do (``frontends/replicas.py``); in one ``LLM`` they have one caller, who takes one step after another.

Rank 0 has the callers. ``scheduling/policies/routing.py`` says which group gets a request; the other groups send their
outputs back after every step (``Report``).
"""

from __future__ import annotations

import dataclasses

import msgspec

from ..parallel.launch import Ranks
from ..parallel.mesh import Mesh
from ..parallel.world import World
from ..spec.layouts.ranks import RankPlace
from .leading import FollowingCore, LeadingCore, Message
from .scheduling.arrivals import max_length, seed_of
from .scheduling.core import EngineCore, Lesson, StepInFlight
from .scheduling.outputs import EngineOutput, SchedulerStats
from .scheduling.policies.admission import QueueFull
from .scheduling.policies.routing import TYPICAL_OUTPUT, Router, Ticket
from .scheduling.request import Request

TAG = 1 << 30
"""Tag of reports; steps have tags of their own."""


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """Results of a step in a group without rank 0."""

    outputs: list[EngineOutput]
    stats: SchedulerStats
    learned: list[Message]
    """Step times for the other ranks of the group."""
    busy: bool = False
    """True if the group has steps in flight or requests."""


@dataclasses.dataclass(slots=True)
class _Running:
    """A request that has not ended."""

    ticket: Ticket
    choices: int
    """Choices that have not ended."""


class SharingCore(LeadingCore):
    """The engine of rank 0, which belongs to the first group, and serves the callers of all groups."""

    def __init__(self, core: EngineCore, ranks: Ranks, mesh: Mesh, kv_tokens: int, seed: int) -> None:
        super().__init__(core, ranks)
        layout = mesh.layout
        self._leads = [layout.rank(RankPlace(group, 0, 0)) for group in range(1, layout.data)]
        config = self.scheduler.config
        self._router = Router([kv_tokens] * layout.data, config.block_size)
        self._running: dict[str, _Running] = {}
        self._stats: list[SchedulerStats] = [self.scheduler.stats() for _ in self._leads]
        self._busy = [False] * layout.data
        """True for each other group with steps in flight."""
        self._new = [0] * layout.data
        """Requests that each group received since its last report."""
        self._seed, self._count = seed, 0

    def add(self, request: Request) -> None:
        if request.request_id in self._running:
            raise ValueError(f"request id {request.request_id!r} is in use by an unfinished request; choose another")
        config, params = self.scheduler.config, request.params
        longest = max_length(request, config)
        room = [group for group in range(1, len(self._new)) if self._has_room(group)]
        try:
            self.scheduler.check_room(request, longest)
            room.insert(0, 0)
        except QueueFull:
            if not room:
                raise
        if params.seed is None:  # of all requests together, so that it does not matter which group gets one
            params = dataclasses.replace(params, seed=seed_of(self._seed, self._count))
            request = msgspec.structs.replace(request, params=params)
        self._count += 1
        most = params.n * min(longest - len(request.prompt_token_ids), TYPICAL_OUTPUT)
        ticket = self._router.send(request.prompt_token_ids, most, room)
        if ticket.engine == 0:
            EngineCore.add(self, request)
        self._running[request.request_id] = _Running(ticket, params.n)
        self._new[ticket.engine] += 1
        self._tell(ticket.engine, "add", msgspec.structs.replace(request, constraint=None))

    def _has_room(self, group: int) -> bool:
        most = self.scheduler.config.max_queue
        return most is None or self._stats[group - 1].waiting + self._new[group] < most

    def abort(self, request_id: str, choice: int | None = None) -> None:
        running = self._running.get(request_id)
        if running is None:
            return
        if running.ticket.engine == 0:
            EngineCore.abort(self, request_id, choice)
        self._tell(running.ticket.engine, "abort", request_id, choice)

    def reset_prefix_cache(self) -> None:
        self._router.forget()
        super().reset_prefix_cache()

    @property
    def has_work(self) -> bool:
        return bool(self._running) or any(self._busy) or super().has_work

    def stats(self) -> SchedulerStats:
        return SchedulerStats.sum((super().stats(), *self._stats))

    def _step_of_all(self) -> list[EngineOutput]:
        outputs = super()._step_of_all()
        for group, lead in enumerate(self._leads, 1):
            report: Report = self._hear(lead)
            outputs += report.outputs
            self._stats[group - 1], self._new[group], self._busy[group] = report.stats, 0, report.busy
            for message in report.learned:
                self._messages.append(message)
        self._new[0] = 0
        for output in outputs:
            self._count_output(output)
        return outputs

    def _hear(self, lead: int) -> Report:
        try:
            report: Report = self._ranks.world.receive(lead, tag=TAG)
            return report
        except Exception as error:
            raise self._ranks.explain(error) from error

    def _count_output(self, output: EngineOutput) -> None:
        running = self._running.get(output.request_id)
        if running is None:
            return
        self._router.drawn(running.ticket, len(output.new_token_ids))
        running.choices -= output.finish_reason is not None
        if not running.choices:
            self._router.done(running.ticket)
            del self._running[output.request_id]

    def _tell(self, group: int | None, method: str, *arguments: object) -> None:
        self._messages.append(Message(method, arguments, group))

    def _tell_times(self, lesson: Lesson) -> None:
        self._tell(0, "learned", lesson)


class GroupCore(FollowingCore):
    """The engine of the first rank of another group: measures its own steps, and reports to rank 0."""

    def __init__(self, core: EngineCore, world: World, group: int) -> None:
        super().__init__(core)
        self._world, self._group = world, group
        self._learned: list[Message] = []

    def step(self) -> list[EngineOutput]:
        outputs = super().step()
        learned, self._learned = self._learned, []
        self._world.send(Report(outputs, self.stats(), learned, self.has_work), 0, tag=TAG)
        return outputs

    def learned(self, lesson: Lesson) -> None:
        """Do nothing: this rank has measured the step itself."""

    def _learn(self, done: StepInFlight, ended: float, late: bool) -> float:
        return EngineCore._learn(self, done, ended, late)

    def learn(self, lesson: Lesson) -> None:
        super().learn(lesson)
        self._learned.append(Message("learned", (lesson,), self._group))
