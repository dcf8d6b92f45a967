"""``Cost``: the FLOPs and bytes of a piece of work, and the counts that attention and experts need for theirs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cost:
    """The least work of an operator: each input read once, each output written once."""

    flops: float
    bytes_read: float
    bytes_written: float

    @property
    def bytes(self) -> float:
        return self.bytes_read + self.bytes_written

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / self.bytes if self.bytes else 0.0

    def floor(self, flops_per_second: float, bytes_per_second: float) -> float:
        """Return the least time in seconds for a device with these two ceilings."""
        return max(self.flops / flops_per_second, self.bytes / bytes_per_second)

    def __mul__(self, times: float) -> Cost:
        return Cost(times * self.flops, times * self.bytes_read, times * self.bytes_written)

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.flops + other.flops, self.bytes_read + other.bytes_read, self.bytes_written + other.bytes_written
        )


def visible_pairs(new: int, length: int, window: int | None, chunk: int | None = None) -> int:
    """Count the query-key pairs of the last ``new`` queries of a sequence of ``length`` tokens. Each sees at most
    ``window`` keys, or the keys before it in its own chunk of ``chunk`` positions."""
    past = length - new
    if chunk is not None:
        return _of_chunks(length, chunk) - _of_chunks(past, chunk)
    full = new if window is None else max(0, min(new, window - past))  # queries that see all before them
    pairs = full * past + full * (full + 1) // 2
    return pairs + (0 if window is None else (new - full) * window)


def _of_chunks(tokens: int, chunk: int) -> int:
    """Count the pairs of a whole sequence."""
    chunks, rest = divmod(tokens, chunk)
    return chunks * (chunk * (chunk + 1) // 2) + rest * (rest + 1) // 2


def visible_keys(new: int, length: int, window: int | None, chunk: int | None = None) -> int:
    """Count the keys that the last ``new`` queries of a sequence of ``length`` tokens see together."""
    if chunk is not None:
        return length - (length - new) // chunk * chunk
    return length if window is None else min(length, window + new - 1)


def touched(tokens: int, k: int, experts: int) -> float:
    """Estimate how many of ``experts`` get a token, if each of ``tokens`` goes to k different ones drawn evenly."""
    return experts * (1 - (1 - k / experts) ** tokens)


def expert_cost(
    tokens: float,
    k: int,
    experts: int,
    outputs: Sequence[int],
    inputs: int,
    *,
    bits: float,
    activation: float,
    bias: float = 0,
    ordered: bool = True,
    distinct: float | None = None,
) -> Cost:
    """Count one product by experts: k rows for each token. Each touched expert is read once.

    Args:
        ordered: the rows of a token are read as one, not as k.
        outputs, inputs: of one expert, as in ``product_cost``.
        distinct: number of experts touched; by default the average under even routing.
    """
    distinct = touched(int(tokens), k, experts) if distinct is None else distinct
    one = product_cost(tokens * k, outputs, inputs, bits=bits, activation=activation, bias=bias)
    stored = sum(outputs) * (inputs * bits + bias) / 8
    again = tokens * (k - 1) * inputs * activation / 8 if ordered else 0.0
    return Cost(one.flops, one.bytes_read - again + (distinct - 1) * stored, one.bytes_written)


def product_cost(
    tokens: float, outputs: Sequence[int], inputs: int, *, bits: float, activation: float, bias: float = 0
) -> Cost:
    """Count one product with matrices that share an input: each read once, input and output once.

    Args:
        outputs: rows of each matrix.
        bits: of a number of the matrices. activation: of one of input and output. bias: of one of the bias; 0: none.
    """
    width = sum(outputs)
    flops = tokens * width * (2 * inputs + bool(bias))
    read = tokens * inputs * activation + width * inputs * bits + width * bias
    return Cost(flops, read / 8, tokens * width * activation / 8)
