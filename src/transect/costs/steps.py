"""The work of a serving step, in the numbers that its time depends on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ..spec.model import ModelConfig

LAUNCHES = 9
"""Kernels of a layer."""
LAUNCH_SECONDS, PRODUCT_RATE = 150e-6, 600e12
"""Seconds for which a host launches a kernel of a step with prompts, and FLOP/s of products, of an H200 and its
host."""


class StepLoad(NamedTuple):
    """The work of a step of prefill chunks and decodes.

    ``learning.py`` learns times over the first three numbers, ``context`` and ``scored``; ``fitting.py`` over all but
    these two.
    """

    tokens: int
    keys: int = 0
    """Positions of the KV cache that rows of one token read, in total."""
    pairs: int = 0
    """Positions that the tokens of longer rows attend to, summed over these tokens."""
    rows: int = 0
    chunks: int = 0
    """Rows with more than one token."""
    padded: int = 0
    """Tokens that the device computes, padding included."""
    floor: float = 0.0
    """Least seconds on the device; 0 if unknown."""
    flops: float = 0.0
    bytes: float = 0.0
    scored: int = 0
    """Tokens of prompts whose logits are computed and ranked."""
    context: int = 0
    """Positions of the KV cache that longer rows read, in all: each row reads its context once, however many tokens it
    has."""

    @classmethod
    def of(cls, rows: Iterable[tuple[int, int]], scored: int = 0) -> StepLoad:
        """Count the work of rows of (first position, tokens), without padding and floors."""
        tokens = keys = pairs = count = chunks = context = 0
        for start, new in rows:
            count += 1
            tokens += new
            if new == 1:
                keys += start + 1
            else:
                chunks += 1
                context += start + new
                pairs += new * start + new * (new + 1) // 2
        return cls(tokens, keys, pairs, count, chunks, tokens, scored=scored, context=context)


def joined(one: StepLoad, other: StepLoad) -> StepLoad:
    """Return the work of two parts of a step together."""
    return StepLoad._make(a + b for a, b in zip(one, other, strict=True))


def launch_bound_tokens(config: ModelConfig) -> int:
    """Return the tokens up to which launching a step with prompts kernel by kernel takes longer than computing it."""
    weights = config.n_layers * (
        config.dim * (2 * config.q_dim + 2 * config.kv_dim) + 3 * config.dim * config.widest_mlp
    )
    return int(config.n_layers * LAUNCHES * LAUNCH_SECONDS * PRODUCT_RATE / (2 * weights))
