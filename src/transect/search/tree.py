"""Branches of one search, and the actions that a method yields.

A method is a generator. It forks branches (``Tree.fork``, ``Tree.ask``), and yields lists of actions: ``Extend`` draws
more tokens of a branch, ``Assess`` judges it, ``Drop`` ends it. The yield returns the branches whose work has ended, at
least one, in an order that depends on tokens alone (``machine.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Messages = Sequence[Mapping[str, Any]]
State = Literal["new", "alive", "ended", "dropped"]


@dataclass(slots=True, eq=False)
class Branch:
    """One line of tokens in a search.

    Attributes:
        id: number in the order of creation.
        parent: branch whose tokens precede this one's; None for a root.
        messages: conversation that a root continues; None for the prompt of the search.
        adapter: name of the adapter that draws its tokens; empty for the request's own.
        tokens: own tokens, after those of ``parent``.
        logprobs: log-probability of each of ``tokens``.
        text: text of the own tokens.
        state: ``alive`` while tokens are drawn, ``ended`` once the last ``Extend`` has ended.
        finish_reason: as of answers; "step" if an ``Extend`` ended before the answer did; None before.
        stop_reason: as of answers.
        scores: scores by the judge's name. A judge that failed leaves None.
        answer: extracted answer, for methods that vote.
    """

    id: int
    parent: Branch | None = None
    messages: Messages | None = None
    adapter: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    state: State = "new"
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    scores: dict[str, float | None] = field(default_factory=dict)
    answer: str | None = None

    @property
    def line(self) -> list[Branch]:
        """The branches from the root to this one."""
        return [*(self.parent.line if self.parent is not None else ()), self]

    @property
    def root(self) -> Branch:
        """First branch of the line."""
        return self if self.parent is None else self.parent.root

    @property
    def all_tokens(self) -> list[int]:
        """Tokens of the whole line."""
        return [token for branch in self.line for token in branch.tokens]

    @property
    def all_text(self) -> str:
        """Text of the whole line."""
        return "".join(branch.text for branch in self.line)

    @property
    def mean_logprob(self) -> float:
        """Mean log-probability of the line's tokens; 0 without tokens."""
        values = [value for branch in self.line for value in branch.logprobs]
        return sum(values) / len(values) if values else 0.0

    @property
    def complete(self) -> bool:
        """True if the answer has come to its own end."""
        return self.state == "ended" and self.finish_reason != "step"


@dataclass(frozen=True, slots=True)
class LikelihoodFloor:
    """Least mean log-probability of ``window`` consecutive tokens; a branch below it is dropped."""

    value: float
    window: int

    def crossed_at(self, logprobs: Sequence[float], start: int = 0) -> int | None:
        """Return the number of tokens after which a window is below the floor; None if none is. ``start``: tokens that
        were looked at before."""
        for end in range(max(self.window, start + 1), len(logprobs) + 1):
            if sum(logprobs[end - self.window : end]) < self.value * self.window:
                return end
        return None


@dataclass(frozen=True, slots=True)
class Extend:
    """Draw tokens of a branch, to its end unless a limit comes first.

    Attributes:
        max_tokens: most tokens; None for what the request leaves.
        stop: texts after which a step of reasoning ends, kept in the text of the branch.
        floor: drop the branch when it becomes too unlikely.
        greedy: take the likeliest tokens.
    """

    branch: Branch
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    floor: LikelihoodFloor | None = None
    greedy: bool = False


@dataclass(frozen=True, slots=True)
class Assess:
    """Have the judge called ``by`` score a branch; the score is in ``Branch.scores`` then."""

    branch: Branch
    by: str


@dataclass(frozen=True, slots=True)
class Drop:
    """End a branch: no token of it is drawn after the engine's current step."""

    branch: Branch


Action = Extend | Assess | Drop
Steps = Generator[Sequence[Action], list[Branch], None]


class Tree:
    """All branches of a search.

    Args:
        messages: conversation to answer; None for a plain prompt.
        adapter: name of the request's adapter; empty for the base.
        answer_text: text of a branch's answer without thoughts.
    """

    def __init__(
        self,
        messages: Messages | None = None,
        question: str = "",
        adapter: str = "",
        answer_text: Callable[[str], str] = str,
    ) -> None:
        self.messages, self.question, self.adapter = messages, question, adapter
        self.answer_text = answer_text
        self.root = Branch(-1, adapter=adapter)
        """The prompt; it has no tokens of its own."""
        self.branches: list[Branch] = []
        self.affordable: Callable[[int], int] = lambda count: count
        """Returns the number of at most ``count`` more branches that the search's seconds pay for, by the engine's
        predicted step times; see ``prices.py``."""

    def fork(self, parent: Branch, count: int, adapter: str | None = None) -> list[Branch]:
        """Create ``count`` branches that continue ``parent``. ``adapter``: another than the parent's."""
        name = parent.adapter if adapter is None else adapter
        return [self._add(Branch(len(self.branches), parent, adapter=name)) for _ in range(count)]

    def ask(self, messages: Messages, adapter: str | None = None) -> Branch:
        """Create a branch that answers another conversation, in the same engine."""
        return self._add(Branch(len(self.branches), None, list(messages), self.adapter if adapter is None else adapter))

    def _add(self, branch: Branch) -> Branch:
        self.branches.append(branch)
        return branch

    def answer_of(self, branch: Branch) -> str:
        """Return the text of a branch without thoughts."""
        return self.answer_text(branch.all_text)

    @property
    def alive(self) -> list[Branch]:
        """Branches whose tokens are being drawn."""
        return [branch for branch in self.branches if branch.state == "alive"]

    @property
    def tokens(self) -> int:
        """Tokens in the tree."""
        return sum(len(branch.tokens) for branch in self.branches)

    def answers(self) -> list[Branch]:
        """List the branches to choose an answer from: complete ones, or, if there is none, all leaves with tokens."""
        complete = [branch for branch in self.branches if branch.complete]
        if complete:
            return complete
        parents = {id(branch.parent) for branch in self.branches if branch.tokens}
        leaves = [branch for branch in self.branches if branch.tokens and id(branch) not in parents]
        return [branch for branch in leaves if branch.state != "dropped"] or leaves
