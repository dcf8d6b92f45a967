"""``OrderPolicy``, the record of a scheduling policy, and all policies: files of this folder that hold a ``POLICY``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderPolicy:
    """A scheduling policy; its file's name is its name in ``--scheduling-policy``.

    Attributes:
        level: (priority of the request, tokens that each choice may draw) -> level of a request that arrives. Lower
            levels get their turn sooner, and keep it longer. A level never changes while a request waits.
        priorities: requests may bring a priority; others are refused with what to change.
    """

    level: Callable[[int, int], float]
    priorities: bool = False


@cache
def scheduling_policies() -> tuple[str, ...]:
    """Return the names of all policies."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return tuple(path.stem for path in files if "\nPOLICY = " in path.read_text(encoding="utf-8"))


def order_policy(name: str) -> OrderPolicy:
    """Return the record of a policy.

    Raises:
        ValueError: there is none of this name; the message lists them.
    """
    names = scheduling_policies()
    if name not in names:
        known = " or ".join(f'"{each}"' for each in names)
        raise ValueError(f"scheduling_policy must be {known}, got {name!r}")
    found: OrderPolicy = import_module(f"{__package__}.{name}").POLICY
    return found
