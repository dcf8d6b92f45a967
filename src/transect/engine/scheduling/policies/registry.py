"""``Rule``, the record of a decision, and all rules by name: entries of ``RULES`` in files of ``engine/scheduling/``.

The entries are dicts of a rule's fields, so an engine imports nothing for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

SCHEDULING = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A decision of the scheduler, the router or the scaler.

    Attributes:
        by: functions of the file that make the decision: ``function`` or ``Class.method``.
        settings: fields of ``SchedulerConfig`` with which a small engine makes the decision often.
        engines: engines behind the router.
        acceptance: chance that a draft of a model is right; None if no model drafts.
        scaler: name in ``scaling.POLICIES`` and its arguments; empty if the number of engines stays.
        bounds: by figure of an outcome, the largest multiple of the shipped rule's figure that counts as equally good;
            empty if the decision has one right answer.
    """

    by: tuple[str, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    engines: int = 1
    acceptance: float | None = None
    scaler: tuple[str, Mapping[str, float]] | tuple[()] = ()
    bounds: Mapping[str, float] = field(default_factory=dict)


@cache
def rules() -> Mapping[str, tuple[str, Rule]]:
    """Find every rule by name, with the name of its module.

    Raises:
        ValueError: two rules have one name.
    """
    found: dict[str, tuple[str, Rule]] = {}
    for path in sorted(SCHEDULING.rglob("*.py")):
        if "\nRULES" not in path.read_text(encoding="utf-8"):
            continue
        parts = path.relative_to(SCHEDULING).with_suffix("").parts
        module = ".".join([__name__.rpartition(".policies.")[0], *parts])
        for name, entry in import_module(module).RULES.items():
            if name in found:
                raise ValueError(f"two rules are called {name!r}: rename one")
            found[name] = module, Rule(**entry)
    return found
