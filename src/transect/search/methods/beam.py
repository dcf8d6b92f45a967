"""Beam search over steps of reasoning with a judge of unfinished answers (a process reward model or a verifier:
Snell et al. 2024, arXiv:2408.03314).

Each of ``width`` beams is continued by n / width branches up to the end of a step; all of them are scored, and the
``width`` best are kept. The last scores choose the answer.
"""

from dataclasses import dataclass
from typing import Annotated

from ...spec.settings import About
from ..judges import LIKELIHOOD
from ..tree import Branch, Drop, Extend, Steps, Tree
from .registry import Options, SearchMethod
from .steps import best, draw, finish, judge


@dataclass(frozen=True, kw_only=True)
class Beam(Options):
    """Settings of the beam search.

    Attributes:
        score: Judge of answers and of their beginnings: likelihood, verdict, or a name that the server offers.
        width: Beams that are kept after a step.
        step: Text that ends a step.
        step_tokens: Tokens of a step at most.
        steps: Steps at most; the beams then run to their ends.
    """

    score: str = LIKELIHOOD
    width: Annotated[int, About(least=1, most=64)] = 2
    step: str = "\n"
    step_tokens: Annotated[int, About(least=1, most=65536)] = 128
    steps: Annotated[int, About(least=1, most=1000)] = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width > self.n:
            raise ValueError(f"width must be at most n, which is {self.n}, not {self.width}")
        if not self.step:
            raise ValueError('step must be the text that ends a step, such as "\\n"')

    @property
    def judges(self) -> tuple[str, ...]:
        """See ``Options``."""
        return (self.score,)


def steps(tree: Tree, options: Beam) -> Steps:
    """Fork, extend by a step, score and drop, until all beams are complete."""
    beams: list[Branch] = [tree.root]
    finished: list[Branch] = []
    for number in range(options.steps):
        each = max(options.n // len(beams), 1)
        branches = [branch for beam in beams for branch in tree.fork(beam, each)]
        if number == options.steps - 1:
            yield from draw(branches)
        else:
            yield from finish([Extend(branch, options.step_tokens, (options.step,)) for branch in branches])
        branches = [branch for branch in branches if branch.state == "ended"]
        yield from judge(branches, options.score)
        ranked: list[Branch] = []
        pool = [*finished, *branches]
        while pool and len(ranked) < options.width:
            ranked.append(best(pool, options.score))
            pool.remove(ranked[-1])
        finished = [branch for branch in ranked if branch.complete]
        beams = [branch for branch in ranked if not branch.complete]
        yield [Drop(branch) for branch in branches if branch not in ranked]
        if not beams:
            return


def choose(tree: Tree, options: Beam) -> Branch:
    """Return the complete answer with the highest score."""
    return best(tree.answers(), options.score)


METHOD = SearchMethod(
    name="beam",
    about="Keep the best beginnings of an answer after each step of reasoning.",
    options=Beam,
    steps=steps,
    choose=choose,
    prefixes=("beam",),
)
