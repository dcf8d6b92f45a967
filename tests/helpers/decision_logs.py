"""Decision logs of engines on virtual clocks."""

import dataclasses

from transect.engine.scheduling.decisions import FORMAT, DecisionLog, Header


def log_for(core, **options):
    """A log beside an ``EngineCore``, on the clock of its scheduler."""
    header = Header(FORMAT, dataclasses.asdict(core.scheduler.config), core.lag, core.scheduler.clock.now())
    return DecisionLog(core.scheduler, header, now=core.scheduler.clock.now, **options)
