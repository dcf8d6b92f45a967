"""Copying warps of a Gluon kernel on a processor: every role is a thread, shared memory an array.

The functions of the kernel run as Python, with barriers, copies and pointers of this module in place of Gluon's. Copies
arrive late and in any order. What they bring, when barriers open and whether anybody waits forever is as on a GPU; how
shared memory is swizzled, and what a compiler makes of it all, is not looked at.
"""

from __future__ import annotations

import random
import threading
import types
from collections.abc import Callable
from typing import Any

import numpy as np

PATIENCE_S = 10.0


class Barrier:
    """An mbarrier: a phase ends when ``count`` have arrived and all bytes that were announced are there."""

    def __init__(self, changed: threading.Condition) -> None:
        self.changed, self.count, self.pending, self.bytes, self.phase = changed, 0, 0, 0, 0

    def settle(self, arrived: int, more: int) -> None:
        with self.changed:
            self.pending -= arrived
            self.bytes += more
            assert self.pending >= 0, "more arrived than the barrier counts"
            if self.pending == 0 and self.bytes == 0:
                self.phase += 1
                self.pending = self.count
                self.changed.notify_all()


class Barriers:
    def __init__(self, counts: list[int], changed: threading.Condition) -> None:
        self.items = [Barrier(changed) for _ in counts]
        for item, count in zip(self.items, counts, strict=True):
            item.count = item.pending = count

    def index(self, i: int) -> Barrier:
        return self.items[int(i)]


class Shared:
    """Shared memory as rows of 64 numbers; ``index`` gives as many rows as a piece of this shape has."""

    dtype, layout = None, None

    def __init__(self, rows: np.ndarray, shape: list[int]) -> None:
        self.rows, self.shape = rows, shape

    def index(self, i: int) -> Shared:
        assert 0 <= i < self.shape[0], f"piece {i} of {self.shape}"
        each = int(np.prod(self.shape[1:-1]))
        return Shared(self.rows[int(i) * each : (int(i) + 1) * each], self.shape[1:])

    def load(self, layout: Any = None) -> np.ndarray:
        return self.rows.reshape(self.shape).copy()

    def store(self, x: np.ndarray) -> None:
        self.rows[:] = np.asarray(x).reshape(self.rows.shape)


class Box:
    """A descriptor of ``[blocks, K, block, d]`` that copies boxes of ``shape``."""

    def __init__(self, cache: np.ndarray, shape: list[int]) -> None:
        self.cache, self.shape = cache, shape
        self.block_type = types.SimpleNamespace(nbytes=2 * int(np.prod(shape)))

    def read(self, at: list[int]) -> np.ndarray:
        x = np.zeros(self.shape)
        part = self.cache[tuple(slice(a, a + n) for a, n in zip(at, self.shape, strict=True))]
        x[tuple(slice(n) for n in part.shape)] = part
        return x


class Pointer:
    def __init__(self, array: np.ndarray, at: Any = 0) -> None:
        self.array, self.at = array, at

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.array, self.at + more)


def load(pointer: Pointer, mask: Any = True, other: Any = 0) -> Any:
    at, mask = np.broadcast_arrays(pointer.at, mask)
    assert not np.any(mask & ((at < 0) | (at >= len(pointer.array)))), "a load outside of its array"
    x = np.where(mask, pointer.array[np.where(mask, at, 0)], other)
    return x if x.shape else int(x)


class Machine:
    """One program's roles, its barriers and its copies on their way."""

    def __init__(self, seed: int) -> None:
        self.changed = threading.Condition()
        self.random = random.Random(seed)
        self.coming: list[Callable[[], None]] = []
        self.failures: list[BaseException] = []
        self.over = False
        self.engine = threading.Thread(target=self._copy_engine, daemon=True)

    def barriers(self, *counts: int) -> Barriers:
        return Barriers(list(counts), self.changed)

    def wait(self, barrier: Barrier, parity: int, pred: Any = True) -> None:
        with self.changed:
            done = self.changed.wait_for(
                lambda: self.failures or not pred or barrier.phase & 1 != parity, timeout=PATIENCE_S
            )
        if not done or self.failures:
            raise RuntimeError("nobody arrives")

    def async_load(self, box: Box, at: list[int], barrier: Barrier, where: Shared) -> None:
        assert list(where.shape) == box.shape

        def arrive() -> None:
            where.store(box.read([int(a) for a in at]))
            barrier.settle(0, -box.block_type.nbytes)

        with self.changed:
            self.coming.append(arrive)
            self.changed.notify_all()

    def _copy_engine(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.coming or self.over)
                if self.over:
                    return
                arrive = self.coming.pop(self.random.randrange(len(self.coming)))
            arrive()

    def functions(self, module: types.ModuleType) -> dict[str, Any]:
        """The module's kernels as Python functions, and what else it has."""
        names = dict(vars(module))
        mbarrier = types.SimpleNamespace(
            wait=self.wait,
            arrive=lambda barrier, pred=True: barrier.settle(1, 0),
            expect=lambda barrier, nbytes, pred=True: pred and barrier.settle(1, nbytes),
        )
        gl = types.SimpleNamespace(
            load=load, where=np.where, maximum=max, minimum=min, static_range=range, int32=None,
            arange=lambda low, high, layout: np.arange(low, high), zeros=lambda shape, *_: np.zeros(shape, np.int64),
            zeros_like=np.zeros_like, program_id=lambda _: 0, num_programs=lambda _: 1, atomic_add=self._atomic_add,
            BlockedLayout=lambda *_: None, SliceLayout=lambda *_: None,
            sum=lambda x, _: int(x.sum()), min=lambda x, _: int(np.min(x)), max=lambda x, _: int(np.max(x)),
        )  # fmt: skip
        own = {"gl": gl, "mbarrier": mbarrier, "async_load": self.async_load}
        own |= {"fence_async_shared": lambda: None, "block_barrier": lambda: None}
        own |= {"reinterpreted": lambda memory, dtype, shape, layout: Shared(memory.rows, shape)}
        made: dict[str, Any] = {}
        for name, value in names.items():
            function = getattr(value, "fn", value)
            if isinstance(function, types.FunctionType) and function.__closure__ is None:
                made[name] = types.FunctionType(function.__code__, names, name)
            elif hasattr(value, "value") and name.startswith("_"):
                made[name] = value.value
        names.update(made)
        names.update(own)
        return names

    @staticmethod
    def _atomic_add(counter: Pointer, more: int) -> int:
        before = int(counter.array[counter.at])
        counter.array[counter.at] += more
        return before

    def run(self, *roles: Callable[[], None]) -> None:
        """All roles at once.

        Raises:
            BaseException: what the first of them raised.
        """

        def guarded(role: Callable[[], None]) -> None:
            try:
                role()
            except BaseException as error:
                with self.changed:
                    self.failures.append(error)
                    self.changed.notify_all()

        self.engine.start()
        threads = [threading.Thread(target=guarded, args=(role,), daemon=True) for role in roles]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with self.changed:
            self.over = True
            self.changed.notify_all()
        self.engine.join()
        if self.failures:
            raise self.failures[0]
