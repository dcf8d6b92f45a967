"""Finds the records of a folder that holds one file an entry."""

from __future__ import annotations

import pkgutil
from importlib import import_module
from typing import Protocol, TypeVar


class _Named(Protocol):
    """A record with a name."""

    @property
    def name(self) -> str:
        """Name that is unique in the folder."""


T = TypeVar("T", bound=_Named)


def records_in(package: str, kind: type[T], plural: str) -> dict[str, T]:
    """Return the records of one kind by name: the names of that type in the modules of ``package``, its ``registry``
    aside. ``plural``: the records' name in an error.

    Raises:
        ValueError: two records have one name.
    """
    found: dict[str, T] = {}
    for info in pkgutil.iter_modules(import_module(package).__path__):
        if info.name == "registry":
            continue
        for each in vars(import_module(f"{package}.{info.name}")).values():
            if isinstance(each, kind) and found.setdefault(each.name, each) is not each:
                raise ValueError(f"two {plural} are called {each.name!r}: rename one")
    return found
