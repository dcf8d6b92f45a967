"""Test-time search of a server: the judges that its operator has set up, and the settings that a request brings."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from ..search.judges import BUILTIN, Judge, ModelVerdict, Program, RewardHead
from ..search.machine import Call
from ..search.programs import Verifier, named_places
from ..search.settings import SearchSettings
from .http.errors import ApiError
from .options import HEADS, VERIFIERS, ServerOptions
from .sender import current_request

if TYPE_CHECKING:
    from .adapters import Entry

NOT_WITH_SEARCH = (
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
    "use_beam_search",
    "truncate_prompt_tokens",
    "continue_token_ids",
)
"""Fields of requests that a search does not support."""


class SearchSupport:
    """Judges of a server, and the threads that call those of the operator's.

    Args:
        engine: for the size of hidden states.
        options: name verifiers and reward heads.

    Raises:
        ValueError: a file cannot be used.
    """

    def __init__(self, engine: Any, options: ServerOptions) -> None:
        self._budget = options.search_budget
        heads = {name: RewardHead.read(path) for name, path in named_places(options.reward_heads, HEADS).items()}
        for head in heads.values():
            head.check_size(engine.hidden_size)
        self._verifiers = {name: Verifier(place) for name, place in named_places(options.verifiers, VERIFIERS).items()}
        self._threads = {name: ThreadPoolExecutor(1, f"verifier-{name}") for name in self._verifiers}
        self._judges: dict[str, Judge] = {**heads, **{name: Program(each) for name, each in self._verifiers.items()}}

        self._of_adapters: dict[Any, Judge] = {}
        """Judges by name, directory and content of their adapters."""

    async def start(self) -> None:
        """Start the processes of verifiers. Raises ValueError if one cannot be used."""
        for name, verifier in self._verifiers.items():
            await asyncio.get_running_loop().run_in_executor(self._threads[name], verifier.start)

    def close(self) -> None:
        """End the processes."""
        for verifier in self._verifiers.values():
            verifier.close()
        for pool in self._threads.values():
            pool.shutdown(wait=False, cancel_futures=True)

    def judges(self, adapters: Sequence[Entry]) -> dict[str, Judge]:
        """Return the judges by name; an adapter of the server judges as a verifier, unless it has a reward head."""
        names: list[str] = []
        judges: dict[str, Judge] = {}
        for entry in adapters:
            name, files = entry.name, (entry.name, entry.path, entry.files and entry.files.id)
            names.append(name)
            if files not in self._of_adapters:
                self._of_adapters[files] = RewardHead.of_adapter(entry.path, name) or ModelVerdict(name)
            if name not in BUILTIN:
                judges[name] = self._of_adapters[files]
        for name, judge in self._judges.items():
            if isinstance(judge, RewardHead) and name in names:
                judge = dataclasses.replace(judge, adapter=name)
            judges[name] = judge
        return judges

    async def call(self, operation: Call) -> float | None:
        """Call a verifier in its own thread."""
        function = operation.judge.function
        name = next(name for name, each in self._verifiers.items() if each is function)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads[name], function, operation.question, operation.answer)

    def bounded(self, search: SearchSettings) -> SearchSettings:
        """Return the search with at most the server's budget of tokens."""
        tokens, most = search.budget.tokens, self._budget
        if most is None or (tokens is not None and tokens <= most):
            return search
        budget = {"tokens": most, **({} if search.budget.seconds is None else {"seconds": search.budget.seconds})}
        return SearchSettings.of({**search.to_dict(), "budget": budget, "details": search.details})


def requested_search(given: Any, body: Any) -> SearchSettings | None:
    """Read the search of a request: its ``search`` object, or the prefix of its model's name; None if it has neither.

    Raises:
        ApiError: 400, a setting is at fault, or the request has a field that a search does not support.
    """
    method = current_request().method
    if given is None and method is None:
        return None
    if method is not None and isinstance(given, Mapping | None):
        given = {"method": method.name, **(given or {})}
        if given["method"] != method.name:
            message = f"search.method is {given['method']!r:.60} and the model's prefix means {method.name}: drop one"
            raise ApiError(400, message, param="search")
    try:
        search = SearchSettings.of(given)
    except ValueError as error:
        raise ApiError(400, str(error), param="search", code="invalid_value") from None
    for name in NOT_WITH_SEARCH:
        if getattr(body, name, None):
            message = f"{name} cannot be combined with a search: leave one of them out"
            raise ApiError(400, message, param=name, code="unsupported_parameter")
    return search
