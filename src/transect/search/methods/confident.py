"""Vote of confident branches: unlikely ones are dropped while they are drawn (after DeepConf: Fu et al. 2025,
arXiv:2508.15260).

The first ``warmup`` branches run to their ends. A branch's confidence is its lowest mean log-probability of ``window``
consecutive tokens. The floor is the confidence that the share ``keep`` of the warm-up reaches; later branches are
dropped in the step in which they fall below it. Votes weigh exp(confidence), and the search stops when the vote is
decided as in ``adaptive``. DeepConf averages the log-probabilities of the k likeliest tokens; the drawn token's own is
used here, which the engine has at no cost.
"""

import math
from dataclasses import dataclass
from typing import Annotated

from ...engine.scheduling.sampling_params import MAX_CHOICES
from ...spec.settings import About
from ..tree import Branch, Drop, Extend, LikelihoodFloor, Steps, Tree
from .registry import SearchMethod
from .steps import Voting, certainty, choose, count_votes, draw, votes


@dataclass(frozen=True, kw_only=True)
class Confident(Voting):
    """Settings of the confident vote.

    Attributes:
        n: Branches at most.
        warmup: Branches that run to their ends before the floor is known.
        keep: Accuracy of the warm-up that reaches the floor.
        window: Tokens whose mean log-probability is compared.
        certainty: Probability that the answer with most votes would have most votes of all n branches, above which the
            vote is decided; 1 draws all n.
    """

    n: Annotated[int, About(least=1, most=MAX_CHOICES)] = 32
    warmup: Annotated[int, About(least=1, most=MAX_CHOICES)] = 8
    keep: Annotated[float, About(above=0, most=1)] = 0.5
    window: Annotated[int, About(least=1, most=4096)] = 32
    certainty: Annotated[float, About(above=0.5, most=1)] = 0.95

    @property
    def wants_logprobs(self) -> bool:
        """See ``Options``."""
        return True

    def confidence(self, branch: Branch) -> float:
        """Return the lowest window's mean log-probability; of all tokens if they are fewer than a window."""
        values = branch.logprobs
        size = min(self.window, len(values))
        if not size:
            return 0.0
        return min(sum(values[start : start + size]) for start in range(len(values) - size + 1)) / size

    def weight(self, branch: Branch) -> float:
        """Return exp(confidence)."""
        return math.exp(self.confidence(branch))


def steps(tree: Tree, options: Confident) -> Steps:
    """Draw the warm-up, then the rest above its floor until the vote is decided."""
    first = tree.fork(tree.root, min(options.warmup, options.n))
    yield from draw(first)
    ranked = sorted((options.confidence(branch) for branch in first if branch.complete), reverse=True)
    if options.n <= len(first) or _decided(tree, options, options.n - len(first)):
        return
    floor = None
    if ranked:
        floor = LikelihoodFloor(ranked[max(math.ceil(options.keep * len(ranked)) - 1, 0)], options.window)
    yield [Extend(branch, floor=floor) for branch in tree.fork(tree.root, options.n - len(first))]
    while tree.alive and not _decided(tree, options, len(tree.alive)):
        yield []
    yield [Drop(branch) for branch in tree.alive]


def _decided(tree: Tree, options: Confident, open_votes: int) -> bool:
    counts = count_votes(tree, options.extract)
    return bool(counts) and options.certainty < 1 and certainty(counts, open_votes) >= options.certainty


METHOD = SearchMethod(
    name="confident",
    about="Vote of the branches that stay likely; unlikely ones are dropped while they are drawn.",
    options=Confident,
    steps=steps,
    choose=choose,
    votes=votes,
    prefixes=("deepconf",),
)
