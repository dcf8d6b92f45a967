"""Makes the file of a new rung from an operator, a policy or an objective, for teachers to edit.

The objective ``next_token`` is an operator: the fused head and cross entropy.
"""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

from torch import Tensor

from ..ops.registry import Op, all_ops, get
from .rungs.inputs import flat
from .template_policies import policies, rung_of_policy
from .template_sources import SOURCES, driver
from .texts import PACKAGE


def rung_of(name: str) -> str:
    """Write the text of a rung's file from ``operator:NAME``, ``policy:NAME``, ``objective:NAME`` or a bare name, which
    is looked up in that order.

    Raises:
        ValueError: there is none of that name, or a rung cannot be made from it.
    """
    kind, colon, bare = name.rpartition(":")
    if kind not in ("", "operator", "policy", "objective"):
        raise ValueError(f"{kind!r} cannot become a rung: give operator:NAME, policy:NAME or objective:NAME")
    if kind == "operator" or (not colon and bare in {op.name for op in all_ops()}):
        return rung_of_operator(bare)
    if bare == "next_token" and kind != "policy":
        return rung_of_operator("linear_cross_entropy")
    if bare in policies() and kind != "objective":
        return rung_of_policy(bare)
    if f"objective:{bare}" in SOURCES and kind != "policy":
        return rung_of_source(f"objective:{bare}")
    if colon:
        known = ", ".join(policies() if kind == "policy" else (each.partition(":")[2] for each in SOURCES))
        raise ValueError(f"no rung can be made from {name!r}: there are {known}")
    return rung_of_operator(bare)


def rung_of_source(name: str) -> str:
    """Write the text of a rung's file from an objective."""
    source = SOURCES[name]
    bare = name.partition(":")[2]
    page = (ast.get_docstring(ast.parse((PACKAGE / source.file).read_text())) or "").strip()
    quoted = page.replace("\\", "\\\\").replace('"""', "'''")
    module = "transect." + source.file.removesuffix(".py").replace("/", ".")
    names = ", ".join(map(repr, source.names))
    if source.preamble is None:
        program, solution, allows = f"PROGRAM = program_of({source.file!r}, {names})", "PROGRAM.text", "PROGRAM.allows"
        used = "from transect.learn.closure import program_of"
    else:
        program = f'SOLUTION = f"""{source.preamble}\n\n{{excerpt({source.file!r}, {names})}}"""'
        used, solution, allows = "from transect.learn.texts import excerpt", "SOLUTION", repr(source.allows)
    torch = "import torch\n\n" if "torch." in source.arguments else ""
    return f'''"""{quoted}
"""

from importlib import import_module

{torch}{used}
from transect.learn.record import Case, Rung, Speed
from transect.learn.rungs.inputs import normal

{program}


{driver(source)}

def _arguments(rng):
    return {source.arguments}


def _answer(*arguments):
    return _drive(import_module({module!r}), *arguments)


RUNG = Rung(
    name={f"my_{bare}"!r},
    title={bare!r},
    road={source.road!r},
    place=100,
    kind={source.kind!r},
    solution={solution},
    holes={source.holes!r},
    answers={{"play": _answer}},
    drives={{"play": _drive}},
    cases=(
        Case("a first draw", _arguments, "A teacher's sentence for who fails here first."),
        Case("a second draw", _arguments, "A teacher's sentence for who passes the first by chance."),
        Case("a third draw", _arguments, "A teacher's sentence for rare branches."),
    ),
    speed=Speed(_arguments, "A teacher's sentence for who does twice the work."),
    hints=("Read the page once more: it has the rule.",),
    shipped={source.file!r},
    allows={allows},
)
'''


def rung_of_operator(name: str) -> str:
    """Write the text of a rung's file: page, hole, cases and bounds from the operator's own file.

    Raises:
        ValueError: there is no such operator, or its examples have arguments that cannot be sent to a program.
    """
    all_ops()
    op = get(name)
    module = inspect.getmodule(op.reference)
    assert module is not None and module.__file__ is not None
    path = str(Path(module.__file__).resolve().relative_to(PACKAGE))
    page = (module.__doc__ or "").strip()
    function = op.reference.__name__
    arguments = [
        each.name for each in inspect.signature(op.reference).parameters.values() if each.kind != each.VAR_KEYWORD
    ]
    examples = _examples(op, arguments)
    arguments += [each for each in op.examples()[examples[0]] if each not in arguments]
    cases = "\n".join(
        f'        Case("example {number}", _example({number}), "A teacher\'s sentence for who fails here first."),'
        for number in examples
    )
    changed = [arguments.index(each) for each in op.mutates]
    quoted = page.replace("\\", "\\\\").replace('"""', "'''")
    return f'''"""{quoted}
"""

from importlib import import_module
from inspect import signature

from transect.costs.work import Cost
from transect.learn.closure import program_of
from transect.learn.record import Case, Rung, Speed
from transect.learn.rungs.inputs import built, flat, like
from transect.ops.registry import all_ops, get

all_ops()
OP = get({name!r})
ARGUMENTS = {arguments!r}
PROGRAM = program_of({path!r}, {function!r})


def _example(number):
    """Draw an example: arguments that it leaves out have their defaults."""
    defaults = {{name: each.default for name, each in signature(OP.reference).parameters.items()}}
    return lambda rng: [flat(like(rng, (defaults | OP.examples()[number])[name])) for name in ARGUMENTS]


def _cost(*arguments) -> Cost:
    known = signature(OP.cost).parameters
    return OP.cost(**{{name: built(each) for name, each in zip(ARGUMENTS, arguments, strict=True) if name in known}})


def _drive(module, *arguments):
    """Call the program; what it writes in place is a result too."""
    from transect.learn.rungs.inputs import built

    names, changed = {arguments!r}, {changed!r}
    values = [built(each) for each in arguments]
    for place in changed:
        values[place] = None if values[place] is None else values[place].clone()
    result = module.{function}(**dict(zip(names, values, strict=True)))
    return [result, [values[place] for place in changed]] if changed else result


RUNG = Rung(
    name={f"my_{name}"!r},
    title={name.replace("_", " ")!r},
    road="kernels",
    place=100,
    kind="torch",
    solution=PROGRAM.text,
    holes=({function!r},),
    answers={{{function!r}: lambda *arguments: _drive(import_module({module.__name__!r}), *arguments)}},
    drives={{{function!r}: _drive}},
    cases=(
{cases}
    ),
    speed=Speed(_example({examples[0]}), "A teacher's sentence for who does twice the work.", _cost),
    hints=("Read the page once more: the first formula is the whole forward pass.",),
    shipped={path!r},
    allows=PROGRAM.allows,
    forbids=(),
)
'''


def _examples(op: Op, arguments: list[str]) -> list[int]:
    """List the numbers of the examples that can be sent to a program: tensors, plain values, and objects of this
    package that are made of these."""
    found = [number for number, each in enumerate(op.examples()) if all(_plain(flat(v)) for v in each.values())]
    further = [{name for name in each if name not in arguments} for each in op.examples()]
    found = [number for number in found if further[number] == further[found[0]]]
    if not found or not arguments:
        raise ValueError(f"the examples of {op.name!r} hold more than tensors and numbers: write its rung by hand")
    return found[:4]


def _plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_plain, value))
    if isinstance(value, dict):
        return all(map(_plain, value.values()))
    return isinstance(value, Tensor | int | float | bool | str | type(None))
