"""Options of commands that search answers with more compute, and how they show a search."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from ..search.judges import Judge
    from ..search.result import SearchResult
    from ..search.settings import SearchSettings

PANEL = "Search"
SearchName = Annotated[
    str | None,
    typer.Option(
        "--search", metavar="METHOD", help="Search with this method: majority, beam ...", rich_help_panel=PANEL
    ),
]
Branches = Annotated[int | None, typer.Option("--n", help="Branches of the search.", rich_help_panel=PANEL)]
BudgetOption = Annotated[
    str | None, typer.Option("--budget", help="Most tokens (2000) or seconds (5s).", rich_help_panel=PANEL)
]
SearchOptions = Annotated[
    str | None,
    typer.Option("--search-options", metavar="JSON", help="Further settings of the method.", rich_help_panel=PANEL),
]
VerifierPlaces = Annotated[
    list[str] | None,
    typer.Option(
        "--verifier", metavar="NAME=FILE.py:FUNCTION", help="Python judge that --search-options may name as score.",
        rich_help_panel=PANEL,
    ),
]  # fmt: skip


def read_search(
    method: str | None, n: int | None, budget: str | None, options: str | None, verifiers: list[str] | None
) -> tuple[SearchSettings | None, dict[str, Judge]]:
    """Build a search and its judges from options of the command line; None without ``--search``.

    Raises:
        ValueError: an option is at fault, or needs ``--search``.
    """
    from ..search.judges import Program
    from ..search.programs import Verifier, named_places
    from ..search.settings import search_from_words

    if method is None:
        given = {"--n": n, "--budget": budget, "--search-options": options, "--verifier": verifiers}
        for flag, value in given.items():
            if value:
                raise ValueError(f"{flag} is for searches: give --search METHOD, or leave it out")
        return None, {}
    search = search_from_words(method, n, budget, options)
    places = named_places(tuple(verifiers or ()), "--verifier")
    return search, {name: Program(Verifier(place)) for name, place in places.items()}


def sequences(search: SearchSettings | None) -> int:
    """Return the sequences that run at the same time."""
    return 1 if search is None else search.options.n


class ShownSearch:
    """Progress of a search on one line of standard error, if that is a terminal; then a summary."""

    def __init__(self) -> None:
        self._shows = sys.stderr.isatty()

    def progress(self, state: dict[str, Any]) -> None:
        """Overwrite the line."""
        if self._shows:
            votes = "".join(f", {answer[:20]}: {count:g}" for answer, count in list(state.get("votes", {}).items())[:3])
            line = f"{state['alive']} branches alive, {state['ended']} ended, {state['tokens']} tokens{votes}"
            print(f"\r\x1b[K{line[:100]}", end="", file=sys.stderr, flush=True)

    def end(self, result: SearchResult) -> str:
        """Clear the line, and return the summary."""
        if self._shows:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
        votes = ", ".join(f"{answer[:20]}: {count:g}" for answer, count in list(result.votes.items())[:3])
        made = f"{result.search.method.name}: {len(result.tree.branches)} branches, {result.drawn} tokens"
        if result.ended_by == "cost":
            dear = result.quotes[-1]
            made += f"; another branch was predicted to take {dear['ms']:g} ms, longer than the budget leaves"
        return f"{made}; votes {votes}" if votes else made
