"""Read adapters that are served beside a base, for the requests that name them.

Such an adapter may change matrices of the layers alone. What the base shares with all other requests (tables, norms)
cannot be another for some rows of a batch, so an adapter with such parts is refused by name.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass

from ..models.weights.low_rank import Factors
from ..spec.model import ModelConfig
from .adapter_peft import read_adapter
from .adapter_start import as_plain_lora
from .load import stored_weights
from .peft_config import AdapterFiles
from .resolve import ModelSource

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServedAdapter:
    """Factors beside a base's matrices, and the content id of the files that they come from."""

    id: str
    factors: Factors


def read_served(files: AdapterFiles, base: ModelSource, targets: Collection[str], most: int) -> ServedAdapter:
    """Read an adapter for rows of a batch of ``base``.

    Args:
        targets: names of ``MATRICES`` that have room for factors.
        most: largest rank that has room.

    Raises:
        ValueError: a file is missing, damaged or no longer the one of ``files.id``, the adapter is for another base, or
            it changes what rows of a batch share; the message names it and says what to do.
    """
    merge = "serve it alone with --adapter, or merge it into a model (transect export --merge)"
    config: ModelConfig = base.config
    try:
        stored = read_adapter(files.path, config, skips_score=True)
    except ValueError as error:
        raise ValueError(f"the adapter {files.path} does not fit {base.name}: {error}") from None
    settings = stored.settings
    if AdapterFiles.of(files.path).id != files.id:
        raise ValueError(f"the files of the adapter {files.path} have changed since it was loaded: load it again")
    if settings.dora:
        raise ValueError(f"the adapter {files.path} is DoRA, which scales whole matrices of the base: {merge}")
    shared = [*stored.replaced, *(name for name in stored.factors if not name.startswith("layers."))]
    if shared:
        raise ValueError(f"the adapter {files.path} changes {shared[0]}, which all requests share: {merge}")
    if settings.start:
        stored = as_plain_lora(stored, stored_weights(base), config)
    for name, low in stored.factors.items():
        if name.rpartition(".")[2] not in targets:
            raise ValueError(
                f"the adapter {files.path} changes {name}, and lora_target_modules has room for {', '.join(targets)} "
                "only: add it there"
            )
        if len(low.a) > most:
            raise ValueError(
                f"the adapter {files.path} has rank {len(low.a)} at {name}, and max_lora_rank is {most}: raise it"
            )
    if settings.base and settings.base.rpartition("/")[2].lower() not in (base.name.lower(), base.path.name.lower()):
        log.warning("the adapter %s was trained on %s and is served on %s", files.path, settings.base, base.name)
    return ServedAdapter(files.id, stored.factors)
