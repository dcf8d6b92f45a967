"""The ranks that train together: division of a step's work, and the sum of its gradients.

``Crew`` is what the loop knows of other ranks. Every rank runs the same ``Trainer`` over the same data, computes its
share of each step's micro-batches as its strategy says (``strategies/``), and takes the same step; the first rank
writes and shows things. A world of one rank is one of the strategies.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, TypeVar

from ...parallel.pulse import Pulse, default_store
from ...parallel.world import Failure, SharedValueError, Solo, World
from ...spec.layouts.ranks import RankPlace
from ...spec.layouts.refusals import RunSettings, refusal
from ...spec.layouts.spread import Spread
from ...spec.model import ModelConfig
from ..config import TrainConfig
from ..config.parallel import ParallelConfig
from ..objectives.base import StepFailed
from ..objectives.share import RolloutShare, Sums
from .strategies import strategy_for

if TYPE_CHECKING:
    from ..optim.offloaded import Offload

Made = TypeVar("Made")


class Crew:
    """The ranks of a run, seen from one of them; ``strategy`` divides the work.

    Args:
        config: the run.
        world: the ranks; None if this process trains alone.

    Raises:
        ValueError: there are other ranks than ``parallel.data`` asks for, or the run cannot be spread so.
    """

    def __init__(self, config: TrainConfig, world: World | None) -> None:
        check(config)
        self.config, self.world = config, world or Solo()
        layout, size = config.parallel.layout, self.world.size
        if size != layout.size:
            raise ValueError(
                f"the run is for {layout.size} ranks ({layout}), and {size} were started: start as many, or make the "
                f"sizes under parallel multiply to {size}"
            )
        self.strategy = strategy_for(config.parallel)(config, self.world, self.at)
        timeout = config.parallel.timeout
        watched = size > 1 and timeout > 0
        self.pulse = Pulse(default_store(), self.world.rank, size, timeout) if watched else None
        self._step = 0

    def watching(self) -> AbstractContextManager[None]:
        """Return a context that ends a hung run with a message after ``parallel.timeout`` (``parallel/pulse.py``)."""
        return nullcontext() if self.pulse is None else self.pulse.watching()

    def at(self, what: str, step: int | None = None, *, alone: bool = False) -> None:
        """Report this rank's progress to the watchdog; ``alone``: this phase waits for no other rank."""
        self._step = self._step if step is None else step
        if self.pulse is not None:
            self.pulse.at(self._step, what, alone=alone)

    @property
    def rank(self) -> int:
        """Number of this rank."""
        return self.world.rank

    @property
    def leads(self) -> bool:
        """True on the rank that writes and prints."""
        return self.world.rank == 0

    def lean(self, model: ModelConfig) -> bool:
        """Return True if no rank must ever hold all weights of the model, because each reads only its part."""
        parallel, layout = self.config.parallel, self.config.parallel.layout
        parts = parallel.sharded or layout.tensor * layout.pipeline > 1
        return parts and model.moe is None and self.config.objective == "next_token"

    def offload(self) -> Offload | None:
        """Return the settings of this rank's offloaded optimizer; None if it is on the device."""
        parallel = self.config.parallel
        if parallel.offload == "none":
            return None
        from ..optim.offloaded import Offload

        cores = self.config.threads or len(os.sched_getaffinity(0)) // self.world.on_host
        return Offload(
            folder=self.strategy.folder,
            delay=parallel.delayed_update,
            watch=not self.strategy.together,
            wide=self.strategy.wide or self.config.accumulate > 1,
            threads=max(1, cores),
            upload=self.strategy.upload,
        )

    def any(self, flag: bool) -> bool:
        """Return the logical OR of a flag over all ranks; every rank must call it."""
        self.at("the decision to continue")
        return any(self.world.exchange(flag))

    def made(self, make: Callable[[], Made], undo: Callable[[], object]) -> Made:
        """Return the result of ``make`` if it succeeds on every rank; every rank must call it.

        Raises:
            StepFailed: ``make`` failed on a rank; all ranks raise its reason. Ranks on which it succeeded call
                ``undo``.
        """
        found, failure = None, None
        try:
            found = make()
        except StepFailed as error:
            failure = Failure(str(error), user=True)
        self.at("the check that all ranks have data")
        try:
            self.world.exchange(failure)
        except SharedValueError as error:
            if failure is None:
                undo()
            raise StepFailed(str(error)) from error
        assert found is not None
        return found

    def first(self, mine: tuple[int, str] | None) -> str:
        """Return the first tensor that ranks found (``health.first_bad_number``), and its rank; every rank must call
        it."""
        everybody = self.world.exchange(mine)
        found = [(*each, rank) for rank, each in enumerate(everybody) if each is not None]
        if not found:
            return "one of a forward pass, which no rank keeps (a run on one rank looks for it)"
        _, what, rank = min(found)
        return what if all(each == mine for each in everybody) else f"{what}, on rank {rank}"

    def share(self) -> RolloutShare:
        """Return this rank's part of validation data, and of a step's measurements."""
        layout = self.config.parallel.layout
        if layout.data == 1:
            return RolloutShare()
        firsts = [layout.rank(RankPlace(data, 0, 0)) for data in range(layout.data)]

        def everybody(mine: Sums) -> list[Sums]:
            self.at("the sums of what was measured")
            found = self.world.exchange(mine)
            return [found[rank] for rank in firsts]

        own = layout.place(self.rank).data
        return RolloutShare(own, layout.data, everybody, lambda n: self.at(f"batch {n} of the evaluation"))


