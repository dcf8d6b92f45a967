"""Vote in which each branch weighs as much as its score (Li et al. 2022, arXiv:2206.02336).

A probability weighs as it is, and a reward r weighs exp(r); the likelihood is the mean log-probability, so it weighs as
the geometric mean of the tokens' probabilities.
"""

import math
from dataclasses import dataclass

from ..judges import LIKELIHOOD, VERDICT
from ..tree import Branch, Steps, Tree
from .registry import SearchMethod
from .steps import Voting, choose, draw, judge, votes

LARGEST = 50.0
"""Largest reward whose exponential is taken."""


@dataclass(frozen=True, kw_only=True)
class WeightedMajority(Voting):
    """Settings of the weighted vote.

    Attributes:
        score: Judge whose scores are the weights: likelihood, verdict, or a name that the server offers.
        linear: Use scores as weights as they are, for judges that return probabilities; negative ones count as 0.
    """

    score: str = LIKELIHOOD
    linear: bool = False

    @property
    def judges(self) -> tuple[str, ...]:
        """See ``Options``."""
        return (self.score,)

    def weight(self, branch: Branch) -> float:
        """Return the weight of a branch's vote; 0 without a score."""
        score = branch.scores.get(self.score)
        if score is None:
            return 0.0
        if self.linear or self.score == VERDICT:
            return max(score, 0.0)
        return math.exp(min(score, LARGEST))


def steps(tree: Tree, options: WeightedMajority) -> Steps:
    """Draw all answers, then score them."""
    branches = tree.fork(tree.root, options.n)
    yield from draw(branches)
    yield from judge([branch for branch in branches if branch.complete], options.score)


METHOD = SearchMethod(
    name="weighted_majority",
    about="Draw n answers, weigh each vote by its score, and return the answer with the largest sum.",
    options=WeightedMajority,
    steps=steps,
    choose=choose,
    votes=votes,
)
