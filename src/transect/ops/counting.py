"""How many keys causal attention looks at and how many experts a step touches, for costs."""

from __future__ import annotations


def visible_pairs(new: int, length: int, window: int | None, chunk: int | None = None) -> int:
    """Query-key pairs of the last ``new`` queries of a sequence of ``length`` tokens; each sees at most ``window``, or
    with ``chunk`` what came before it in its own chunk of so many positions."""
    past = length - new
    if chunk is not None:
        return _of_chunks(length, chunk) - _of_chunks(past, chunk)
    full = new if window is None else max(0, min(new, window - past))  # queries that see all before them
    pairs = full * past + full * (full + 1) // 2
    return pairs + (0 if window is None else (new - full) * window)


def _of_chunks(tokens: int, chunk: int) -> int:
    """Pairs of a whole sequence."""
    chunks, rest = divmod(tokens, chunk)
    return chunks * (chunk * (chunk + 1) // 2) + rest * (rest + 1) // 2


def visible_keys(new: int, length: int, window: int | None, chunk: int | None = None) -> int:
    """How many keys the last ``new`` queries of a sequence of ``length`` tokens see between them."""
    if chunk is not None:
        return length - (length - new) // chunk * chunk
    return length if window is None else min(length, window + new - 1)


def touched(tokens: int, k: int, experts: int) -> float:
    """How many of ``experts`` some token goes to, if each of ``tokens`` goes to k different ones drawn evenly."""
    return experts * (1 - (1 - k / experts) ** tokens)
