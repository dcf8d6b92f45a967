"""Plays requests through small engines on a virtual clock, with a student's rule in the place of the shipped one.

``play`` runs in the grader's child with the student's module, and in the grader with the shipped one. It returns each
decision of the rule in order, and figures of the outcome; ``judge`` compares two such plays. The engines are the
shipping ``EngineCore``, ``Scheduler``, ``Router`` and ``Scaler``.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from importlib import import_module
from itertools import pairwise
from types import FunctionType, ModuleType
from typing import Any

BASE = {"num_blocks": 200, "block_size": 8, "max_num_seqs": 6, "max_num_batched_tokens": 96, "max_model_len": 480,
        "seed": 0}  # fmt: skip
"""Settings of the engines that a rule leaves open."""
FIXED_S, TOKEN_S, KEY_S = 4e-3, 3e-3, 4e-6
"""Seconds of a step: at least, and for each token and each position that is read."""
LOOK_S, START_S, PATIENCE_S, MOST_ENGINES = 0.25, 0.5, 1.5, 6
"""Seconds between looks of the scaler, until a new engine is ready, until one fewer; most engines."""
MOST_STEPS = 4000
"""Steps after which a play is given up."""
FIGURES = {
    "first_token": "seconds to the first token, in the mean",
    "gap": "seconds between two tokens of an answer, at most, in the mean over requests",
    "answer": "seconds to the end of an answer, in the mean",
    "engine_seconds": "seconds of engines",
    "refused": "requests refused",
}


def requests(rng: Any, scene: str) -> list[list[Any]]:
    """Draw requests: [arrival in seconds, client, weight, priority, prompt, answer].

    Prompts share beginnings, and answers repeat phrases of their prompts.

    Args:
        scene: ``calm`` (one client, request after request), ``several`` (three clients at once) or ``crowd`` (a client
            with many requests and long prompts beside others).
    """
    documents = [[int(each) for each in rng.integers(10, 500, 24)] for _ in range(3)]
    phrases = [[int(each) for each in rng.integers(10, 500, int(rng.integers(4, 9)))] for _ in range(4)]
    count, gap = {"calm": (8, 0.35), "several": (24, 0.1), "crowd": (60, 0.07)}[scene]
    found, at = [], 0.0
    for number in range(count):
        at += float(rng.exponential(gap))
        client = 0 if scene == "calm" else int(rng.choice(3, p=(0.6, 0.3, 0.1)))
        phrase = phrases[int(rng.integers(4))]
        long = scene == "crowd" and client == 0 and number % 4 == 0
        own = [
            int(each) for each in rng.integers(10, 500, int(rng.integers(120, 260) if long else rng.integers(1, 30)))
        ]
        prompt = [*documents[int(rng.integers(3))], *own, *phrase, *phrase[:3]]
        answer = [*(phrase * 8)[3 : int(rng.integers(8, 32))], *(int(each) for each in rng.integers(10, 500, 3))]
        found.append([at, f"client {client}", (1.0, 1.0, 2.0)[client], int(rng.integers(-2, 3)), prompt, answer])
    return found


def play(module: ModuleType, asked: Sequence[Any], rule: Mapping[str, Any]) -> dict[str, Any]:
    """Play requests with the rule of ``module`` in the place of the shipped one.

    Args:
        rule: fields of ``policies.registry.Rule``, as a dict, and the name of the shipped rule's ``module``.

    Returns:
        ``decisions``: [function, result] of each call from outside, in order; ``figures`` of the outcome (``FIGURES``).
    """
    for name in ("simulation", "policies.scaling", "policies.routing", "policies.model_speculation"):
        import_module(f"transect.engine.scheduling.{name}")
    decisions: list[Any] = []
    with _in_place(module, import_module(rule["module"]), rule["by"], decisions):
        figures = PlayedService(rule).run(asked)
    return {"decisions": decisions, "figures": figures}


def judge(arguments: Sequence[Any], got: Any) -> str:
    """Return a sentence that says why a play is worse than that of the shipped rule; empty if it is not. ``arguments``:
    the requests and the rule, as of ``play``.

    A rule without ``bounds`` must decide the same. One with bounds may decide otherwise, as long as its figures are
    within them.
    """
    from .grade.compare import difference

    asked, rule = arguments
    best = play(import_module(rule["module"]), asked, rule)
    wanted, made = best["decisions"], got["decisions"]
    for number, (want, have) in enumerate(zip(wanted, made, strict=False), 1):
        if problem := difference(have, list(want), 1e-6, "the decision"):
            where = f"decision {number} of {len(wanted)}, `{want[0]}`{_meaning(rule['module'], want[0])}"
            break
    else:
        if len(wanted) == len(made):
            return ""
        where, problem = "the number of decisions", f"there are {len(made)} instead of {len(wanted)}"
    problem = problem.replace("entry 1 of the decision", "the result")
    if not rule["bounds"]:
        return f"{where}: {problem}"
    for name, most in rule["bounds"].items():
        mine, theirs = got["figures"][name], best["figures"][name]
        if not mine <= most * theirs + 1e-9:
            return (
                f"{FIGURES[name]}: {mine:.4g}, with the shipped rule {theirs:.4g}; at most {most:g} times as many "
                f"count as equally good. First difference: {where}: {problem}"
            )
    return ""


def _meaning(module: str, path: str) -> str:
    """Return the first sentence of a function's docstring, in brackets."""
    place: Any = import_module(module)
    for part in path.split("."):
        place = getattr(place, part, None)
    text = " ".join((inspect.getdoc(place) or "").split()).partition(". ")[0].rstrip(".")
    return f" ({text})" if text and place is not None else ""


