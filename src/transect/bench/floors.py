"""The least time that a device needs to run a model: the floor that measured times stand beside.

The floor is the unavoidable work (``models.cost.least_cost``) at the rates of the device. The matrices of the layers,
the head and attention each take as long as their bytes or their FLOPs, whichever takes longer. Matrices that stream
from host memory take as long as the host link needs for them, if that is longer than all of this. MFU and MBU are these
FLOPs and bytes over the measured time, as shares of what the device can do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ..checkpoints.layouts import held_layouts
from ..checkpoints.resolve import ModelSource
from ..costs.ceilings import Ceilings
from ..models.cost import Row, Storage, least_cost
from ..models.storage import storage_for, storage_held
from ..spec.layouts.ranks import RankLayout
from ..spec.model import ModelConfig

ALONE = RankLayout()
"""One rank."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes per second read, and FLOP/s of matrix products in the dtype that the model computes in."""

    bytes_per_second: float
    flops_per_second: float
    device: str = ""
    host_bytes_per_second: float | None = None
    """From the host to the device; None where not known, or where there is no such link."""

    @property
    def both(self) -> tuple[float, float]:
        """(FLOP/s, bytes per second)."""
        return self.flops_per_second, self.bytes_per_second

    @classmethod
    def of(cls, ceilings: Ceilings, dtype: str) -> Rates:
        """The two rates that bound a model.

        Raises:
            ValueError: the ceilings have no rate for ``dtype``.
        """
        link = ceilings.host_to_device_bytes_per_second
        return cls(ceilings.read_bytes_per_second, ceilings.rate(dtype), ceilings.device, link)


@dataclass(frozen=True, slots=True)
class Floor:
    """FLOPs, bytes, and the least time for them in seconds."""

    flops: float = 0.0
    bytes: float = 0.0
    seconds: float = 0.0

    def __add__(self, other: Floor) -> Floor:
        return Floor(self.flops + other.flops, self.bytes + other.bytes, self.seconds + other.seconds)

    def compared(self, measured_s: float, rates: Rates) -> dict[str, float]:
        """``floor_s``, ``of_floor`` (1: at the floor), ``mbu`` and ``mfu`` of a measured time in seconds."""
        return {
            "floor_s": self.seconds,
            "of_floor": self.seconds / measured_s,
            "mbu": self.bytes / measured_s / rates.bytes_per_second,
            "mfu": self.flops / measured_s / rates.flops_per_second,
        }


def step_floor(
    config: ModelConfig,
    rows: Sequence[Row],
    rates: Rates,
    storage: Storage | None = None,
    logit_rows: int | None = None,
    *,
    ranks: int = 1,
) -> Floor:
    """One step of a ragged batch; ``logit_rows`` tokens go through the output head, by default one for each row. Where
    layers stream, the host link may need longer for them than the device for everything else, which goes on beside.

    Args:
        ranks: devices between which every matrix is cut; the floor is that of one of them, without what goes between.

    Raises:
        ValueError: the model cannot be cut so.
    """
    found = Floor()
    for name, cost in least_cost(config.local(ranks), rows, storage=storage, logit_rows=logit_rows).items():
        share = ranks if name == "head" else 1
        found += Floor(cost.flops / share, cost.bytes / share, cost.floor(*rates.both) / share)
    if storage is None or rates.host_bytes_per_second is None:
        return found
    return replace(found, seconds=max(found.seconds, storage.streamed / rates.host_bytes_per_second))


def batch_floor(
    config: ModelConfig,
    lengths: Iterable[tuple[int, int]],
    rates: Rates,
    storage: Storage | None = None,
    layout: RankLayout = ALONE,
) -> tuple[Floor, Floor]:
    """(prefill, decode) of sequences of (prompt tokens, output tokens) that all run together.

    One prefill computes all prompts and draws every first token. Then each step decodes the sequences that still have
    tokens to draw. With a ``layout`` each of its ranks has a device: groups along its data axis share the sequences,
    and stages work at the same time.

    Raises:
        ValueError: the model cannot be cut so.
    """
    lengths = list(lengths)[:: layout.data]

    def step(rows: list[Row]) -> Floor:
        whole, stages = step_floor(config, rows, rates, storage, ranks=layout.tensor), layout.pipeline
        return Floor(whole.flops / stages, whole.bytes / stages, whole.seconds / stages)

    prefill = step([Row(prompt, prompt) for prompt, _ in lengths])
    decode = Floor()
    for drawn in range(1, max(new for _, new in lengths)):
        decode += step([Row(1, prompt + drawn) for prompt, new in lengths if new > drawn])
    return prefill, decode


def storage_of(source: ModelSource, dtype: str, *, keeps_quantized: bool, quantization: str | None = None) -> Storage:
    """Bits per number of the weights and the KV cache in an engine of this ``dtype``.

    ``keeps_quantized``: the C++ kernels run, which keep a GGUF file's matrices in their own formats. Other weights are
    bfloat16, or float32 where ``dtype`` says so. ``quantization``: the format of the layers' matrices, as in
    ``EngineConfig``.
    """
    dense = 32.0 if dtype == "float32" else 16.0
    if source.kind != "gguf" or not keeps_quantized:
        storage = storage_for(int(dense) // 8, quantization, native=keeps_quantized)
        if quantization is None and not keeps_quantized and dtype != "float32":
            storage = storage_held(storage, held_layouts(source, gguf=False))
        return replace(storage, norm=16, activation=dense)
    sizes = {"head": [0, 0], "linear": [0, 0]}
    head = "token_embd.weight" if source.config.tied_embeddings else "output.weight"
    for name, tensor in source.gguf.tensors.items():
        kind = "head" if name == head else "linear" if name.startswith("blk.") and len(tensor.shape) == 2 else None
        if kind is not None:
            sizes[kind][0] += tensor.blocks.nbytes
            sizes[kind][1] += math.prod(tensor.shape)
    bits = {kind: 8 * size / count for kind, (size, count) in sizes.items()}
    if quantization is not None:
        bits["linear"] = storage_for(2, quantization, native=True).linear
    return Storage(linear=bits["linear"], embed=bits["head"], head=bits["head"], kv=dense, activation=32)
