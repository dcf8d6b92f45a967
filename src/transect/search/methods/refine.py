"""Self-refine: answer, criticize, answer again (Madaan et al. 2023, arXiv:2303.17651).

Each of n branches goes through ``rounds`` rounds. A judge chooses among all answers, so a round that makes an answer
worse does no harm if the judge sees it.
"""

from dataclasses import dataclass
from typing import Annotated

from ...spec.settings import About
from ..judges import VERDICT
from ..tree import Branch, Messages, Steps, Tree
from .registry import Options, SearchMethod
from .steps import best, draw, judge

CRITICIZE = "Check your answer. List its errors, or say that it is correct."
REVISE = "Write your final answer again, with all errors corrected. Do not mention the earlier answer."


@dataclass(frozen=True, kw_only=True)
class Refine(Options):
    """Settings of self-refine.

    Attributes:
        n: First answers, each of which is refined.
        rounds: Rounds of criticism.
        score: Judge of all answers: likelihood, verdict, or a name that the server offers.
    """

    n: Annotated[int, About(least=1, most=128)] = 1
    rounds: Annotated[int, About(least=1, most=8)] = 1
    score: str = VERDICT

    @property
    def judges(self) -> tuple[str, ...]:
        """See ``Options``."""
        return (self.score,)


def steps(tree: Tree, options: Refine) -> Steps:
    """Draw answers; draw a criticism of each, then a better answer."""
    assert tree.messages is not None
    answers = tree.fork(tree.root, options.n)
    yield from draw(answers)
    answers = [branch for branch in answers if branch.complete]
    judged = list(answers)
    for _ in range(options.rounds):
        asked = [[*tree.messages, _said(tree, branch), _asks(CRITICIZE)] for branch in answers]
        critics = [_fork_of(tree, messages) for messages in asked]
        yield from draw(critics)
        revised = [
            _fork_of(tree, [*messages, _said(tree, critic), _asks(REVISE)])
            for messages, critic in zip(asked, critics, strict=True)
            if critic.complete
        ]
        yield from draw(revised)
        for critic in critics:  # a criticism is no answer
            critic.finish_reason = "step"
        answers = [branch for branch in revised if branch.complete]
        judged += answers
    yield from judge(judged, options.score)


def _said(tree: Tree, branch: Branch) -> dict[str, str]:
    return {"role": "assistant", "content": tree.answer_of(branch)}


def _asks(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _fork_of(tree: Tree, messages: Messages) -> Branch:
    """Create a branch that answers ``messages``."""
    (branch,) = tree.fork(tree.ask(messages), 1)
    return branch


def choose(tree: Tree, options: Refine) -> Branch:
    """Return the answer with the highest score."""
    return best(tree.answers(), options.score)


METHOD = SearchMethod(
    name="refine",
    about="Let the model criticize its answer and answer again.",
    options=Refine,
    steps=steps,
    choose=choose,
    prefixes=("refine",),
    chats=True,
)
