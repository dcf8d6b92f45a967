"""Majority vote that draws only as many answers as it needs (adaptive consistency: Aggarwal et al. 2023,
arXiv:2305.11860).

Answers are drawn in waves. After each end the vote is looked at: it is decided when the leading answer is the most
frequent one with probability ``certainty``. Easy questions then take a fraction of n answers. With a budget in seconds
a wave has only as many branches as are predicted to end in time; the vote stands when there are none.
"""

from dataclasses import dataclass
from typing import Annotated

from ...engine.scheduling.sampling_params import MAX_CHOICES
from ...spec.settings import About
from ..tree import Drop, Extend, Steps, Tree
from .registry import SearchMethod
from .steps import Voting, certainty, choose, settled, votes


@dataclass(frozen=True, kw_only=True)
class Adaptive(Voting):
    """Settings of the adaptive vote.

    Attributes:
        n: Branches at most.
        certainty: Probability that the leading answer wins, above which the vote is decided.
        wave: Branches that run at the same time; a smaller wave draws fewer tokens and takes longer.
    """

    n: Annotated[int, About(least=1, most=MAX_CHOICES)] = 32
    certainty: Annotated[float, About(above=0.5, most=1)] = 0.95
    wave: Annotated[int, About(least=1, most=MAX_CHOICES)] = 4


def steps(tree: Tree, options: Adaptive) -> Steps:
    """Keep ``wave`` branches running until the vote is decided."""
    started = 0
    while True:
        count = min(options.wave - len(tree.alive), options.n - started)
        if count > 0 and not tree.alive:  # a wave is one request, which computes the prompt once
            count = tree.affordable(count)
            if not count:
                return
            started += count
            yield [Extend(branch) for branch in tree.fork(tree.root, count)]
        elif tree.alive:
            yield []
        else:
            return
        found = votes(tree, options)
        still_open = options.n - started + len(tree.alive)
        if found and (certainty(found) >= options.certainty or settled(found, still_open)):
            yield [Drop(branch) for branch in tree.alive]
            return


METHOD = SearchMethod(
    name="adaptive",
    about="Draw answers in waves until the majority vote is decided, at most n.",
    options=Adaptive,
    steps=steps,
    choose=choose,
    votes=votes,
    prefixes=("adaptive",),
)
