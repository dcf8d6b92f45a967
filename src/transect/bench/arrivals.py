"""Arrival times of requests, in seconds from the start. All are drawn before the first request is sent."""

from __future__ import annotations

import math
import random


def random_arrivals(count: int, rate: float, *, burstiness: float = 1.0, seed: int | str = 0) -> list[float]:
    """Draw ``count`` arrivals at ``rate`` per second on average.

    Args:
        rate: requests per second; infinite lets all of them arrive at once.
        burstiness: squared coefficient of variation of the gaps, which are gamma distributed: 1 is a Poisson process,
            0 an even beat, more than 1 comes in bursts.
        seed: same seed, same arrivals.

    Raises:
        ValueError: ``rate`` is not above 0, or ``burstiness`` is negative.
    """
    if not rate > 0:
        raise ValueError(f"the request rate must be above 0, got {rate:g}: use inf for all at once")
    if not 0 <= burstiness < math.inf:
        raise ValueError(f"burstiness must be 0 (even), 1 (Poisson) or another number from 0 on, got {burstiness:g}")
    rng = random.Random(f"arrivals {seed}")
    at, arrivals = 0.0, []
    for _ in range(count):
        arrivals.append(at)
        if rate != math.inf:
            at += rng.gammavariate(1 / burstiness, burstiness / rate) if burstiness else 1 / rate
    return arrivals
