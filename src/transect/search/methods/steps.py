"""Parts that methods share: waiting for branches, judging answers, votes and their settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..extract import Extractor, extract
from ..tree import Action, Assess, Branch, Drop, Extend, Steps, Tree
from .registry import Options


@dataclass(frozen=True, kw_only=True)
class Voting(Options):
    """Settings of methods that vote.

    Attributes:
        extract: Part of an answer that votes: auto, number, boxed, line, choice or text.
    """

    extract: Extractor = "auto"

    def weight(self, branch: Branch) -> float:
        """Return the weight of a complete branch's vote."""
        return 1.0


def votes(tree: Tree, options: Voting) -> dict[str, float]:
    """Sum the weights of each answer."""
    return count_votes(tree, options.extract, options.weight)


def choose(tree: Tree, options: Voting) -> Branch:
    """Return the heaviest branch with the winning answer; the first one wins a tie."""
    return elected(tree, votes(tree, options), options.weight)


def finish(actions: Sequence[Action]) -> Steps:
    """Yield the actions, and return when the work of all of them has ended."""
    waiting = {id(action.branch) for action in actions if not isinstance(action, Drop)}
    ended = yield actions
    waiting -= {id(branch) for branch in ended}
    while waiting:
        ended = yield []
        waiting -= {id(branch) for branch in ended}


def draw(branches: Sequence[Branch]) -> Steps:
    """Extend branches to their ends."""
    yield from finish([Extend(branch) for branch in branches])


def judge(branches: Iterable[Branch], by: str) -> Steps:
    """Score branches."""
    actions = [Assess(branch, by) for branch in branches]
    if actions:
        yield from finish(actions)


def best(branches: Sequence[Branch], by: str) -> Branch:
    """Return the branch with the highest score; unscored ones come last, by their likelihood. The first one wins a
    tie."""

    def rank(branch: Branch) -> tuple[bool, float, int]:
        score = branch.scores.get(by)
        return score is not None, branch.mean_logprob if score is None else score, -branch.id

    return max(branches, key=rank)


def read_answers(tree: Tree, by: str) -> list[Branch]:
    """Set ``Branch.answer`` of complete branches. Returns those that have one."""
    for branch in tree.branches:
        if branch.complete and branch.answer is None:
            branch.answer = extract(tree.answer_of(branch), by)
    return [branch for branch in tree.branches if branch.complete and branch.answer is not None]


def count_votes(tree: Tree, by: str, weight: Callable[[Branch], float] = lambda branch: 1.0) -> dict[str, float]:
    """Return the sum of weights of each answer, largest first; the answer that came first wins a tie."""
    votes: dict[str, float] = {}
    for branch in read_answers(tree, by):
        assert branch.answer is not None
        votes[branch.answer] = votes.get(branch.answer, 0.0) + weight(branch)
    return dict(sorted(votes.items(), key=lambda item: -item[1]))


def elected(tree: Tree, votes: dict[str, float], score: Callable[[Branch], float] = lambda branch: 0.0) -> Branch:
    """Return the best branch with the winning answer; without votes the likeliest answer."""
    if not votes:
        return max(tree.answers(), key=lambda branch: (branch.mean_logprob, -branch.id))
    winner = next(iter(votes))
    having = [branch for branch in tree.branches if branch.complete and branch.answer == winner]
    return max(having, key=lambda branch: (score(branch), -branch.id))


def certainty(votes: Mapping[Any, float], open_votes: int) -> float:
    """Return the probability that the leading answer still leads after ``open_votes`` more votes, a tie counted half.

    Prior and posterior are Dirichlet distributions over the first answer, the second, and all others together, with a
    uniform prior. The two leading answers get their expected share of the open votes, which divides between them as a
    beta-binomial distribution does. With infinitely many open votes this is P(Beta(a + 1, b + 1) > 1/2), the rule of
    Aggarwal et al. 2023 (arXiv:2305.11860), which asks for more votes than the full vote would cast.

    Args:
        votes: number of votes of each answer, largest first.
    """
    counts = [round(value) for value in votes.values()]
    first, second = (*counts, 0, 0)[:2]
    a, b = first + 1, second + 1
    contested = math.ceil(open_votes * (a + b) / (sum(counts) + 3))
    lost = 0.0
    for own in range(contested + 1):
        lead = first + own - (second + contested - own)
        if lead > 0:
            break
        ways = -math.log(contested + 1) - _log_beta(own + 1, contested - own + 1)
        log = ways + _log_beta(a + own, b + contested - own) - _log_beta(a, b)
        lost += math.exp(log) * (0.5 if lead == 0 else 1.0)
    return 1.0 - lost


def _log_beta(a: int, b: int) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


def settled(votes: dict[str, float], open_weight: float) -> bool:
    """Return True if no votes of at most ``open_weight`` together can change the winner."""
    weights = [*votes.values(), 0.0, 0.0]
    return weights[0] - weights[1] > open_weight
