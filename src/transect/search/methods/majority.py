"""Majority vote over the short answers of n branches (self-consistency: Wang et al. 2022, arXiv:2203.11171).

Branches that are still running when the vote can no longer change are dropped, which changes no answer.
"""

from ..tree import Drop, Extend, Steps, Tree
from .registry import SearchMethod
from .steps import Voting, choose, settled, votes


def steps(tree: Tree, options: Voting) -> Steps:
    """Draw all answers until the vote is settled."""
    branches = tree.fork(tree.root, options.n)
    yield [Extend(branch) for branch in branches]
    while tree.alive and not settled(votes(tree, options), len(tree.alive)):
        yield []
    yield [Drop(branch) for branch in tree.alive]


METHOD = SearchMethod(
    name="majority",
    about="Draw n answers and return the most frequent one.",
    options=Voting,
    steps=steps,
    choose=choose,
    votes=votes,
    prefixes=("self_consistency", "majority"),
)
