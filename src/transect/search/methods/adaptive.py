"""Majority vote that draws only as many answers as it needs (after adaptive consistency: Aggarwal et al. 2023,
arXiv:2305.11860).

Answers are drawn in waves. After each end the vote is looked at: it is decided when the leading answer would also win
the vote of all n answers with probability ``certainty``. Easy questions then take a fraction of n answers. A wave
has no more branches than would decide the vote if all of them agreed with the leading answer. With a budget in seconds
it has only as many as are predicted to end in time; the vote stands when there are none.
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
        certainty: Probability that the answer is that of all n branches, above which the vote is decided.
        wave: Branches that run at the same time, at most; a smaller wave draws fewer tokens and takes longer.
    """

    n: Annotated[int, About(least=1, most=MAX_CHOICES)] = 32
    certainty: Annotated[float, About(above=0.5, most=1)] = 0.95
    wave: Annotated[int, About(least=1, most=MAX_CHOICES)] = 4


def steps(tree: Tree, options: Adaptive) -> Steps:
    """Keep ``wave`` branches running until the vote is decided."""
    started = 0
    while True:
        if not tree.alive and started < options.n:  # a wave is one request, which computes the prompt once
            count = tree.affordable(_fewest(votes(tree, options), options, options.n - started))
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
        if found and (certainty(found, still_open) >= options.certainty or settled(found, still_open)):
            yield [Drop(branch) for branch in tree.alive]
            return


def _fewest(found: dict[str, float], options: Adaptive, left: int) -> int:
    """Return the size of the next wave: the fewest further votes that decide if all go to the leading answer."""
    first, *others = [*found.values()] or [0.0]
    most = min(options.wave, left)
    for count in range(1, most):
        if certainty(dict(enumerate([first + count, *others])), left - count) >= options.certainty:
            return count
    return most


METHOD = SearchMethod(
    name="adaptive",
    about="Draw answers in waves until the majority vote is decided, at most n.",
    options=Adaptive,
    steps=steps,
    choose=choose,
    votes=votes,
    prefixes=("adaptive",),
)
