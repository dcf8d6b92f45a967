"""The least time that a device needs to run a model: the floor that measured times stand beside.

The floor is the unavoidable work (``model.py``) at the rates of the device. The matrices of the layers, the
head and attention each take as long as their bytes or their FLOPs, whichever takes longer. Matrices that stream from
host memory take as long as the host link needs for them, if that is longer than all of this. MFU and MBU are these
FLOPs and bytes over the measured time, as shares of the rates of the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ..spec.layouts.ranks import RankLayout
from ..spec.model import ModelConfig
from .ceilings import Ceilings
from .model import Row, least_attention, least_products
from .storage import Storage
from .work import Cost

ALONE = RankLayout()
"""One rank."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes per second read, and FLOP/s of matrix products in the dtype that the model computes in."""

    bytes_per_second: float
    flops_per_second: float
    device: str = ""
    host_bytes_per_second: float | None = None
    """Bandwidth from the host to the device; None if unknown, or if there is no such link."""

    @classmethod
    def of(cls, ceilings: Ceilings, dtype: str) -> Rates:
        """Take the two rates that bound a model.

        Raises:
            ValueError: the ceilings have no rate for ``dtype``.
        """
        link = ceilings.host_to_device_bytes_per_second
        return cls(ceilings.read_bytes_per_second, ceilings.rate(dtype), ceilings.device, link)

    def floor(self, cost: Cost) -> Floor:
        """Return the floor of one piece of work."""
        return Floor(cost.flops, cost.bytes, cost.floor(self.flops_per_second, self.bytes_per_second))


@dataclass(frozen=True, slots=True)
class Floor:
    """FLOPs, bytes, and the least time for them in seconds."""

    flops: float = 0.0
    bytes: float = 0.0
    seconds: float = 0.0

    def __add__(self, other: Floor) -> Floor:
        return Floor(self.flops + other.flops, self.bytes + other.bytes, self.seconds + other.seconds)

    def __truediv__(self, parts: int) -> Floor:
        return Floor(self.flops / parts, self.bytes / parts, self.seconds / parts)

    def compared(self, measured_s: float, rates: Rates) -> dict[str, float]:
        """Return ``floor_s``, ``of_floor`` (1: at the floor), ``mbu`` and ``mfu`` of a measured time in seconds."""
        return {
            "floor_s": self.seconds,
            "of_floor": self.seconds / measured_s,
            "mbu": self.bytes / measured_s / rates.bytes_per_second,
            "mfu": self.flops / measured_s / rates.flops_per_second,
        }


class StepFloors:
    """Floors of steps of one model on one device.

    Args:
        ranks: devices that every matrix is cut between; the floor is that of one of them, without their messages.

    Raises:
        ValueError: the model cannot be cut so.
    """

    def __init__(self, config: ModelConfig, rates: Rates, storage: Storage | None = None, *, ranks: int = 1) -> None:
        self.config, self.rates, self.storage, self.ranks = config.local(ranks), rates, storage or Storage(), ranks
        self._products: dict[tuple[int, int], Floor] = {}
        """Floors of products by (tokens, tokens with logits), which recur for many layers."""

    def __call__(self, rows: Sequence[Row], logit_rows: int | None = None) -> Floor:
        """Return the floor of a step of a ragged batch; ``logit_rows`` tokens go through the head, by default one for
        each row. If layers stream, the host link works beside the device and may need longer for them."""
        size = sum(row.new for row in rows), len(rows) if logit_rows is None else logit_rows
        found = self._products.get(size)
        if found is None:
            costs = least_products(self.config, *size, self.storage)
            linear, head = self.rates.floor(costs["linear"]), self.rates.floor(costs["head"])
            found = self._products[size] = linear + head / self.ranks
        found += self.rates.floor(least_attention(self.config, rows, self.storage))
        if self.rates.host_bytes_per_second is None:
            return found
        return replace(found, seconds=max(found.seconds, self.storage.streamed / self.rates.host_bytes_per_second))


def step_floor(
    config: ModelConfig,
    rows: Sequence[Row],
    rates: Rates,
    storage: Storage | None = None,
    logit_rows: int | None = None,
    *,
    ranks: int = 1,
) -> Floor:
    """Return the floor of one step; arguments are those of ``StepFloors``.

    Raises:
        ValueError: the model cannot be cut so.
    """
    return StepFloors(config, rates, storage, ranks=ranks)(rows, logit_rows)


def batch_floor(
    config: ModelConfig,
    lengths: Iterable[tuple[int, int]],
    rates: Rates,
    storage: Storage | None = None,
    layout: RankLayout = ALONE,
) -> tuple[Floor, Floor]:
    """Return the floors of (prefill, decode) of sequences of (prompt tokens, output tokens) that all run together.

    One prefill computes all prompts and draws every first token. Then each step decodes the sequences that still have
    tokens to draw. With a ``layout`` each of its ranks has a device: groups along its data axis share the sequences,
    and stages work at the same time.

    Raises:
        ValueError: the model cannot be cut so.
    """
    lengths = list(lengths)[:: layout.data]
    step = StepFloors(config, rates, storage, ranks=layout.tensor)
    prefill = step([Row(prompt, prompt) for prompt, _ in lengths]) / layout.pipeline
    decode = Floor()
    for drawn in range(1, max(new for _, new in lengths)):
        decode += step([Row(1, prompt + drawn) for prompt, new in lengths if new > drawn]) / layout.pipeline
    return prefill, decode
