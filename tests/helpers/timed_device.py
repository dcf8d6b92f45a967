"""Devices on a virtual clock whose steps take a known time, and an engine around one."""

from transect.costs.steps import StepLoad
from transect.engine.scheduling.batch import ScheduledBatch, StepResult
from transect.engine.scheduling.clock import VirtualClock
from transect.engine.scheduling.core import EngineCore
from transect.engine.scheduling.scheduler import Scheduler
from transect.engine.scheduling.scheduler_config import SchedulerConfig

BASE, EACH = 4e-3, 1e-4
"""Seconds of a step, and of each of its tokens."""


class Device:
    """Runs one step after another, each for as long as its tokens take. ``batches``: (when it began, the batch)."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock, self.free_at = clock, 0.0
        self.batches: list[tuple[float, ScheduledBatch]] = []

    def submit(self, batch: ScheduledBatch) -> "Pending":
        began = max(self.clock.now(), self.free_at)
        self.free_at = began + self.seconds(batch.num_tokens)
        self.batches.append((began, batch))
        result = StepResult({draw.seq_id: 1 for row in batch.rows for draw in row.draws})
        return Pending(self.clock, self.free_at, result)

    def seconds(self, tokens: int) -> float:
        return BASE + EACH * tokens


class Pending:
    def __init__(self, clock: VirtualClock, at: float, result: StepResult) -> None:
        self.clock, self.at, self.step = clock, at, result

    @property
    def over(self) -> bool:
        return self.clock.now() >= self.at

    def draw(self) -> None:
        pass

    def result(self) -> StepResult:
        self.clock.advance(max(0.0, self.at - self.clock.now()))
        return self.step


class Processor(Device):
    """A processor of two cores with a model of 135M: attention of a long prompt takes longer than the rest of it."""

    def submit(self, batch: ScheduledBatch) -> "Pending":
        self.load = StepLoad.of(batch.spans(), batch.scored)
        return super().submit(batch)

    def seconds(self, tokens: int) -> float:
        load = self.load
        attention = 3.7e-6 * (load.keys + load.context) + 3.2e-7 * load.pairs
        return 8e-3 + 1e-3 * tokens + attention + 1e-3 * load.scored


class Card(Processor):
    """A GPU with a model of 8B: rows cost little, and the few tiles of a chunk walk over its context one after
    another."""

    def seconds(self, tokens: int) -> float:
        load = self.load
        return 4e-3 + 1.5e-5 * tokens + 2.7e-8 * load.keys + 7.5e-7 * load.context + 5e-4 * bool(load.chunks)


def engine(lag: int = 0, device: type[Device] = Device, **limits) -> EngineCore:
    limits = {"num_blocks": 2000, "max_num_seqs": 8, "max_num_batched_tokens": 1000, "max_model_len": 4000} | limits
    clock = VirtualClock()
    return EngineCore(Scheduler(SchedulerConfig(seed=0, **limits), clock), device(clock), lag=lag)
