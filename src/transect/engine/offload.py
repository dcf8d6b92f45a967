"""Choice of the layers that stream from host memory or a file (``models/streaming/``), and a check for room before
anything is read."""

from __future__ import annotations

import shutil
from collections.abc import Mapping

from ..costs.memory.streaming import StreamPlan, layer_bytes, plan_stream
from ..costs.storage import Storage
from ..costs.units import GIB
from ..hardware.host_memory import free_memory
from ..spec.model import ModelConfig
from .config import EngineConfig


def stream_plan(
    config: EngineConfig,
    model: ModelConfig,
    storage: Storage,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    *,
    ranks: int = 1,
) -> StreamPlan | None:
    """Plan the layers that stream, like ``planned_stream``, and check that there is room for them.

    Args:
        ranks: number of ranks on this host that do the same.

    Raises:
        ValueError: there is no room for them where they are to live, or the model is too small.
    """
    plan = planned_stream(config, model, storage, shapes)
    if plan is not None:
        check_room(plan, ranks)
    return plan


def planned_stream(
    config: EngineConfig, model: ModelConfig, storage: Storage, shapes: Mapping[str, tuple[int, ...]] | None = None
) -> StreamPlan | None:
    """Plan the layers that stream because of ``config.cpu_offload_gb``; None if it is 0.

    Args:
        model: the whole model.
        storage: the formats of the weights.
        shapes: this rank's shapes of the weights; None for whole weights.

    Raises:
        ValueError: the model is too small.
    """
    if not config.cpu_offload_gb:
        return None
    return plan_stream(layer_bytes(model, storage, shapes), config.cpu_offload_gb, config.offload_folder)


def check_room(plan: StreamPlan, ranks: int = 1) -> None:
    """Check that the layers of ``plan`` fit in their storage.

    Raises:
        ValueError: they have not; the message has the numbers.
    """
    needed, each = plan.bytes * ranks, f" for {ranks} ranks" if ranks > 1 else ""
    what = f"the layers that stream take {needed / GIB:.1f} GiB{each}"
    if plan.folder is None:
        free = free_memory()
        if needed > free:
            raise ValueError(
                f"{what} of host memory, and {free / GIB:.1f} GiB are free: lower cpu_offload_gb, or give "
                "offload_folder, a folder on a fast disk that they live in"
            )
        return
    folder = f"offload_folder {plan.folder!r}"
    try:
        free = shutil.disk_usage(plan.folder).free
    except OSError as error:
        raise ValueError(f"{folder} cannot be used ({error}): give another") from error
    if needed > free:
        raise ValueError(
            f"{what} on the disk of {folder}, and {free / GIB:.1f} GiB are free there: lower cpu_offload_gb, or give a "
            "folder on another disk"
        )
