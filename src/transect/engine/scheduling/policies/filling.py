"""Decides whether prompts may be spread over steps that decode: chunked prefill with a small budget.

A step reads all weights, however few tokens it has. With the few tokens of the sequences that decode, a large model
spends most of the step on that, and prompt tokens beside them cost less than in a step of their own. But a prompt whose
turn comes later also ends later. So this pays as long as no prompt ends later than the longest sequence does anyway:

    turn(n) + outputs(n) <= longest

for every prompt n that is left. ``turn(n)`` is the number of steps until it is computed (all prompts up to it, at the
tokens of a step less those that decode); ``outputs(n)`` is one step for each of its tokens to draw; ``longest`` is the
number of steps that the longest sequence still takes. (Sarathi-Serve, Agrawal et al. 2024, bounds the tokens of a step
for the sake of those that decode; here it is for the sake of all.) Where stop tokens end sequences sooner than
``max_tokens``, this is an estimate.
"""

from __future__ import annotations

from collections.abc import Sequence as Listed

from ..request import Sequence

ROOM = 0.92
"""Share of the tokens of all coming steps that may be planned: sequences do not end as evenly as assumed."""

RULES = {"filling": {"by": ("nothing_ends_later",), "settings": {"fill_tokens": 12}}}


def nothing_ends_later(tokens: int, running: Listed[Sequence], waiting: Listed[Sequence]) -> bool:
    """Return True if steps of ``tokens`` tokens finish all work by the end of the longest sequence.

    Args:
        tokens: tokens of a step, including decodes.
        running: sequences that hold KV blocks, in the order of their turns.
        waiting: sequences whose turns follow, in their order.
    """
    prompts, outputs, longest = [], 0, 0
    for group in (running, waiting):
        for seq in group:
            draws = seq.max_length - seq.length
            state = seq.request
            outputs += draws if state.prompt_done else draws * state.spec.params.n
            longest = max(longest, draws)
            if seq.length - seq.scheduled > 1:
                prompts.append((seq.length - seq.scheduled, draws))
    if not prompts or outputs + sum(count for count, _ in prompts) > ROOM * tokens * longest:
        return False
    each_step = tokens - outputs / longest
    computed = 0
    for count, draws in prompts:
        computed += count
        if computed / each_step + draws > longest:
            return False
    return True
