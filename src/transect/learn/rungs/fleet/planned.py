"""Plays a chat trace through the planner's simulator, which runs the shipping scheduler and prefix cache, with a policy
of the fleet in the place of the shipped one.

Grading sends traces as plain lists: [arrival s, prompt tokens, output tokens, [[key, tokens], ...], answer key].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ....bench.traces.asked import Asked
    from ....plan.choices import CardChoice
    from ....plan.fleet import EngineModel

ENGINES = 4
"""Number of engines behind the router."""
PLACES = 2
"""Answers at a time of an engine under the autoscaler, so that few requests fill it."""
CAPACITY = 0.13
"""Requests per second that such an engine serves."""
FULL = 10.0
"""Requests per second of a full replica, as the rung counts them."""
FIRST, MOST = 3, 60
"""Replicas at the start and at the most."""
LOOK_S, START_S = 10.0, 60.0
PATIENT_S = 5.0
"""Seconds to the first token from which on a request is late."""


def _card() -> CardChoice:
    from ....costs.presets import preset
    from ....plan.choices import CardChoice
    from ....spec.layouts.ranks import RankLayout
    from ....spec.shapes import PRESETS

    return CardChoice(PRESETS["llama-3.1-8b"], preset("l4"), RankLayout(), "bf16", "auto", 8192)


def engine(places: int = 64) -> EngineModel:
    """Model an engine for Llama 3.1 8B in bfloat16 on an L4, with ``places`` answers at a time."""
    made = _card().engine
    return replace(made, scheduler=replace(made.scheduler, max_num_seqs=places))


def capacity_for(asked: Sequence[Asked]) -> float:
    """Estimate the requests per second of this kind that one engine serves, as the planner does."""
    from ....plan.capacity import Shape, estimate
    from ....plan.target import LatencyTarget

    card = _card()
    return estimate(card.steps, card.kv_tokens, Shape.of(list(asked)), LatencyTarget.parse("itl.p99=150ms"))[0]


def chats(seed: int, number: int) -> list[Any]:
    """Draw ``number`` requests of conversations over three system prompts, with bursts."""
    from ....bench.lengths import Lengths
    from ....bench.traces.mix import Mix

    mix = Mix(
        prompt=Lengths.parse("uniform:100-900"), output=Lengths.parse("uniform:50-250"), burstiness=2.0, turns=5.0,
        think=15.0, system=600, systems=3, longest=8000,
    )  # fmt: skip
    return rows(mix.generate(3.0, number, seed=seed))


def morning(seed: int, minutes: int = 5, peak: float = 1.2) -> list[Any]:
    """Draw requests of a day in small: a wave from an eighth of ``peak`` requests per second and back."""
    from ....bench.lengths import Lengths
    from ....bench.traces.asked import warped
    from ....bench.traces.mix import Mix

    mix = Mix(prompt=Lengths.parse("uniform:50-150"), output=Lengths.parse("uniform:200-300"), burstiness=0.05)
    spans = minutes * 3
    rates = [peak * (0.56 - 0.44 * math.cos(2 * math.pi * i / spans)) for i in range(spans)]
    count = int(sum(rates) * 20 * 1.3) + 20
    return rows(warped(islice(mix.generate(1.0, count, seed=seed), count), rates, 20.0))


def rows(asked: Iterable[Asked]) -> list[Any]:
    """Write requests as plain lists."""
    return [
        [each.at, each.prompt_tokens, each.output_tokens, [list(piece) for piece in each.pieces], each.answer]
        for each in asked
    ]


def requests(trace: Sequence[Any]) -> list[Asked]:
    """Read requests from plain lists."""
    from ....bench.traces.asked import Asked, Piece

    return [Asked(at, prompt, out, tuple(Piece(*p) for p in pieces), key) for at, prompt, out, pieces, key in trace]


def route(router: Callable[[list[int], int], Any], trace: Sequence[Any]) -> tuple[list[int], float]:
    """Send a trace through a router. Returns (the engine of each request, mean seconds to the first token)."""
    from ....plan.fleet import Fleet

    chosen: list[int] = []

    def noting(capacities: list[int], block: int) -> Any:
        made = router(capacities, block)
        send = made.send

        def noted(*arguments: Any) -> Any:
            ticket = send(*arguments)
            chosen.append(ticket.engine)
            return ticket

        made.send = noted
        return made

    run = Fleet(engine(), ENGINES, router=noting).run(requests(trace))
    return chosen, sum(each.ttft for each in run.records) / len(run.records)


class Decides:
    """A scaling policy that asks ``decide(load, replicas, starting)``."""

    def __init__(self, decide: Callable[[list[float], int, int], int], capacity: float = CAPACITY) -> None:
        self.decide, self.scale = decide, FULL / capacity
        self.load: list[float] = []
        self.choices: list[int] = []

    def wanted(self, seen: Any) -> float:
        """Return the number of engines for the load so far."""
        self.load.append(seen.rate * self.scale)
        self.choices.append(self.decide(list(self.load), seen.ready, seen.starting))
        return self.choices[-1]


def scale(
    decide: Any, asked: Sequence[Asked], model: EngineModel, capacity: float
) -> tuple[list[int], float, float, int]:
    """Play a load under an autoscaler: a function like ``decide`` of the rung, or a scaling policy of the package.
    Returns (choices of ``decide``, share of late requests, replica-hours, most replicas)."""
    from ....engine.scheduling.policies.scaling import Scaler
    from ....plan.fleet import Fleet

    own = hasattr(decide, "wanted")
    policy: Any = decide if own else Decides(decide, capacity)
    scaler = Scaler(policy, 1, MOST, patience=60.0 if own else 0.0)
    run = Fleet(model, FIRST, scaler=scaler, interval=LOOK_S, start_s=START_S).run(asked)
    late = sum(each.ttft > PATIENT_S for each in run.records) / len(run.records)
    return [] if own else policy.choices, late, run.engine_seconds / 3600, max(size for _, size in run.sizes)


def cost(decide: Callable[[list[float], int, int], int], trace: Sequence[Any]) -> tuple[list[int], float]:
    """Play a trace of ``morning``. Returns (choices, replica-hours, ten times as many where every request is late)."""
    choices, late, hours, _ = scale(decide, requests(trace), engine(PLACES), CAPACITY)
    return choices, hours * (1 + 10 * late)
