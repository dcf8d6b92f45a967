r"""A model of 70 billion weights does not fit into one GPU. Give each of S *stages* some of its layers. A batch is cut
into M micro-batches, so that the stages work at the same time. The first cannot do the second's work before the
first is done, so at the beginning and the end stages stand idle: the *bubble*.

*GPipe*: all M forwards, then all M backwards. Right, and the bubble is as small as it gets without more tricks, (S
- 1) / M of the work. But every stage keeps the activations of all M micro-batches until their backwards come.

*1F1B* has the same bubble and keeps at most S. Stage s (from 0) does S - 1 - s forwards to warm up. Then it takes
turns: one forward, one backward, until the forwards are used up, and then the backwards that are left. The last
stage alternates from the first micro-batch on. So a micro-batch's backward comes as early as it can, and frees its
activations.

A backward takes about twice the time of a forward. The grader plays your order with one slot for a forward and two
for a backward: F of micro-batch m at stage s waits for F of m at stage s - 1, and B of m at stage s for B of m at
stage s + 1 (the last stage's B waits for its own F). It looks at the time until all is done, and at the most
activations that a stage holds.
"""

from ...record import Case, Live, Rung, Speed

SOLUTION = '''def schedule(stage, stages, batches):
    """The order of work of one stage: a list of ["F", m] and ["B", m] for micro-batches m = 0 .. batches - 1."""
    warm = min(stages - 1 - stage, batches)
    order = [["F", m] for m in range(warm)]
    for m in range(batches - warm):
        order += [["F", warm + m], ["B", m]]
    return order + [["B", m] for m in range(batches - warm, batches)]
'''


def _drive(module, stages, batches):
    return [[list(each) for each in module.schedule(stage, stages, batches)] for stage in range(stages)]


def play(orders, stages):
    """Return (slots until all is done, most activations of each stage); None if the stages wait for each other."""
    done, place, free, held, most = {}, [0] * stages, [0] * stages, [0] * stages, [0] * stages
    while any(place[s] < len(orders[s]) for s in range(stages)):
        moved = False
        for s in range(stages):
            if place[s] == len(orders[s]):
                continue
            kind, m = orders[s][place[s]]
            needs = ("F", m, s - 1) if kind == "F" else ("B", m, s + 1) if s < stages - 1 else ("F", m, s)
            if (kind == "F" and s == 0) or needs in done:
                begin = max(free[s], done.get(needs, 0), done.get(("F", m, s), 0) if kind == "B" else 0)
                free[s] = done[kind, m, s] = begin + (1 if kind == "F" else 2)
                held[s] += 1 if kind == "F" else -1
                most[s] = max(most[s], held[s])
                place[s] += 1
                moved = True
        if not moved:
            return None
    return max(free), most


def _live(mine, shipped):
    from ....spec.layouts.schedule import Action

    def schedule(name, stages, batches, chunks=1):
        if name != "1f1b":
            return shipped(name, stages, batches, chunks)
        return [[Action(*each) for each in mine.schedule(rank, stages, batches)] for rank in range(stages)]

    return schedule


def _judge(arguments, orders):
    stages, batches = arguments
    try:
        for s, order in enumerate(orders):
            for kind in "FB":
                got = sorted(m for k, m in order if k == kind)
                if got != list(range(batches)):
                    return f"stage {s} must do {kind} of each of the {batches} micro-batches once; it does {got}"
            for m in range(batches):
                if order.index(["B", m]) < order.index(["F", m]):
                    return f"stage {s} does B of micro-batch {m} before its F"
        played = play(orders, stages)
    except (TypeError, ValueError):
        return 'return a list of ["F", m] and ["B", m]'
    if played is None:
        return "the stages wait for each other for ever"
    for s, most in enumerate(played[1]):
        if most > (allowed := min(stages - s, batches)):
            return f"stage {s} holds the activations of {most} micro-batches; 1F1B holds {allowed}"
    return ""


RUNG = Rung(
    name="pipeline_schedule",
    title="A pipeline schedule: one forward, one backward",
    road="training",
    place=4,
    kind="python",
    minutes=45,
    after=("ring_all_reduce",),
    solution=SOLUTION,
    holes=("schedule",),
    answers={"order": lambda stages, batches: None},
    drives={"order": _drive},
    judges={"order": _judge},
    cases=(
        Case("one stage", lambda rng: [1, 3], "A stage alone takes turns: F 0, B 0, F 1, B 1, ..."),
        Case("2 stages, 4 micro-batches", lambda rng: [2, 4],
             "Stage 0 does one forward more before its first backward; the last stage takes turns from the start."),
        Case("4 stages, 8 micro-batches", lambda rng: [4, 8],
             "Stage s does S - 1 - s forwards to warm up, then one forward and one backward in turn."),
        Case("4 stages, 2 micro-batches", lambda rng: [4, 2],
             "There may be fewer micro-batches than warm-up forwards: min of the two."),
        Case("random sizes", lambda rng: [int(rng.integers(2, 7)), int(rng.integers(1, 20))],
             "What is left after the turns are the backwards of the warm-up forwards."),
    ),
    speed=Speed(lambda rng: [4, 16],
                "The stages stand idle more than need be: after the warm-up each must have a forward and a "
                "backward in turn.",
                measure=lambda arguments, orders: (play(orders, arguments[0]) or (1e9,))[0],
                unit="slots of time", ratio=1.08),
    hints=("warm = min(stages - 1 - stage, batches) forwards come first.",
           "Then pairs F warm + m, B m for m = 0 .. batches - warm - 1.",
           "At the end the last `warm` backwards."),
    differences=
        "spec/layouts/schedule.py has 1F1B, interleaved stages and zero-bubble, which cuts the backward in two; the "
    "trainer and the cost model read the same schedule.",
    live=Live("train", {"transect.spec.layouts.schedule:schedule": _live}, (),
              {"accumulate": 4, "parallel": {"pipeline": 2}}),
    shipped="spec/layouts/schedule.py",
)  # fmt: skip
