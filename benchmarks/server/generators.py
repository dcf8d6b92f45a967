"""Generators of the requests of ``server/load.py``: this project's own, or another project's.

* ``transect``: ``transect.bench``. It times events as their bytes arrive, and its moments can be laid beside the
  engine's decision log (``server/request_stages.py``).
* ``sglang``: SGLang's (``peers/sglang_generator.py``).

Both give one shape: times in seconds, with ``p50`` and ``p99``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import _paths  # noqa: F401
from transect.bench.lengths import Lengths
from transect.bench.levels import Level, Result, WorkSource, rate_levels, run_levels
from transect.bench.target import Target, served_model

PROMPT, OUTPUT = (240, 960), (60, 240)
"""The fewest and the most tokens of a request and of its answer; any number between is as likely."""
WARM_UP = 4
"""Requests before those that count: connections, and nothing else that a server's first requests would meet."""
GENERATORS = ("transect", "sglang")
GROUPS, PREFIX, QUESTION = 4, 1500, 128
"""Prefixes that requests share, their tokens, and those of what follows."""


def word(number: int) -> str:
    """Return the text of a token; a space comes before it."""
    return f"\N{LOWER ONE EIGHTH BLOCK}w{number}"


def text(prompt: Sequence[int] | str) -> str:
    """Return a prompt of token ids as text."""
    return prompt if isinstance(prompt, str) else "".join(f" {word(number)[1:]}" for number in prompt)


def own_level(rate: float, requests: int, seed: int, highest: int, lengths: tuple[int, int] = PROMPT) -> Level:
    """Generate the work of one rate and seed, as text.

    Args:
        highest: the largest token id.
        lengths: the fewest and the most tokens of a prompt.
    """
    prompt, output = (Lengths.parse(f"uniform:{low}-{high}") for low, high in (lengths, OUTPUT))
    (found,) = rate_levels(WorkSource(prompt, output, highest_id=highest, seed=seed), requests, [rate])
    return replace(found, work=[replace(each, prompt=text(each.prompt)) for each in found.work])


async def own(url: str, level: Level) -> Result:
    """Run one level by this project's generator."""
    target = Target(url, await served_model(url))
    warm = [replace(each, output_tokens=8) for each in level.work[:WARM_UP]]
    (result,) = await run_levels(target, [level], warm_up=warm)
    return result
