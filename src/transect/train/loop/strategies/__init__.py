"""Strategies for sharing the work of a training step between ranks, one a file; ``strategy_for`` chooses one for a run.

* ``alone.py``: one rank has everything; what a strategy is asked is there.
* ``together.py``: what the others have in common.
* ``replicated.py``: ranks with the same weights, and ranks that have one model between them.
* ``sharded.py``: weights shared out, gathered when they are used. ``pipelined.py``: stages of layers.
"""

from __future__ import annotations

from ...config.parallel import ParallelConfig
from .alone import Alone


def strategy_for(parallel: ParallelConfig) -> type[Alone]:
    """Choose the strategy of a run; the others, and the parallel layers below them, are not loaded."""
    if parallel.layout.size == 1 and parallel.offload != "all":
        return Alone
    if parallel.layout.pipeline > 1:
        from .pipelined import Pipelined

        return Pipelined
    if parallel.sharded or parallel.zero == 3:
        from .sharded import ShardedRanks

        return ShardedRanks
    from .replicated import Replicated

    return Replicated
