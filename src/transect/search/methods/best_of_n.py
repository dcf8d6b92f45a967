"""Best of n: draw n answers, return the one that a judge scores highest (Stiennon et al. 2020, arXiv:2009.01325)."""

from dataclasses import dataclass

from ..judges import LIKELIHOOD
from ..tree import Branch, Steps, Tree
from .registry import Options, SearchMethod
from .steps import best, draw, judge


@dataclass(frozen=True, kw_only=True)
class BestOfN(Options):
    """Settings of best of n.

    Attributes:
        score: Judge of the answers: likelihood, verdict, or a name that the server offers.
    """

    score: str = LIKELIHOOD

    @property
    def judges(self) -> tuple[str, ...]:
        """See ``Options``."""
        return (self.score,)


def steps(tree: Tree, options: BestOfN) -> Steps:
    """Draw all answers, then score them."""
    branches = tree.fork(tree.root, options.n)
    yield from draw(branches)
    yield from judge([branch for branch in branches if branch.complete], options.score)


def choose(tree: Tree, options: BestOfN) -> Branch:
    """Return the answer with the highest score."""
    return best(tree.answers(), options.score)


METHOD = SearchMethod(
    name="best_of_n",
    about="Draw n answers and return the one with the highest score.",
    options=BestOfN,
    steps=steps,
    choose=choose,
    prefixes=("bon",),
)
