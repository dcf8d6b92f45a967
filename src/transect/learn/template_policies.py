"""Policies that ``learn new`` makes a rung from: all that have a record or an interface, without a list of their own.

* rules of the scheduler, the router and the scaler (``engine/scheduling/policies/registry.py``)
* scaling policies (``scaling.POLICIES``), by the protocol ``scaling.Policy``
* drafters (``drafters.registry.METHODS``), by the protocol ``Drafter``
* scheduling policies (files of ``orders/``), by the functions of their record

The hole of each is the functions of the interface, the reference is the shipped code, and inputs are requests that are
played through small engines (``stage``).
"""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache
from importlib import import_module
from pprint import pformat
from typing import Any

from ..engine.scheduling.drafters.drafter import Drafter
from ..engine.scheduling.drafters.registry import METHODS
from ..engine.scheduling.policies import orders, scaling
from ..engine.scheduling.policies.orders.registry import OrderPolicy, order_policy, scheduling_policies
from ..engine.scheduling.policies.registry import Rule, rules
from .closure import WholeProgram, needs, program_of
from .texts import PACKAGE

OPTIONS = {"scheduling_policy": "--scheduling-policy", "max_num_seqs": "--max-num-seqs",
           "max_num_batched_tokens": "--max-num-batched-tokens", "speculation": "--speculative-config"}  # fmt: skip
"""Options of ``serve`` by fields of ``SchedulerConfig``; other fields have values there by default."""
OFFLINE = ("fill_tokens",)
"""Fields that a server leaves out."""


@dataclass(frozen=True, slots=True)
class Replaceable:
    """A policy that a student can write.

    Attributes:
        module: the shipped one. names: classes and functions of it that the program holds.
    """

    module: str
    names: tuple[str, ...]
    rule: Rule


@cache
def policies() -> Mapping[str, Replaceable]:
    """Find all policies by name."""
    found = {}
    for name, (module, rule) in rules().items():
        names = tuple(dict.fromkeys(each.partition(".")[0] for each in rule.by))
        found[name] = Replaceable(module, names, rule)
    for name, made in scaling.POLICIES.items():
        found[name] = _by_protocol(made, scaling.Policy, Rule(by=(), scaler=(name, {})))
    for name, drafter in METHODS.items():
        settings = {"speculation": {"method": name, "adaptive": False, "num_speculative_tokens": 4}}
        found[name] = _by_protocol(drafter, Drafter, Rule(by=(), settings=settings))
    for name in scheduling_policies():
        by = tuple(each.name for each in fields(OrderPolicy) if callable(getattr(order_policy(name), each.name)))
        rule = Rule(by=by, settings={"scheduling_policy": name})
        found[name] = Replaceable(f"{orders.__name__}.{name}", by, rule)
    return found


def _by_protocol(made: Any, protocol: type, rule: Rule) -> Replaceable:
    """Make the entry of a class whose functions a protocol names."""
    named = [name for name, each in vars(protocol).items() if inspect.isfunction(each) and name in vars(made)]
    by = tuple(f"{made.__name__}.{name}" for name in named if not name.startswith("_"))
    return Replaceable(made.__module__, (made.__name__,), Rule(**{**asdict(rule), "by": by}))


