"""What every rank but the first does in a run: the same steps, with nothing written or shown."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..parallel.world import World
from .checkpoint import newest
from .config import TrainConfig
from .health import TrainingStopped
from .trainer import Trainer

JOB = "transect.train.follow:follow"


@dataclass(frozen=True)
class Run:
    """A run as the first rank has it: the arguments of its ``Trainer``."""

    config: dict[str, Any]
    checkpoint: Path | None = None
    allow_changed: list[str] = field(default_factory=list)

    def trainer(self, world: World | None) -> Trainer:
        """This rank's trainer. Raises as ``Trainer`` does."""
        found = None if self.checkpoint is None else newest(self.checkpoint)
        config = TrainConfig.from_dict(self.config)
        return Trainer(config, found, allow_changed=self.allow_changed, world=world)


def follow(world: World, run: Run) -> None:
    """Train as the first rank does, until it stops. What is at fault with the run is the first rank's to say."""
    try:
        run.trainer(world).run()
    except (ValueError, TrainingStopped):
        pass
