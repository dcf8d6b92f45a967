"""Adapters in host memory, for requests that name them: read from files, kept, and left when others need the room.

An adapter goes under its content id (``AdapterFiles``), not under a name: what a name means may change, and keys and
values that another adapter computed must not be found again. Copies on the device are ``executors/adapter_slots.py``.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

from ..checkpoints.adapter_served import ServedAdapter, read_served
from ..checkpoints.peft_config import AdapterFiles, adapter_folder, target_names
from ..checkpoints.resolve import ModelSource
from ..models.row_adapters import AdapterRoom
from ..models.weights.low_rank import Factors
from ..models.weights.row_adapted import RowAdapters
from ..spec.layouts.shards import Shard
from .config import EngineConfig
from .frontends.inputs import LoRARequest


def adapter_room(config: EngineConfig) -> AdapterRoom:
    """Compute the room on the device for the adapters of ``config``."""
    return AdapterRoom(config.max_loras, config.max_lora_rank, target_names(config.lora_target_modules))


def _part(factors: Factors, shard: Shard) -> Factors:
    """Select a rank's part of factors: rows of B where it has rows of a matrix, columns of A where it has columns."""
    found = {}
    for name, low in factors.items():
        part = shard.part(f"{name}.weight", (low.b.shape[0], low.a.shape[1]))
        if part is not None:
            found[name] = replace(low, a=low.a[:, part.columns].contiguous(), b=low.b[part.rows].contiguous())
    return found


class AdapterStore:
    """Adapters that are ready to be copied into slots, the least recently used first.

    Args:
        base: the model.
        adapters: prepares factors for the device.
        config: of the engine; ``max_cpu_loras`` adapters are kept.
        shard: this rank's part of the model; None if it has all.

    May be used from several threads.
    """

    def __init__(
        self, base: ModelSource, adapters: RowAdapters, config: EngineConfig, shard: Shard | None = None
    ) -> None:
        self._base, self._adapters, self._shard = base, adapters, shard
        self._targets, self._most_rank = target_names(config.lora_target_modules), config.max_lora_rank
        self.capacity = config.cpu_loras
        """Adapters that are kept."""
        self._held: OrderedDict[str, Any] = OrderedDict()
        self._ids: dict[tuple[str, int, int], AdapterFiles] = {}
        """Digests of files that have been read, by path, size and time of change."""
        self._lock = threading.Lock()
        self.in_use: Callable[[], Collection[str]] = tuple
        """Ids of adapters that unfinished requests have: these stay."""
        self.files: dict[str, AdapterFiles] = {}
        """Files of the adapters in memory, by content id."""
        self.dropped: Callable[[str], object] = id
        """Receives the id of each adapter that leaves."""

    def __contains__(self, adapter: str) -> bool:
        return adapter in self._held

    def __len__(self) -> int:
        return len(self._held)

    @property
    def has_room(self) -> bool:
        """True if another adapter can come, in the place of one that no request has."""
        return len(self._held) < self.capacity or bool(self._held.keys() - set(self.in_use()))

    def get(self, adapter: str) -> Any:
        """Return the prepared factors of an adapter in memory, and mark it as the most recently used."""
        with self._lock:
            self._held.move_to_end(adapter)
            return self._held[adapter]

    def load(self, files: AdapterFiles) -> None:
        """Read an adapter and keep it. For a thread: it takes as long as the files do.

        Raises:
            ValueError: see ``read_served``.
        """
        if files.id not in self._held:
            self.files[files.id] = files
            self.add(read_served(files, self._base, self._targets, self._most_rank))

    def add(self, adapter: ServedAdapter) -> None:
        """Keep an adapter that is in memory, of ranks and matrices that have room."""
        factors = adapter.factors if self._shard is None else _part(adapter.factors, self._shard)
        prepared = self._adapters.prepare(factors)
        with self._lock:
            self._held[adapter.id] = prepared

    def shrink(self) -> None:
        """Let go of the least recently used adapters that no request has, down to ``capacity``. Call it where requests
        are added and ended."""
        if len(self._held) > self.capacity:
            used = set(self.in_use())
            with self._lock:
                for adapter in [each for each in self._held if each not in used]:
                    if len(self._held) <= self.capacity:
                        break
                    self._drop(adapter)

    def forget(self, adapter: str) -> None:
        """Let go of an adapter, unless a request has it."""
        with self._lock:
            if adapter in self._held and adapter not in self.in_use():
                self._drop(adapter)

    def hold(self, files: AdapterFiles, kept: bool) -> None:
        """Read an adapter if it is not there, or let go of it: as rank 0 does."""
        if kept:
            self.load(files)
        else:
            self._drop(files.id)

    def _drop(self, adapter: str) -> None:
        del self._held[adapter]
        self.files.pop(adapter, None)
        self.dropped(adapter)

    def load_all(self, asked: Sequence[LoRARequest | None]) -> list[str]:
        """Load the adapters of one call. Returns their content ids, empty for None.

        Raises:
            ValueError: see ``load``; or there are more than ``capacity``.
        """
        files = [None if each is None else self.find(each.lora_path) for each in asked]
        distinct = {each.id: each for each in files if each is not None}
        if len(distinct) > self.capacity:
            raise ValueError(
                f"the call uses {len(distinct)} adapters, and max_cpu_loras is {self.capacity}: raise it, or make "
                "several calls"
            )
        for each in distinct.values():
            self.load(each)
            self.get(each.id)
        self.shrink()
        return ["" if each is None else each.id for each in files]

    def find(self, name: str) -> AdapterFiles:
        """Find the files of an adapter in a directory, digested unless they are those of the last time.

        Raises:
            ValueError: there is no adapter.
        """
        folder = adapter_folder(name)
        states = [path.stat() for path in sorted(folder.glob("adapter_*"))]
        key = str(folder), sum(each.st_size for each in states), max(each.st_mtime_ns for each in states)
        if key not in self._ids:
            self._ids[key] = AdapterFiles.of(folder)
        return self._ids[key]
