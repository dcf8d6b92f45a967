"""The number of keys that causal attention looks at, for the costs of the attention operators and of the model."""

from __future__ import annotations


def visible_pairs(new: int, length: int, window: int | None) -> int:
    """Query-key pairs of the last ``new`` queries of a sequence of ``length`` tokens; each sees at most ``window``."""
    past = length - new
    full = new if window is None else max(0, min(new, window - past))  # queries that see all before them
    pairs = full * past + full * (full + 1) // 2
    return pairs + (0 if window is None else (new - full) * window)


def visible_keys(new: int, length: int, window: int | None) -> int:
    """How many keys the last ``new`` queries of a sequence of ``length`` tokens see between them."""
    return length if window is None else min(length, window + new - 1)
