"""Dropout whose masks are a function of a seed and the position in a run: a recomputed pass and a resumed run draw the
same ones.

Ranks that share the tokens of a micro-batch (``context``) draw masks of their own: these are not those of one rank.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class Moment:
    """Position in a run: ``step``, its ``part`` (a micro-batch), and this rank's ``slice`` of its tokens. All layers
    share one object, which the trainer advances."""

    step: int = 0
    part: int = 0
    slice: int = 0


@dataclass(frozen=True, slots=True)
class Dropout:
    """Sets the share ``p`` of numbers to 0 and multiplies the others by 1 / (1 - p) (Srivastava et al. 2014).

    Only in passes that will have a gradient; measuring and drawing answers see everything.
    """

    p: float
    seed: int
    moment: Moment

    @property
    def active(self) -> bool:
        return self.p > 0 and torch.is_grad_enabled()

    def __call__(self, x: Tensor) -> Tensor:
        if not self.active:
            return x
        key = f"{self.seed} {self.moment.step} {self.moment.part}"
        if self.moment.slice:
            key += f" {self.moment.slice}"
        seed = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=7).digest(), "little")
        generator = torch.Generator(x.device).manual_seed(seed)
        kept = torch.empty_like(x, memory_format=torch.contiguous_format).bernoulli_(1 - self.p, generator=generator)
        return x * kept.mul_(1 / (1 - self.p))
