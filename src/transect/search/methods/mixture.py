"""Mixture of agents: several proposals, from several adapters, that the model combines into one answer (Wang et al.
2024, arXiv:2406.04692).

The proposals of all adapters are drawn in one batch of the engine. Without ``adapters`` the proposals are n draws of
the request's own model.
"""

from dataclasses import dataclass

from ..tree import Branch, Steps, Tree
from .registry import Options, SearchMethod
from .steps import draw

COMBINE = (
    "Here are proposed answers to the question above. Some may be wrong. Weigh them, and write one final answer that "
    "is correct and complete. Do not mention the proposals.\n\n"
)


@dataclass(frozen=True, kw_only=True)
class Mixture(Options):
    """Settings of the mixture.

    Attributes:
        n: Proposals of each adapter.
        adapters: Adapters that propose answers; none: the request's own model.
    """

    n: int = 3
    adapters: tuple[str, ...] = ()


def steps(tree: Tree, options: Mixture) -> Steps:
    """Draw the proposals, then the combined answer."""
    assert tree.messages is not None
    names = options.adapters or (tree.adapter,)
    proposals = [branch for name in names for branch in tree.fork(tree.root, options.n, adapter=name)]
    yield from draw(proposals)
    texts = [tree.answer_of(branch) for branch in proposals if branch.complete]
    listed = "\n\n".join(f"Proposal {number}: {text}" for number, text in enumerate(texts, 1))
    (combined,) = tree.fork(tree.ask([*tree.messages, {"role": "user", "content": COMBINE + listed}]), 1)
    yield from draw([combined])


def choose(tree: Tree, options: Mixture) -> Branch:
    """Return the combined answer; the first proposal if there is none."""
    answers = tree.answers()
    return next((branch for branch in answers if branch.root.messages is not None), answers[0])


METHOD = SearchMethod(
    name="mixture",
    about="Draw proposals, from several adapters if given, and combine them into one answer.",
    options=Mixture,
    steps=steps,
    choose=choose,
    prefixes=("moa",),
    chats=True,
)
