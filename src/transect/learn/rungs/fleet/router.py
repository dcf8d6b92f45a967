r"""One engine is full at some number of users; then you start a second one, and somebody must decide which of them
gets a request. *Round robin* takes turns. It balances counts, not work: a prompt of 10,000 tokens counts like one
of 10. *Least load* counts the tokens that each still has to compute, and is better.

But each engine has its own prefix cache. A chat's next question repeats all of the chat. If it comes to the engine
that computed the last one, its prompt is nearly free; at any other it is computed from the start. So the router
should remember which beginnings it has sent where. (It need not ask the engines: it sees all prompts.) Sending
everything that begins alike to one engine is wrong too: if all chats share one system prompt, one engine would get
everything.

The rule that ships puts both into one number, the tokens that would be ahead of the first answer:

    load of the engine  +  prompt tokens that are not cached there

and takes the smallest. So a long prefix draws its requests to one engine until that one's queue is longer than
what the prefix saves. Ties go around in turns. What an engine is believed to hold is bounded by the size of its
cache, the oldest beginning is forgotten first, and within a prompt the end before the beginning.

The grader plays a trace of chats through four engines on a virtual clock: each computes one request after the
other, prompt tokens that its cache lacks at 10,000 a second, answer tokens at 500 a second. The score is the mean time
to the first token of another trace, of 150 requests with bursts, in the planner's simulator: four engines with the
shipping scheduler and prefix cache, an 8-billion model on four L4s.
"""

from ....engine.scheduling.policies.routing import Router, Ticket
from ...record import Case, Live, Rung, Speed
from ...texts import excerpt
from . import planned

SOLUTION = f"""from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


{excerpt("engine/scheduling/policies/routing.py", "_Engine", "Ticket", "Router")}"""


def _drive(module, engines, capacity, requests):
    """Play requests [arrival s, prompt, answer tokens] on a virtual clock: (engine of each, mean latency)."""
    import heapq
    from collections import OrderedDict

    block, router = 16, module.Router([capacity] * engines, 16)
    caches, free = [OrderedDict() for _ in range(engines)], [0.0] * engines
    ends, chosen, total = [], [], 0.0
    for number, (arrival, prompt, answer) in enumerate(requests):
        while ends and ends[0][0] <= arrival:
            _, _, ticket, count = heapq.heappop(ends)
            router.drawn(ticket, count)
            router.done(ticket)
        ticket = router.send(prompt, answer, range(engines))
        engine = ticket.engine
        if not isinstance(engine, int) or not 0 <= engine < engines:
            return [f"request {number} is sent to engine {engine}; there are 0 to {engines - 1}", 0.0]
        chosen.append(engine)
        keys = []
        for start in range(0, len(prompt) - block + 1, block):
            keys.append(hash((keys[-1] if keys else 0, *prompt[start : start + block])))
        held = 0
        while held < len(keys) and keys[held] in caches[engine]:
            held += 1
        for key in reversed(keys):
            caches[engine].pop(key, None)
            caches[engine][key] = None
        while len(caches[engine]) > capacity // block:
            caches[engine].popitem(last=False)
        free[engine] = max(free[engine], arrival) + (len(prompt) - held * block) / 1e4 + answer / 500
        heapq.heappush(ends, (free[engine], number, ticket, answer))
        total += free[engine] - arrival
    return [chosen, total / len(requests)]


def _drive_planned(module, trace):
    """Send a trace through the planner's fleet: (engine of each request, mean seconds to the first token)."""
    from transect.learn.rungs.fleet.planned import route

    return list(route(module.Router, trace))


class _Replay:
    """A router that repeats choices."""

    def __init__(self, chosen):
        self.left = list(chosen)

    def send(self, prompt, outputs, alive):
        return Ticket(self.left.pop(0), 0, 0)

    def drawn(self, ticket, tokens):
        pass

    def done(self, ticket):
        pass

    def forget(self, engine=None):
        pass


def _first_token(arguments, chosen):
    """Mean milliseconds to the first token where requests go to these engines."""
    return 1e3 * planned.route(lambda *_: _Replay(chosen), arguments[0])[1]


def _judge_planned(arguments, got):
    (trace,) = arguments
    chosen = got[0]
    if len(chosen) != len(trace) or not all(each in range(planned.ENGINES) for each in chosen):
        return f"each of the {len(trace)} requests must be sent to one of {planned.ENGINES} engines"
    return ""


def _latency(arguments, chosen):
    replay = type("module", (), {"Router": lambda *_: _Replay(chosen)})
    return _drive(replay, *arguments)[1]