class PlayedService:
    """Some engines behind a router, with a scaler if the rule has one.

    Args:
        rule: see ``play``.
    """

    def __init__(self, rule: Mapping[str, Any]) -> None:
        from ..engine.scheduling.policies import routing, scaling
        from ..engine.scheduling.scheduler_config import SchedulerConfig

        self.config = SchedulerConfig(**{**BASE, **rule["settings"]})
        self.acceptance = rule["acceptance"]
        cached = self.config.num_blocks * self.config.block_size
        self.router = routing.Router([cached] * MOST_ENGINES, self.config.block_size)
        self.scaler = None
        if rule["scaler"]:
            name, arguments = rule["scaler"]
            self.scaler = scaling.Scaler(scaling.POLICIES[name](**arguments), 1, MOST_ENGINES, PATIENCE_S)
        self.engines = [self._engine(0.0) for _ in range(rule["engines"])]
        self.ready = [0.0] * len(self.engines)
        self.tickets: dict[str, Any] = {}
        self.lines: dict[str, Any] = {}
        self.told: dict[str, int] = {}
        self.steps, self.next_look, self.arrived, self.held = 0, LOOK_S, 0, 0.0

    def _engine(self, now: float) -> Any:
        from ..engine.scheduling.simulation import SimulatedEngine

        drafter = None if self.acceptance is None else lambda load: 1e-3 + 1e-5 * load.tokens
        return SimulatedEngine(self.config, _seconds, now=now, acceptance=self.acceptance, drafter=drafter)

    def run(self, asked: Sequence[Any]) -> dict[str, float]:
        """Send requests at their times, and run to the last answer. Returns the figures of the outcome."""
        refused, began = 0, {}
        for number, (at, *one) in enumerate(asked):
            self._look(at, number)
            self._run(at)
            began[str(number)] = at
            refused += not self._send(str(number), at, *one)
        if self.scaler is not None:
            while self.tickets:
                self._look(self.next_look, len(asked))
            self._look(self.next_look + PATIENCE_S, len(asked))
        self._run(math.inf)
        moments = [(began[name], line.moments) for name, line in self.lines.items()]
        return {
            "first_token": _mean([known[0] - at for at, known in moments]),
            "answer": _mean([known[-1] - at for at, known in moments]),
            "gap": _mean([max(b - a for a, b in pairwise(known)) for _, known in moments if len(known) > 1]),
            "engine_seconds": self.held,
            "refused": float(refused),
        }

    def _look(self, until: float, arrived: int) -> None:
        """Let the scaler look at the service as often as it does until a moment."""
        while self.scaler is not None and self.next_look <= until:
            self._run(self.next_look)
            self.held += LOOK_S * len(self.engines)
            self._scale(self.next_look, (arrived - self.arrived) / LOOK_S)
            self.next_look, self.arrived = self.next_look + LOOK_S, arrived

    def _send(self, name: str, now: float, client: str, weight: float, priority: int, prompt: Any, answer: Any) -> bool:
        """Send a request to the engine that the router chooses; False if that refuses it."""
        from ..engine.scheduling.policies.admission import QueueFull
        from ..engine.scheduling.policies.orders.registry import order_policy
        from ..engine.scheduling.request import Request
        from ..engine.scheduling.sampling_params import SamplingParams

        ready = [place for place, at in enumerate(self.ready) if at <= now]
        ticket = self.router.send(prompt, len(answer), ready)
        engine = self.engines[ticket.engine]
        urgent = priority if order_policy(self.config.scheduling_policy).priorities else 0
        params = SamplingParams(max_tokens=len(answer), ignore_eos=True)
        try:
            engine.add(Request(name, tuple(prompt), params, urgent, now, client=client, weight=weight), [iter(answer)])
        except QueueFull:
            self.router.refused(ticket)
            return False
        self.tickets[name], self.lines[name], self.told[name] = ticket, engine.lines[name, 0], 0
        return True

    def _run(self, until: float) -> None:
        """Run all engines to a moment, and tell the router of tokens and ends."""
        for engine in self.engines:
            while engine.core.has_work and engine.clock.time < until:
                engine.step()
                self.steps += 1
                if self.steps > MOST_STEPS:
                    raise RuntimeError(f"{len(self.tickets)} requests wait after {MOST_STEPS} steps: none may starve")
            if until < math.inf:
                engine.clock.advance(max(0.0, until - engine.clock.time))
        for name, ticket in list(self.tickets.items()):
            line = self.lines[name]
            if new := len(line.moments) - self.told[name]:
                self.router.drawn(ticket, new)
                self.told[name] += new
            if line.reason:
                self.router.done(self.tickets.pop(name))

    def _scale(self, now: float, rate: float) -> None:
        """Ask the scaler, and start engines or forget idle ones."""
        from ..engine.scheduling.policies.scaling import Seen

        schedulers = [engine.scheduler for engine, at in zip(self.engines, self.ready, strict=True) if at <= now]
        waiting, running = (sum(len(getattr(each, name)) for each in schedulers) for name in ("waiting", "running"))
        used = 1 - sum(each.cache.num_free for each in schedulers) / (self.config.num_blocks * len(schedulers))
        queued = sum(self.router.load(place) for place in range(len(self.engines)))
        starting = len(self.engines) - len(schedulers)
        assert self.scaler is not None
        seen = Seen(now, len(schedulers), starting, waiting, running, used, rate, queued, 1 / TOKEN_S)
        wanted = self.scaler.engines(seen)
        for _ in range(min(MOST_ENGINES, wanted) - len(self.engines)):
            self.engines.append(self._engine(now + START_S))
            self.ready.append(now + START_S)
        while wanted < len(self.engines) > 1 and not self.engines[-1].core.has_work:
            self.engines.pop()
            self.ready.pop()


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(1, len(values))


