"""``SearchResult``: the answer of a search, and its tree as plain data, also while it grows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .settings import SearchSettings
from .tree import Branch, Tree


@dataclass(slots=True)
class SearchResult:
    """Outcome of a search.

    Attributes:
        search: its settings.
        tree: all branches.
        branch: the chosen one.
        seed: with it, the same request has the same tree.
        drawn: tokens that the engine drew for branches.
        ended_by: "method", or the budget that was spent: "tokens" or "seconds"; "cost" if one more branch would not
            have ended within the seconds.
        quotes: predicted costs of forks, for methods that ask for them.
    """

    search: SearchSettings
    tree: Tree
    branch: Branch
    seed: int
    drawn: int
    ended_by: str
    quotes: Sequence[Mapping[str, Any]] = ()

    @property
    def text(self) -> str:
        """Text of the answer."""
        return self.branch.all_text

    @property
    def votes(self) -> Mapping[str, float]:
        """Weight of each extracted answer; empty for methods that do not vote."""
        votes = self.search.method.votes
        return {} if votes is None else dict(votes(self.tree, self.search.options))

    def to_dict(self) -> dict[str, Any]:
        """Return settings, votes and branches for JSON. Branches have texts if ``search.details`` is set; ``forks`` are
        the predicted costs, where there is a budget in seconds."""
        return {
            **self.search.to_dict(),
            "seed": self.seed,
            "tokens": self.drawn,
            "ended_by": self.ended_by,
            "chosen": self.branch.id,
            "votes": dict(self.votes),
            **({"forks": list(self.quotes)} if self.search.budget.seconds is not None else {}),
            "branches": [_described(branch, self.search.details) for branch in self.tree.branches],
        }


class TreeNews:
    """Descriptions of branches that have changed since the last look, for streams that draw a growing tree."""

    def __init__(self) -> None:
        self._told: dict[int, dict[str, Any]] = {}

    def take(self, tree: Tree, running: Mapping[int, int]) -> list[dict[str, Any]]:
        """Return new and changed branches without texts. ``running``: tokens of running branches, by id."""
        found = [_described(branch, False) for branch in tree.branches]
        for each in found:
            each["tokens"] += running.get(each["id"], 0)
        changed = [each for each in found if each != self._told.get(each["id"])]
        self._told.update((each["id"], each) for each in changed)
        return changed


def _described(branch: Branch, texts: bool) -> dict[str, Any]:
    parent = None if branch.parent is None or branch.parent.id < 0 else branch.parent.id
    found: dict[str, Any] = {
        "id": branch.id,
        "parent": parent,
        "state": branch.state,
        "tokens": len(branch.tokens),
        "finish_reason": branch.finish_reason,
        "scores": dict(branch.scores),
        "answer": branch.answer,
    }
    if branch.adapter:
        found["adapter"] = branch.adapter
    if texts:
        found["text"] = branch.text
    return found