def _judge(arguments, got):
    chosen = got[0]
    if isinstance(chosen, str):
        return chosen
    engines, _, requests = arguments
    if len(chosen) != len(requests):
        return f"{len(chosen)} of {len(requests)} requests were sent"
    mine, turns = _latency(arguments, chosen), _latency(arguments, [i % engines for i in range(len(requests))])
    best = _latency(arguments, _drive(type("module", (), {"Router": Router}), *arguments)[0])
    if mine > 2 * best + 0.02:
        return f"the mean latency is {mine:.2f} s; the shipped router has {best:.2f} s and taking turns {turns:.2f} s"
    return ""


def _chats(rng, users, turns, shared, own, pause):
    """Generate chats that all begin with ``shared`` tokens, and repeat themselves with each question."""
    system = [int(x) for x in rng.integers(0, 1000, shared)]
    found = []
    for _ in range(users):
        at, prompt = float(rng.uniform(0, pause * turns)), list(system)
        for _ in range(turns):
            prompt = [*prompt, *(int(x) for x in rng.integers(0, 1000, int(rng.integers(own // 2, own))))]
            found.append([at, list(prompt), int(rng.integers(20, 120))])
            at += float(rng.uniform(0.5, 1.5)) * pause
    return sorted(found)


def _uneven(rng, count):
    found = [[i * 0.06, [int(x) for x in rng.integers(0, 1000, 4000 if i % 4 == 0 else 40)], 20] for i in range(count)]
    return found


def _after_a_long_one(rng):
    found = [[0.0, [int(x) for x in rng.integers(0, 1000, 60_000)], 10]]
    return found + [[10 + 0.027 * i, [int(x) for x in rng.integers(0, 1000, 20)], 50] for i in range(200)]


def _one_beginning(rng, count):
    system = [int(x) for x in rng.integers(0, 1000, 1600)]
    return [[0.05 * i, [*system, *(int(x) for x in rng.integers(0, 1000, 100))], 60] for i in range(count)]


RUNG = Rung(
    name="router",
    title="A router: load and cached prefixes in one number",
    road="fleet",
    place=1,
    kind="python",
    minutes=75,
    after=("prefix_cache",),
    solution=SOLUTION,
    holes=("Router.send", "Router.drawn", "Router.done", "Router._hashes", "Router._cached"),
    answers={"play": lambda *arguments: None, "planned": lambda *arguments: None},
    drives={"play": _drive, "planned": _drive_planned},
    judges={"play": _judge, "planned": _judge_planned},
    cases=(
        Case("equal requests",
             lambda rng: [4, 4096, [[0.03 * i, [int(x) for x in rng.integers(0, 999, 64)], 50] for i in range(40)]],
             "Every engine must get its share: send to the one with the least to compute, and take turns where "
             "they are equal."),
        Case("every fourth is long", lambda rng: [4, 4096, _uneven(rng, 60)],
             "Count tokens, not requests, and take them off again when a request is done."),
        Case("chats", lambda rng: [4, 40_000, _chats(rng, 16, 5, 0, 800, 3.0)],
             "A chat's next question repeats the chat: send it where its beginning is cached."),
        Case("after a long one", lambda rng: [4, 70_000, _after_a_long_one(rng)],
             "A request that is done is no load any more: take its prompt and its tokens off."),
        Case("one system prompt for all", lambda rng: [4, 40_000, _one_beginning(rng, 60)],
             "Load and prefix belong into one number: a shared beginning must not draw everything to one engine."),
    ),
    speed=Speed(lambda rng: [planned.chats(int(rng.integers(1 << 30)), 150)],
                "It is right and not as quick as it could be: compare queue plus uncached tokens of each engine.",
                measure=lambda arguments, got: _first_token(arguments, got[0]),
                unit="ms to the first token on average, in the planner's simulator", ratio=1.15, entry="planned",
                calls=1),
    hints=("Hash the prompt block by block, each hash over the one before.",
           "cost of an engine = its load + len(prompt) - cached tokens there; take the smallest.",
           "drawn: the prompt is done, take it off the load; done: take off what is left."),
    live=Live("serve", {"transect.engine.scheduling.policies.routing:Router": None}, ("-dp", "2")),
    differences=
        "This is the shipped class, which runs before the engines of `transect serve -dp`; the cluster's router adds "
    "fail-over and engines that come and go.",
    shipped="engine/scheduling/policies/routing.py",
)  # fmt: skip
