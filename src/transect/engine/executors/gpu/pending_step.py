"""``PendingStep``: a step in flight on the device, and the reading of its results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ...scheduling.batch import StepResult
from ..sampler import NOT_FINITE, NOTHING_LEFT
from .device_sampling import Drawn, LogprobTensors


@dataclass(slots=True)
class PendingStep:
    """A submitted step. ``result`` waits for its tokens."""

    ready: torch.cuda.Event | None
    output: np.ndarray
    """uint8; the step's part of the ring."""
    seq_ids: list[int]
    known: StepResult
    """Results of the step's prompts."""
    max_draws: int
    adjusted: bool
    """True if logits were adjusted or masked before the draws."""
    logprobs: LogprobTensors | None = None
    """Log-probabilities, on the host once ``ready``."""
    alternatives: Sequence[int] = ()
    """Alternatives of each draw; -1 for no logprobs."""
    problems: Mapping[int, str] = field(default_factory=dict)
    """Errors of grammars, by seq_id."""
    _result: StepResult | None = None

    @property
    def over(self) -> bool:
        """True if the device has finished the step."""
        return self.ready is None or self.ready.query()

    def draw(self) -> None:
        """Do nothing: the draws are in flight."""

    def result(self) -> StepResult:
        """Return the result of the step; blocks until the device has finished it."""
        if self._result is None:
            if self.ready is not None:
                self.ready.synchronize()
            self._result = self._read()
        return self._result

    def _read(self) -> StepResult:
        drawn = Drawn.numpy(self.output, self.max_draws)
        count = len(self.seq_ids)
        ids = drawn.token[:count].tolist()
        prompts, pooled = self.known.prompt_logprobs, self.known.pooled
        result = StepResult(dict(zip(self.seq_ids, ids, strict=True)), prompt_logprobs=prompts, pooled=pooled)
        finite = drawn.finite[:count]
        if not finite.all():
            for index in np.flatnonzero(finite == 0).tolist():
                seq_id = self.seq_ids[index]
                del result.tokens[seq_id]
                nothing_left = self.adjusted and drawn.raw_finite[index]
                result.errors[seq_id] = NOTHING_LEFT if nothing_left else NOT_FINITE
                if nothing_left:
                    result.sound.add(seq_id)
        for seq_id, problem in self.problems.items():
            result.tokens.pop(seq_id, None)
            result.errors[seq_id] = problem
            result.sound.add(seq_id)
        if self.logprobs is not None:
            drawn_at = [seq_id in result.tokens for seq_id in self.seq_ids]
            wanted = [i for i, number in enumerate(self.alternatives) if number >= 0 and drawn_at[i]]
            entries = self.logprobs.entries(wanted, [ids[i] for i in wanted], [self.alternatives[i] for i in wanted])
            result.logprobs.update(zip((self.seq_ids[i] for i in wanted), entries, strict=True))
        return result
