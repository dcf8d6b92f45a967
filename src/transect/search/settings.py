"""``SearchSettings``: settings of a search, from a request's ``search`` object, arguments or a command line."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from ..spec.settings import Setting, settings_of
from .methods.registry import Options, SearchMethod, search_method

SHARED = ("method", "budget", "details")


@dataclass(frozen=True, slots=True)
class SearchBudget:
    """Limits of a search; None for no limit.

    Attributes:
        tokens: tokens drawn by all branches together.
        seconds: seconds from the first engine request. A search that this ends cannot be repeated exactly.
    """

    tokens: int | None = None
    seconds: float | None = None

    @classmethod
    def of(cls, value: Any) -> SearchBudget:
        """Read a budget: a number of tokens, or an object with ``tokens`` and ``seconds``.

        Raises:
            ValueError: it is something else.
        """
        if value is None or isinstance(value, SearchBudget):
            return value or cls()
        given = {"tokens": value} if isinstance(value, int) else value
        fields = {"tokens", "seconds"}
        if not isinstance(given, Mapping) or not given or not given.keys() <= fields:
            raise ValueError(
                'search.budget must be a number of tokens, or {"tokens": 2000, "seconds": 5}, not ' + f"{value!r:.60}"
            )
        tokens, seconds = given.get("tokens"), given.get("seconds")
        if tokens is not None and (isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1):
            raise ValueError(f"search.budget must be at least 1 token, a whole number, not {tokens!r:.60}")
        if seconds is not None and (
            isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds < math.inf
        ):
            raise ValueError(f"search.budget must be above 0 seconds, not {seconds!r:.60}")
        return cls(tokens, None if seconds is None else float(seconds))


class SearchSettings:
    """Settings of a search.

    Args:
        method: name of a method (``search/methods/``).
        budget: most tokens of all branches together, or ``{"tokens": ..., "seconds": ...}``.
        details: report the texts of all branches beside the answer.
        options: settings of the method.

    Raises:
        ValueError: a setting does not exist, or its value is out of range; the message names it.
    """

    def __init__(self, method: str, *, budget: Any = None, details: bool = False, **options: Any) -> None:
        if not isinstance(method, str):
            raise ValueError(f"search.method must be the name of a method, not {method!r:.60}")
        if not isinstance(details, bool):
            raise ValueError(f"search.details must be true or false, not {details!r:.60}")
        self.method: SearchMethod = search_method(method)
        self.budget = SearchBudget.of(budget)
        self.details = details
        self.options: Options = _options(self.method, options)

    @classmethod
    def of(cls, given: Any) -> SearchSettings:
        """Read settings from an object such as ``{"method": "majority", "n": 16}``, or from a method's name.

        Raises:
            ValueError: see the class.
        """
        if isinstance(given, SearchSettings):
            return given
        if isinstance(given, str):
            return cls(given)
        if not isinstance(given, Mapping) or "method" not in given:
            raise ValueError(f'search must be an object such as {{"method": "majority", "n": 8}}, not {given!r:.60}')
        return cls(**dict(given))

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as ``of`` reads them."""
        given = {name: value for name, value in dataclasses.asdict(self.budget).items() if value is not None}
        options = dataclasses.asdict(self.options)
        return {"method": self.method.name, **options, **({"budget": given} if given else {})}

    def check_params(self, temperature: float, n: int, conversation: bool) -> None:
        """Check the settings against those of the request.

        Raises:
            ValueError: they do not fit together; the message names the field.
        """
        name = self.method.name
        if n != 1:
            raise ValueError(f"n must be 1 with a search, which returns one answer: set search.n, not n = {n}")
        if self.options.draws and not temperature:
            raise ValueError(f"temperature must be above 0 with the search {name}: at 0 all branches are the same")
        if self.method.chats and not conversation:
            raise ValueError(f"search.method {name} asks the model about its answers: give messages, not a prompt")


def _options(method: SearchMethod, given: Mapping[str, Any]) -> Options:
    kind: Any = method.options
    known = {setting.name: setting for setting in settings_of(kind)}
    for name, value in given.items():
        if name not in known:
            takes = ", ".join([*known, *SHARED[1:]])
            raise ValueError(f"{method.name} has no setting search.{name[:60]}; it takes {takes}")
        _check_type(name, value, known[name])
    try:
        options: Options = kind(**{name: tuple(v) if isinstance(v, list) else v for name, v in given.items()})
    except ValueError as error:
        raise ValueError(f"search.{error}") from None
    return options


def _check_type(name: str, value: Any, setting: Setting) -> None:
    """Check the type of a value that a request may have sent."""
    kinds = tuple(str if isinstance(kind, str) else kind for kind in setting.kinds)
    lists = [get_args(kind)[0] for kind in kinds if get_args(kind)]
    plain = tuple(kind for kind in kinds if not get_args(kind))
    if float in plain:
        plain = (*plain, int)
    listed = bool(lists) and isinstance(value, (list, tuple)) and all(isinstance(each, lists[0]) for each in value)
    fits = isinstance(value, plain) and (bool in plain or not isinstance(value, bool))
    if isinstance(value, float) and not math.isfinite(value):
        fits = False
    if not (fits or listed or (value is None and setting.optional)):
        raise ValueError(f"search.{name} must be {setting.values.replace('`', '')}, not {value!r:.60}")


def search_from_words(method: str, n: int | None, budget: str | None, options: str | None) -> SearchSettings:
    """Build a search from the options of a command.

    Args:
        budget: tokens ("2000"), seconds ("5s"), or None.
        options: further settings of the method, as JSON.

    Raises:
        ValueError: one of them is at fault.
    """
    given: dict[str, Any] = {}
    if options is not None:
        try:
            given = json.loads(options)
        except ValueError:
            given = {}
        if not isinstance(given, dict) or not given:
            raise ValueError(f"--search-options takes a JSON object such as '{{\"certainty\": 0.9}}', not {options!r}")
    if n is not None:
        given["n"] = n
    if budget is not None:
        number, seconds = budget.removesuffix("s"), budget.endswith("s")
        try:
            given["budget"] = {"seconds": float(number)} if seconds else int(number)
        except ValueError:
            raise ValueError(f"--budget takes tokens (2000) or seconds (5s), not {budget!r}") from None
    return SearchSettings(**{"method": method, **given})
