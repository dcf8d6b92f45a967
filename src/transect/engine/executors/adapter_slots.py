"""Which adapter is in which slot of the device: the least recently used gives its slot to one that is needed.

The scheduler runs sequences of at most as many adapters as there are slots. So a slot that is filled for a step belongs
to no row of it, and copies into it come, in the order of the device's work, after the steps before.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from ...models.weights.row_adapted import RowAdapters
from ..scheduling.batch import ScheduledRow


class AdapterSlots:
    """Slots of a model, filled as batches need them.

    Args:
        adapters: those of the model.
        get: gives the prepared factors of an adapter by its content id.
    """

    def __init__(self, adapters: RowAdapters, get: Callable[[str], Any]) -> None:
        self.adapters, self._get = adapters, get
        self._slot_of: OrderedDict[str, int] = OrderedDict()
        self._free = list(range(adapters.slots - 1, -1, -1))

    def place(self, rows: Sequence[ScheduledRow]) -> list[int] | None:
        """Return the slot of each row's adapter, -1 for none, with all of them filled; None if no row has an
        adapter."""
        used = dict.fromkeys(row.adapter for row in rows if row.adapter)
        if not used:
            return None
        for adapter in used:
            if adapter in self._slot_of:
                self._slot_of.move_to_end(adapter)
        for adapter in used:
            if adapter not in self._slot_of:
                self._fill(adapter)
        return [self._slot_of[row.adapter] if row.adapter else -1 for row in rows]

    def _fill(self, adapter: str) -> None:
        prepared = self._get(adapter)
        slot = self._free.pop() if self._free else self._slot_of.popitem(last=False)[1]
        try:
            self.adapters.put(slot, prepared)
        except BaseException:
            self._free.append(slot)
            raise
        self._slot_of[adapter] = slot
