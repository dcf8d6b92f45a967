"""Follow a run on every rank but the first: take the same steps, print nothing, and write only a part of
checkpoints."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...parallel.children import RankFailure
from ...parallel.gathering import under_torchrun
from ...parallel.launch import Ranks
from ...parallel.world import Failure, SharedError, World
from ..config import TrainConfig
from ..model.build import device_of
from ..objectives.base import StepFailed
from .checkpoint import NotWritten, list_steps, newest
from .crew import check
from .health import TrainingStopped
from .trainer import Trainer

JOB = "transect.train.loop.follow:follow"


@dataclass(frozen=True)
class RunArguments:
    """A run as configured on the first rank: the arguments of its ``Trainer``."""

    config: dict[str, Any]
    checkpoint: Path | None = None
    allow_changed: list[str] = field(default_factory=list)

    def trainer(self, world: World | None) -> Trainer:
        """Build this rank's trainer. Raises as ``Trainer`` does; all ranks raise an error of any of them."""
        try:
            found = self._trainer(world)
        except SharedError:
            raise
        except ValueError as error:
            if world is not None:
                world.exchange(Failure(str(error), user=True))
            raise
        if world is not None:
            world.exchange(None)
        return found

    def _trainer(self, world: World | None) -> Trainer:
        first = world is None or world.rank == 0  # it looks at the files for all
        found = None if self.checkpoint is None else newest(self.checkpoint, check=first)
        config = TrainConfig.from_dict(self.config)
        return Trainer(config, found, allow_changed=self.allow_changed, world=world)


def started_again(config: TrainConfig) -> bool:
    """Return True if ``torchrun`` has started this command before.

    A host counts only the restarts that its own ranks have caused, so all ranks exchange their counts.

    Raises:
        ValueError: there are fewer devices than ranks.
        RankFailure: a rank did not arrive.
    """
    here = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0
    if not under_torchrun():
        return here
    check(config)
    return any(Ranks.join(device_of(config.device).type).world.exchange(here))


@contextlib.contextmanager
def crew(run: RunArguments) -> Iterator[World | None]:
    """Provide the ranks of a run: None for a single rank, those of ``torchrun``, or children of this process.

    Raises:
        ValueError: there are not as many devices, or ``torchrun`` has started another number of ranks.
        TrainingStopped: a rank has ended, and the others cannot continue without it.
    """
    config = TrainConfig.from_dict(run.config)
    check(config)
    size = config.parallel.layout.size
    if size == 1 and not under_torchrun():
        yield None
        return
    device = device_of(config.device).type
    ranks = Ranks.join(device) if under_torchrun() else Ranks.start(size, device)
    try:
        if not under_torchrun():
            ranks.call(JOB, run)
        yield ranks.world
    except Exception as error:
        found = ranks.explain(error)
        if isinstance(found, RankFailure):
            steps = list_steps(config.run_dir)
            whole = f"{steps[-1]} is whole" if steps else "no checkpoint was written yet"
            raise TrainingStopped(f"{found}; {whole}") from error
        raise
    finally:
        ranks.close()


def follow(world: World, run: RunArguments, should_stop: Callable[[], bool] = lambda: False) -> None:
    """Train as the first rank does, until it stops, or until ``should_stop`` is true here after a step. Errors that all
    ranks see are reported by the first; an error of this rank alone ends it, and thereby the others."""
    with contextlib.suppress(SharedError, StepFailed, TrainingStopped, NotWritten):
        run.trainer(world).run(should_stop=should_stop)
