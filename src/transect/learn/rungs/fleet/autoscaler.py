r"""Nights are quiet and mornings are not. A fleet that is large enough for the morning costs three times too much at
night. An *autoscaler* looks at the load every ten seconds and says how many replicas there should be.

Two things make it hard. A replica needs time to start (here 60 s: a machine, 16 GB of weights, compiled kernels),
so by the time that the load is there, it is too late. And load is noisy: a policy that follows every wave starts
and stops replicas all the time, and pays for starts.

What works, and what Kubernetes and clouds do in some form:

* *Target tracking*: wanted = ceil(load / (capacity * target)) with a target below 1, 0.7 say. The headroom pays
  for the time that a start takes.
* *Look ahead*: if the load grows, extend its slope over the start time.
* *Up at once, down slowly*: follow the largest number wanted in the last minutes. A replica too many costs a
  little, a replica too few costs users.

`decide(load, replicas, starting)` is called every ten seconds with the history of the load (requests a second, the
newest last), the replicas that serve and those that are starting. It returns the number that there should be,
starting ones included. Each replica serves 10 requests a second; what is more than that is late. At most 2% of the
requests may be late. Among policies that manage that, the one with the fewest replica-hours wins: the score is taken in
the planner's simulator, which runs the shipping scheduler of each replica on a virtual clock. There a request is late
whose first token takes more than 5 s, and replica-hours count up to eleven times as requests are late.
"""

import math

from ...record import Case, Live, Rung, Speed
from . import planned

SOLUTION = '''import math

CAPACITY = 10.0
TARGET = 0.95
AHEAD = 7
PATIENCE = 12


def wanted(load):
    """Replicas for the newest load, with its slope extended over the time that a start takes."""
    slope = max(0.0, (load[-1] - load[-4]) / 3) if len(load) >= 4 else 0.0
    return max(1, math.ceil((load[-1] + AHEAD * slope) / (CAPACITY * TARGET)))


def decide(load, replicas, starting):
    """The number of replicas that there should be; load: requests a second every 10 s, the newest last."""
    recent = range(max(1, len(load) - PATIENCE), len(load) + 1)
    return max(wanted(load[:end]) for end in recent)
'''

STEP_S, START_STEPS, CAPACITY, MOST = 10.0, 6, 10.0, 60


def play(loads, choices):
    """Return (share of late requests, replica-hours) of a sequence of decisions; replicas start in 60 s and stop at
    once."""
    serving, starting, late, total, held = max(1, math.ceil(loads[0] / 7)), [], 0.0, 0.0, 0
    for load, wanted in zip(loads, choices, strict=True):
        starting = [left - 1 for left in starting]
        serving += sum(left == 0 for left in starting)
        starting = [left for left in starting if left > 0]
        late += max(0.0, load - CAPACITY * serving)
        total += load
        held += serving + len(starting)
        more = wanted - serving - len(starting)
        if more >= 0:
            starting += [START_STEPS] * more
        else:
            while more < 0 and starting:
                starting.pop()
                more += 1
            serving = max(1, serving + more)
    return late / total, held * STEP_S / 3600


def _drive(module, loads):
    import math

    serving, starting, choices = max(1, math.ceil(loads[0] / 7)), [], []
    for step in range(len(loads)):
        starting = [left - 1 for left in starting]
        serving += sum(left == 0 for left in starting)
        starting = [left for left in starting if left > 0]
        wanted = module.decide(list(loads[: step + 1]), serving, len(starting))
        if type(wanted) is not int or not 1 <= wanted <= 60:
            return [f"decide returned {wanted!r}: a whole number from 1 to 60 is needed"]
        choices.append(wanted)
        more = wanted - serving - len(starting)
        if more >= 0:
            starting += [6] * more
        else:
            while more < 0 and starting:
                starting.pop()
                more += 1
            serving = max(1, serving + more)
    return choices


def _drive_planned(module, trace):
    from transect.learn.rungs.fleet.planned import cost

    return cost(module.decide, trace)[0]


def _replayed(trace, choices):
    """Return the cost of a trace with these choices."""
    left = iter(choices)
    return planned.cost(lambda *_: next(left), trace)[1]


def _judge_planned(arguments, choices):
    right = choices and all(type(each) is int and 1 <= each <= 60 for each in choices)
    return "" if right else "decide must return whole numbers from 1 to 60"


def _policy(mine, shipped):
    return mine.decide


def _judge(arguments, choices):
    (loads,) = arguments
    if choices and isinstance(choices[0], str):
        return choices[0]
    late, _ = play(loads, choices)
    return "" if late <= 0.02 else f"{late:.1%} of the requests are late; at most 2% may be"


def _day(rng, steps, low, high, noise, burst=0.0):
    """Draw a day in small: a wave, noise, and perhaps a burst that grows over two minutes."""
    start, phase = int(rng.integers(steps // 3, steps // 2)), float(rng.uniform(0, 2 * math.pi))
    loads = []
    for i in range(steps):
        wave = low + (high - low) * (1 - math.cos(2 * math.pi * i / steps + phase)) / 2
        ramp = burst * min(1.0, max(0.0, (i - start) / 12)) * (1.0 if i < start + 40 else 0.0)
        loads.append(max(0.5, wave + ramp + float(rng.normal(0, noise))))
    return [loads]


RUNG = Rung(
    name="autoscaler",
    title="An autoscaler: up at once, down slowly",
    road="fleet",
    place=2,
    kind="python",
    minutes=60,
    after=("router",),
    solution=SOLUTION,
    holes=("wanted", "decide"),
    answers={"play": lambda loads: None, "planned": lambda trace: None},
    drives={"play": _drive, "planned": _drive_planned},
    judges={"play": _judge, "planned": _judge_planned},
    cases=(
        Case("a steady load", lambda rng: [[float(rng.uniform(55, 95))] * 100],
             "Enough replicas for the load: load / 10, rounded up."),
        Case("a slow wave", lambda rng: _day(rng, 800, 20, 200, 0.0),
             "A start takes a minute: leave headroom, or extend the slope of the load over that time."),
        Case("a noisy wave", lambda rng: _day(rng, 800, 20, 200, 6.0),
             "Do not follow every dip: a replica that you stop now takes a minute to come back."),
        Case("a burst", lambda rng: _day(rng, 800, 60, 180, 3.0, 80.0),
             "A ramp of two minutes needs the slope: start before the load is there."),
    ),
    speed=Speed(lambda rng: [planned.morning(int(rng.integers(1 << 30)))],
                "Nobody is late, and it costs more replicas than need be: let the number fall again when the "
                "load does.",
                measure=lambda arguments, choices: _replayed(arguments[0], choices),
                unit="replica-hours in the planner's simulator, more where users wait", ratio=1.3, entry="planned",
                calls=1),
    live=Live("fleet", {"policy": _policy}),
    hints=("wanted = ceil(load / (10 * 0.75)) is target tracking.",
           "Add 6 or 7 times the slope of the last few loads, if they grow.",
           "Return the largest number wanted within the last two or three minutes."),
    differences=
        "The cluster's scaling policies look at waiting tokens and KV blocks too, and plan/ scores them on a recorded "
    "trace with the engine's own scheduler.",
    shipped="engine/scheduling/policies/scaling.py",
)  # fmt: skip