def rung_of_policy(name: str) -> str:
    """Write the text of a rung's file from a policy."""
    policy = policies()[name]
    rule = {"module": policy.module, **asdict(policy.rule)}
    file = policy.module.removeprefix("transect.").replace(".", "/") + ".py"
    module = import_module(policy.module)
    page = (inspect.getdoc(module) or "").replace("\\", "\\\\").replace('"""', "'''")
    in_record = [each for each in policy.rule.by if "." not in each and not hasattr(module, each)]
    if in_record:
        made = _from_record(file, in_record)
        page += "\n\n" + (inspect.getdoc(OrderPolicy) or "")
        program, used = f"PROGRAM = WholeProgram({made.text!r}, {made.allows!r})", "WholeProgram"
    else:
        made = program_of(file, *policy.names)
        program = f"PROGRAM = program_of({file!r}, {', '.join(map(repr, policy.names))})"
        used = "program_of"
    live, apart = _live(policy, module, made.text, in_record)
    road = "fleet" if rule["scaler"] or rule["engines"] > 1 else "serving"
    return f'''"""{page}
"""

{"from dataclasses import replace" + chr(10) * 2 if in_record else ""}from transect.learn.closure import {used}
from transect.learn.record import Case, Live, Rung, Speed
from transect.learn.stage import judge, requests

RULE = {pformat(rule, width=116, sort_dicts=False)}
"""The shipped module, the holes, settings of small engines that ask the policy often, and bounds: see ``Rule``."""
{program}


def _drive(module, asked, rule):
    from transect.learn.stage import play

    return play(module, asked, rule)


def _asked(scene):
    return lambda rng: [requests(rng, scene), RULE]


RUNG = Rung(
    name={f"my_{name}"!r},
    title={name.replace("_", " ")!r},
    road={road!r},
    place=100,
    kind="python",
    solution=PROGRAM.text,
    holes=RULE["by"],
    answers={{"play": lambda asked, rule: None}},
    drives={{"play": _drive}},
    judges={{"play": judge}},
    cases=(
        Case("one client, request after request", _asked("calm"),
             "It decides otherwise with one client already, whose requests come one after another."),
        Case("three clients at once", _asked("several"),
             "It is right for one client, and decides otherwise where three clients send requests at once."),
        Case("a client with many requests and long prompts", _asked("crowd"),
             "It is right for short requests, and decides otherwise where a client sends many and long ones."),
    ),
    speed=Speed(_asked("several"), "It decides right, and runs twice as many lines as the shipped policy: compute once "
                "what does not change, and look at no more than is needed.", calls=1),
    hints=("Read the page once more: it has the rule.",
           "The docstring of each function says what its result means; the shipped engines call it."),
    live={live},
    apart={apart!r},
    shipped={file!r},
    allows=PROGRAM.allows,
    tolerance=1e-6,
)
'''


def _live(policy: Replaceable, module: Any, text: str, in_record: list[str]) -> tuple[str, str]:
    """Write the place of a policy inside the product, the server or the planner's fleet, or the reason that it has none
    there."""
    if policy.rule.scaler:
        if policy.names == ("Scaler",):
            return "None", "it calms the policy of any autoscaler; the rung `autoscaler` plays such a policy"
        return f'Live("fleet", {{"policy": lambda mine, shipped: mine.{policy.names[0]}()}})', ""
    options = ["-dp", "2"] if policy.rule.engines > 1 else []
    for field, value in policy.rule.settings.items():
        if field in OFFLINE:
            return "None", f"a server sizes its steps by time, and has no {field}"
        if isinstance(value, Mapping) and "model" in value:
            return "None", "it needs a model that drafts beside the served one"
        if field in OPTIONS:
            options += [OPTIONS[field], json.dumps(value) if isinstance(value, Mapping) else str(value)]
    if in_record:
        changed = ", ".join(f"{name}=mine.{name}" for name in in_record)
        pieces = f'{{"{policy.module}:POLICY": lambda mine, shipped: replace(shipped, {changed})}}'
    else:
        defined = [each.name for each in ast.parse(text).body if isinstance(each, ast.FunctionDef | ast.ClassDef)]
        pieces = repr({f"{policy.module}:{each}": None for each in defined if hasattr(module, each)})
    return f'Live("serve", {pieces}, {tuple(options)!r})', ""


def _from_record(file: str, names: list[str]) -> WholeProgram:
    """Write functions that are lambdas in a file's ``POLICY``, with the constants and imports that they use.

    Raises:
        ValueError: a field is not a lambda.
    """
    tree = ast.parse((PACKAGE / file).read_text())
    calls = (
        each.value for each in tree.body if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == "POLICY"
    )
    given = {each.arg: each.value for call in calls if isinstance(call, ast.Call) for each in call.keywords}
    texts, used = [], []
    for name in names:
        function = given.get(name)
        if not isinstance(function, ast.Lambda):
            raise ValueError(f"{name} of {file} is no lambda: write its rung by hand")
        used += [each.id for each in ast.walk(function.body) if isinstance(each, ast.Name)]
        arguments, body = ast.unparse(function.args), ast.unparse(function.body)
        texts.append(f'def {name}({arguments}):\n    """Return the ``{name}`` of the policy."""\n    return {body}\n')
    around = needs(file, *used)
    return WholeProgram("\n\n\n".join([around.text.strip(), *texts]), around.allows)
