"""Agree on one name for all ranks of a start by ``torchrun``, the first or a later one (``start_name``). No torch.

Restarted ranks find the store of the ranks before, with addresses of processes that have ended. So each start needs a
name of its own as a prefix of its keys. torchrun provides none that all hosts share: a host counts only the restarts
that its own ranks have caused. So rank 0 makes a name, and answers every rank that asks. Each process asks a new
question, so no rank takes an answer meant for an earlier one.
"""

from __future__ import annotations

import os
import time
import uuid
from typing import Protocol

from .children import BEGIN_S, RankFailure

PAUSE_S = 0.01


class Store(Protocol):
    """Part of ``torch.distributed.Store`` that is used here; all ranks write to it and read from it."""

    def set(self, key: str, value: str, /) -> None:
        """Write a value."""

    def get(self, key: str, /) -> bytes:
        """Read a value."""
        ...

    def check(self, keys: list[str], /) -> bool:
        """Return True if all keys exist."""
        ...


def start_name(store: Store, rank: int, size: int, patience: float = BEGIN_S) -> str:
    """Return a name that is equal on all ranks of this start, and unique to it.

    Args:
        store: of this start's ranks and those before.
        patience: seconds to wait for the others.

    Raises:
        RankFailure: a rank has not come in time.
    """
    until = time.monotonic() + patience
    return _answer(store, size, until, patience) if rank == 0 else _ask(store, rank, until, patience)


def _answer(store: Store, size: int, until: float, patience: float) -> str:
    """Answer all other ranks until each has its answer; called on rank 0."""
    name = uuid.uuid4().hex
    missing = list(range(1, size))
    while True:
        missing = [rank for rank in missing if not _answered(store, rank, name)]
        if not missing:
            return name
        _wait(until, f"rank {missing[0]} did not arrive within {patience:.0f} s")


def _answered(store: Store, rank: int, name: str) -> bool:
    """Answer a rank's question, if there is one, even of a process that has ended; return True if the rank has read the
    answer."""
    if not store.check([_asks(rank)]):
        return False
    question = store.get(_asks(rank)).decode()
    if not store.check([_given(question)]) or store.get(_given(question)).decode() != name:
        store.set(_given(question), name)
    return store.check([_taken(question, name)])


def _ask(store: Store, rank: int, until: float, patience: float) -> str:
    question = uuid.uuid4().hex
    store.set(_asks(rank), question)
    while not store.check([_given(question)]):
        _wait(until, f"rank 0 did not arrive within {patience:.0f} s")
    name = store.get(_given(question)).decode()
    store.set(_taken(question, name), "")
    return name


def _wait(until: float, otherwise: str) -> None:
    if time.monotonic() > until:
        raise RankFailure(f"{otherwise}: see what that host says")
    time.sleep(PAUSE_S)


def _asks(rank: int) -> str:
    return f"question of rank {rank}"


def _given(question: str) -> str:
    return f"answer to {question}"


def _taken(question: str, name: str) -> str:
    return f"{question} knows {name}"


def under_torchrun() -> bool:
    """Return True if ``torchrun`` (or a launcher with the same variables) started this process as one of several."""
    return "RANK" in os.environ and "MASTER_ADDR" in os.environ and int(os.environ.get("WORLD_SIZE", 1)) > 1
