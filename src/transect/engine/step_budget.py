"""How many tokens a step may have while sequences decode: their next tokens wait for all of it.

Three rules, the first that applies:

* ``itl_target``: as many as take no longer than a target, by what has been learned of this device (``step_time``), but
  no more than are cheap: while weights are read anyway, prompt tokens cost little more than half of what they cost in
  larger steps. The
  target grows with the queue: if prompts wait for more than ``PATIENCE`` such steps, streams that flow and prompts that
  stand still would be the worse bargain for all. (Sarathi-Serve, Agrawal et al. 2024, bounds tokens instead of time.)
* ``fill_tokens``: so many that they cost little more than the decodes alone, as long as nothing ends later
  (``filling``).
* ``max_mixed_tokens``.
"""

from __future__ import annotations

from collections.abc import Sequence as Listed
from typing import NamedTuple

from .filling import nothing_ends_later
from .request import Sequence
from .scheduler_config import SchedulerConfig
from .step_time import KNOTS, StepLoad, StepTimes
from .waiting_queue import WaitingQueue

AUTO_RATIO = 3.0
"""Without a target in milliseconds: a step with prompts may take so many times as long as the decodes alone."""
PATIENCE = 8
"""Steps for which prompts may wait before steps become longer than the target."""
LONG = 4
"""A prompt that needs more such steps than this gets half of each while others wait."""
CHEAP = 0.85
"""A step has fewer tokens than the target allows if a prompt token then costs no more than this share. With an 8B
model on an H200 it costs 13 us in steps of 256 tokens, 15 of 384 and 17 to 21 in larger ones. In steps of 128 it costs
10, but a prompt then takes so many steps that its first token comes later (``benchmarks/step_policy.py``)."""
LEARN_STEPS = 8
"""Steps to measure before any is sized by time."""


class Budget(NamedTuple):
    """How many tokens a step may have."""

    tokens: int
    chunk: int
    """Tokens that one prompt may take of it: a long one leaves room for those behind it."""


class StepBudget:
    """Sizes steps in which sequences decode.

    Args:
        config: the limits and rules.
        times: what is known of steps' times; used with ``config.itl_target``.
    """

    def __init__(self, config: SchedulerConfig, times: StepTimes) -> None:
        self.fill_tokens = config.fill_tokens
        """May be changed between steps."""
        self.times = times
        self._config = config
        self._mixed = min(config.max_mixed_tokens or config.max_num_batched_tokens, config.max_num_batched_tokens)
        self._chunk = config.max_prefill_chunk or config.max_num_batched_tokens

    def alone(self) -> Budget:
        """A step in which nobody decodes."""
        return Budget(self._config.max_num_batched_tokens, self._chunk)

    def beside_decodes(self, running: Listed[Sequence], waiting: WaitingQueue, cut: bool) -> Budget:
        """A step in which some of ``running`` decode.

        Args:
            cut: the step before left a prompt unfinished.
        """
        if not (len(waiting) or cut):
            return Budget(self._mixed, self._chunk)
        if self._config.itl_target is not None:
            if self.times.steps >= LEARN_STEPS:
                return self._by_time(self._config.itl_target, running, waiting)
        elif self._fills(running, waiting):
            assert self.fill_tokens is not None
            return Budget(self.fill_tokens, self._chunk)
        return Budget(self._mixed, self._chunk)

    def _by_time(self, target: float, running: Listed[Sequence], waiting: WaitingQueue) -> Budget:
        left = [(seq.length - seq.scheduled, seq.scheduled) for seq in running]
        prompts = [(count, done) for count, done in left if count > 1]
        rows = len(left)
        beside = StepLoad(rows, sum(done + 1 for count, done in left if count <= 1))
        context = prompts[0][1] if prompts else 0
        seconds = target or AUTO_RATIO * self.times.predict(beside)
        tokens = self._cheap(self.times.most_tokens(seconds, beside, context, self._mixed), beside)
        waits = sum(count for count, _ in prompts) + waiting.num_tokens
        steps = waits / max(tokens - rows, 1)
        if steps > PATIENCE:
            tokens = self.times.most_tokens(seconds * steps / PATIENCE, beside, context, self._mixed)
        room = tokens - rows
        shared = len(prompts) + len(waiting) > 1 and any(count > LONG * room for count, _ in prompts)
        return Budget(tokens, min(self._chunk, max(1, (room + 1) // 2)) if shared else self._chunk)

    def _cheap(self, most: int, beside: StepLoad) -> int:
        """``most`` tokens, or the largest number below at which each for a prompt costs much less."""
        alone = self.times.predict(beside)

        def each(tokens: int) -> float:
            return (self.times.predict(beside._replace(tokens=tokens)) - alone) / (tokens - beside.tokens)

        sizes = [knot for knot in KNOTS if beside.tokens < knot < most]
        limit = CHEAP * each(most) if sizes else 0.0
        return max((tokens for tokens in sizes if each(tokens) <= limit), default=most)

    def _fills(self, running: Listed[Sequence], waiting: WaitingQueue) -> bool:
        return (
            self.fill_tokens is not None
            and self.fill_tokens < self._mixed
            and len(waiting) + len(running) <= self._config.max_num_seqs
            and nothing_ends_later(self.fill_tokens, running, waiting.in_order())
        )
