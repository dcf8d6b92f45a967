"""Repetitions of each file's windows or documents in an epoch, from the shares in ``data.weights``."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def repeats(weights: Sequence[float], tokens: Sequence[int]) -> list[float]:
    """Compute the repetitions of each source in an epoch with as many tokens as all sources together.

    Args:
        weights: shares of the tokens of an epoch; they need not add up to 1.
        tokens: of each source.
    """
    whole = sum(weights)
    return [weight / whole * sum(tokens) / max(count, 1) for weight, count in zip(weights, tokens, strict=True)]


def mixed(units: np.ndarray, source: np.ndarray, often: Sequence[float], generator: np.random.Generator) -> np.ndarray:
    """Choose the units of an epoch in random order: those of source s ``often[s]`` times; of a fractional repetition,
    another part in every epoch.

    Args:
        units: windows or documents, int64. source: the source of each.
    """
    chosen = []
    for number, times in enumerate(often):
        own = units[source == number]
        chosen += [own] * int(times)
        chosen.append(generator.permutation(own)[: round((times - int(times)) * len(own))])
    order: np.ndarray = generator.permutation(np.concatenate(chosen))
    return order
