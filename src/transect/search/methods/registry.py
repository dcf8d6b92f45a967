"""``SearchMethod``, the record of a method, its settings, and all methods: files of this folder that hold a
``METHOD``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any

from ...engine.scheduling.sampling_params import MAX_CHOICES
from ...spec.records import records_in
from ...spec.settings import About, check_values
from ..tree import Branch, Steps, Tree


@dataclass(frozen=True, kw_only=True)
class Options:
    """Settings that every method has.

    Attributes:
        n: Branches.
    """

    n: Annotated[int, About(least=1, most=MAX_CHOICES)] = 8

    def __post_init__(self) -> None:
        check_values(self)

    @property
    def wants_logprobs(self) -> bool:
        """True if the method reads ``Branch.logprobs``."""
        return False

    @property
    def judges(self) -> tuple[str, ...]:
        """Names of the judges that the method uses."""
        return ()

    @property
    def draws(self) -> bool:
        """True if branches must differ, so that the temperature must be above 0."""
        return self.n > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchMethod:
    """A method of test-time search.

    Attributes:
        name: name in ``search.method``.
        about: a sentence for pages and help.
        options: dataclass of its settings, derived from ``Options``.
        steps: (tree, options) -> generator of actions, see ``tree.py``.
        choose: (tree, options) -> the branch whose text is the answer; also called when the budget is spent before the
            generator has ended. ``tree.answers()`` is not empty.
        votes: (tree, options) -> weight of each extracted answer, for methods that vote.
        prefixes: prefixes of model names that select the method, as in optillm.
        chats: the method asks the model further questions, so the prompt must be a conversation.
    """

    name: str
    about: str
    options: type[Options]
    steps: Callable[[Tree, Any], Steps]
    choose: Callable[[Tree, Any], Branch]
    votes: Callable[[Tree, Any], Mapping[str, float]] | None = None
    prefixes: tuple[str, ...] = ()
    chats: bool = False


@cache
def search_methods() -> dict[str, SearchMethod]:
    """Return all methods by name."""
    return records_in(__package__ or "", SearchMethod, "search methods")


def search_method(name: str) -> SearchMethod:
    """Return the method of a name.

    Raises:
        ValueError: there is none; the message lists them.
    """
    found = search_methods().get(name)
    if found is None:
        raise ValueError(f"search.method must be one of {', '.join(sorted(search_methods()))}, not {name[:60]!r}")
    return found


def search_prefixes() -> list[str]:
    """List the prefixes of model names that select a method."""
    return sorted(prefix for method in search_methods().values() for prefix in method.prefixes)


def prefixed(model: str) -> tuple[SearchMethod, str] | None:
    """Split a model name such as ``bon-MODEL`` into a method and the rest; None if it has no method's prefix."""
    for method in search_methods().values():
        for prefix in method.prefixes:
            if model.startswith(f"{prefix}-") and len(model) > len(prefix) + 1:
                return method, model[len(prefix) + 1 :]
    return None
