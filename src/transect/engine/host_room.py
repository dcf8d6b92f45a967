"""Check that a model's weights fit in the memory of the host, before they are read or drawn.

Without this check a model that is too large takes all memory, and the system kills the engine, or another program,
without a message. Only a certain misfit is refused: it counts the weights alone, in the fewest bits in which they may
be held.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..checkpoints.layouts import held_layouts
from ..checkpoints.resolve import ModelSource
from ..costs.model import weight_bytes
from ..costs.storage import storage_for, storage_held
from ..costs.units import GIB
from ..spec.numbers.registry import roundings
from .config import EngineConfig


def check_weights(
    config: EngineConfig,
    source: ModelSource,
    free: int,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    *,
    ranks: int = 1,
) -> None:
    """Refuse weights that do not fit.

    Args:
        free: bytes of this host's memory.
        shapes: each rank's shapes of the weights; None for whole weights.
        ranks: number of ranks on this host with such weights.

    Raises:
        ValueError: the weights do not fit; the message has the numbers, and what to change.
    """
    storage = storage_for(4 if config.dtype == "float32" else 2, config.quantization)
    needed = ranks * weight_bytes(source.config, storage, shapes)
    if needed <= free:
        return
    if config.quantization is None and config.dtype != "float32":
        packed = storage_held(storage, held_layouts(source))
        needed = min(needed, ranks * weight_bytes(source.config, packed, shapes))
    if source.kind == "gguf":  # its blocks are held as they are, the table among them
        needed = min(needed, sum(file.stat().st_size for file in source.gguf_files))
    if needed <= free:
        return
    each = f" over {ranks} ranks of this host" if ranks > 1 else ""
    fewest = next(iter(roundings()))
    fewer = "" if config.quantization == fewest else f"hold them in fewer bits (quantization={fewest!r}), "
    raise ValueError(
        f"the weights take {needed / GIB:.1f} GiB of memory{each}, and {free / GIB:.1f} GiB are free: {fewer}take a "
        "smaller model, or let layers come from a disk (cpu_offload_gb with offload_folder)"
    )
