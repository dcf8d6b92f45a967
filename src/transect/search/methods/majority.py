"""Majority vote over the short answers of n branches (self-consistency: Wang et al. 2022, arXiv:2203.11171).

Branches that are still running when the vote can no longer change are dropped, which changes no answer.
"""

from dataclasses import dataclass

from ..extract import Extractor
from ..tree import Branch, Drop, Extend, Steps, Tree
from .registry import Options, SearchMethod
from .steps import count_votes, elected, settled


@dataclass(frozen=True, kw_only=True)
class Majority(Options):
    """Settings of the majority vote.

    Attributes:
        extract: Part of an answer that votes: auto, number, boxed, line, choice or text.
    """

    extract: Extractor = "auto"


def steps(tree: Tree, options: Majority) -> Steps:
    """Draw all answers until the vote is settled."""
    branches = tree.fork(tree.root, options.n)
    yield [Extend(branch) for branch in branches]
    while tree.alive and not settled(votes(tree, options), len(tree.alive)):
        yield []
    yield [Drop(branch) for branch in tree.alive]


def votes(tree: Tree, options: Majority) -> dict[str, float]:
    """Count the votes."""
    return count_votes(tree, options.extract)


def choose(tree: Tree, options: Majority) -> Branch:
    """Return the first branch with the answer of the majority."""
    return elected(tree, votes(tree, options))


METHOD = SearchMethod(
    name="majority",
    about="Draw n answers and return the most frequent one.",
    options=Majority,
    steps=steps,
    choose=choose,
    votes=votes,
    prefixes=("self_consistency", "majority"),
)