def check(config: TrainConfig) -> None:
    """Check that a run can be distributed as configured, as far as possible without its model.

    Raises:
        ValueError: it cannot; the message names the nearest way that works (``spec/layouts/refusals.py``).
    """
    if config.parallel.offload != "none":
        _check_offload(config)
    if config.optimizer.name == "zero_one_adam" and config.precision == "bfloat16":
        raise ValueError(
            'optimizer.name = "zero_one_adam" takes local steps, which weights in bfloat16 alone would round away: set '
            'precision to "mixed"'
        )
    run = RunSettings(
        adapted=config.task in ("lora", "qlora"),
        objective=config.objective,
        optimizer=config.optimizer.name,
        accumulate=config.accumulate,
        samples=bool(config.samples.prompts),
        keeps_layers=config.layer_keep == 1.0,
    )
    reason = refusal(run, asked(config.parallel))
    if reason is not None:
        raise ValueError(reason)


def asked(parallel: ParallelConfig) -> Spread:
    """Return the distribution of a configuration, without regard to the place of offloaded state."""
    streams = parallel.offload == "all"
    return Spread(
        data=parallel.data,
        zero=3 if parallel.sharded else parallel.zero,
        tensor=parallel.tensor,
        sequence=parallel.sequence,
        pipeline=parallel.pipeline,
        schedule=parallel.schedule,
        chunks=parallel.runs,
        context=parallel.context,
        expert=parallel.expert > 1,
        reduce=4 if parallel.reduce == "float32" else 2,
        tiles=parallel.tiles,
        copies=parallel.sums != "nccl",
        fused=parallel.sums == "fused",
        host_state=parallel.offload != "none",
        host_weights=streams,
    )


def _check_offload(config: TrainConfig) -> None:
    none = 'or parallel.offload to "none"'
    if config.optimizer.name != "adamw":
        raise ValueError(f'parallel.offload is for AdamW: set optimizer.name to "adamw", {none}')
    if config.task in ("lora", "qlora"):
        raise ValueError('parallel.offload is for runs that train all weights: set it to "none", adapters are small')
    if config.parallel.offload == "all" and config.parallel.zero != 3 and config.parallel.data > 1:
        raise ValueError(
            'parallel.offload = "all" is for sharded weights: set parallel.zero to 3, or take offload = "optimizer"'
        )
    if config.parallel.offload == "all" and (config.samples.prompts or config.objective == "grpo"):
        what = "samples are" if config.samples.prompts else 'objective = "grpo" has answers'
        raise ValueError(f'{what} drawn from a whole model on a device: set parallel.offload to "optimizer"')
    if config.precision == "bfloat16":
        raise ValueError(f'parallel.offload keeps float32 states: set precision to "mixed", {none}')