def _seconds(batch: Any) -> float:
    keys = sum(row.start + row.num_tokens for row in batch.rows)
    return FIXED_S + TOKEN_S * sum(row.num_tokens for row in batch.rows) + KEY_S * keys


@contextmanager
def _in_place(module: ModuleType, shipped: ModuleType, by: Sequence[str], decisions: list[Any]) -> Iterator[None]:
    """Replace the classes and functions of ``shipped`` by those of ``module`` everywhere in this package while entered,
    and record the results of the functions ``by``."""
    undo: list[tuple[Any, Any, Any]] = []
    depth = [0]
    instead: dict[int, Any] = {}
    for name, theirs in vars(shipped).items():
        mine = vars(module).get(name, theirs)
        if isinstance(theirs, type | FunctionType) and theirs.__module__ == shipped.__name__ and mine is not theirs:
            instead[id(theirs)] = mine
    for path in by:
        owner, _, name = path.rpartition(".")
        if owner:
            place = vars(module)[owner]
            inner = vars(place)[name]
            undo.append((place, name, inner))
            setattr(place, name, _recorded(path, inner, depth, decisions))
        elif hasattr(shipped, path):
            inner = vars(module)[path]
            instead[id(vars(shipped)[path])] = instead[id(inner)] = _recorded(path, inner, depth, decisions)
        else:  # a field of the file's record
            record = vars(shipped)["POLICY"]
            inner = vars(module).get(path) or getattr(record, path)
            instead[id(record)] = replace(record, **{path: _recorded(path, inner, depth, decisions)})
    spaces = [vars(each) for name, each in list(sys.modules.items()) if name.startswith("transect.")]
    for space in [*spaces, vars(module)]:
        tables = [value for value in space.values() if isinstance(value, dict) and value is not space]
        for table in (space, *tables):
            for name, value in list(table.items()):
                if id(value) in instead:
                    undo.append((table, name, value))
                    table[name] = instead[id(value)]
    try:
        yield
    finally:
        for place, name, before in reversed(undo):
            if isinstance(place, dict):
                place[name] = before
            else:
                setattr(place, name, before)


def _recorded(path: str, inner: Any, depth: list[int], decisions: list[Any]) -> Any:
    """Wrap a function: results of calls that come from outside of the rule are recorded."""
    if isinstance(inner, property):
        return property(_recorded(path, inner.fget, depth, decisions))

    @functools.wraps(inner)
    def called(*arguments: Any, **named: Any) -> Any:
        depth[0] += 1
        try:
            result = inner(*arguments, **named)
        except RuntimeError as error:  # a refusal
            if depth[0] == 1:
                decisions.append([path, [type(error).__name__, str(error)]])
            raise
        finally:
            depth[0] -= 1
        if depth[0] == 0:
            decisions.append([path, plain(result)])
        return result

    return called


def plain(value: Any) -> Any:
    """Write a decision with plain values: fields of records as lists, sequences by their numbers."""
    if isinstance(value, bool | str | bytes | None):
        return value
    if isinstance(value, int | float):
        return float(value)
    if isinstance(value, Mapping):
        return sorted(([plain(key), plain(each)] for key, each in value.items()), key=repr)
    if isinstance(value, set | frozenset):
        return sorted(map(plain, value), key=repr)
    if isinstance(value, tuple | list):
        return [plain(each) for each in value]
    if hasattr(value, "seq_id"):
        return f"sequence {value.seq_id}"
    if is_dataclass(value):
        return [plain(getattr(value, each.name)) for each in fields(value)]
    return type(value).__name__
