"""Makes the file of a new rung from an operator, a policy or an objective, for teachers to edit."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

from ..ops.registry import Op, all_ops, get
from .template_sources import SOURCES, driver

PACKAGE = Path(__file__).resolve().parent.parent


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
    kinds = (kind,) if colon else ("policy", "objective")
    found = next((f"{each}:{bare}" for each in kinds if f"{each}:{bare}" in SOURCES), "")
    if found:
        return rung_of_source(found)
    if colon:
        known = ", ".join(each for each in SOURCES if each.startswith(kind))
        raise ValueError(f"no rung can be made from {name!r}: there are {known}")
    return rung_of_operator(bare)


def rung_of_source(name: str) -> str:
    """Write the text of a rung's file from a policy or an objective."""
    source = SOURCES[name]
    bare = name.partition(":")[2]
    page = (ast.get_docstring(ast.parse((PACKAGE / source.file).read_text())) or "").strip()
    quoted = page.replace("\\", "\\\\").replace('"""', "'''")
    module = "transect." + source.file.removesuffix(".py").replace("/", ".")
    return f'''"""{quoted}
"""

from importlib import import_module

from transect.learn.record import Case, Rung, Speed
from transect.learn.rungs.inputs import normal
from transect.learn.texts import excerpt

SOLUTION = f"""{source.preamble}

{{excerpt({source.file!r}, {", ".join(map(repr, source.names))})}}"""


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
    solution=SOLUTION,
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
)
'''


def rung_of_operator(name: str) -> str:
    """Write the text of a rung's file: page, hole, cases and bounds from the operator's own file.

    Raises:
        ValueError: there is no such operator, or its examples have arguments other than tensors and numbers.
    """
    all_ops()
    op = get(name)
    module = inspect.getmodule(op.reference)
    assert module is not None and module.__file__ is not None
    file = Path(module.__file__).resolve()
    path = str(file.relative_to(PACKAGE))
    page = (module.__doc__ or "").strip()
    function = ast.parse(inspect.getsource(op.reference)).body[0]
    assert isinstance(function, ast.FunctionDef)
    names = _with_helpers(function, ast.parse(file.read_text()))
    arguments = [argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)]
    examples = _examples(op, arguments)
    cases = "\n".join(
        f'        Case("example {number}", _example({number}), "A teacher\'s sentence for who fails here first."),'
        for number in examples
    )
    quoted = page.replace("\\", "\\\\").replace('"""', "'''")
    return f'''"""{quoted}
"""

from transect.costs.work import Cost
from transect.learn.record import Case, Rung, Speed
from transect.learn.rungs.inputs import like
from transect.learn.texts import excerpt
from transect.ops.registry import all_ops, get

all_ops()
OP = get({name!r})
ARGUMENTS = {arguments!r}

SOLUTION = f"""import math

import torch
import torch.nn.functional as F
from torch import Tensor


def compute_dtype(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


{{excerpt({path!r}, {", ".join(map(repr, names))})}}"""


def _example(number):
    return lambda rng: [like(rng, OP.examples()[number].get(name)) for name in ARGUMENTS]


def _cost(*arguments) -> Cost:
    return OP.cost(**dict(zip(ARGUMENTS, arguments, strict=True)))


def _answer(*arguments):
    return OP.reference(*arguments)


RUNG = Rung(
    name={f"my_{name}"!r},
    title={name.replace("_", " ")!r},
    road="kernels",
    place=100,
    kind="torch",
    solution=SOLUTION,
    holes=({function.name!r},),
    answers={{{function.name!r}: _answer}},
    cases=(
{cases}
    ),
    speed=Speed(_example({examples[0]}), "A teacher's sentence for who does twice the work.", _cost),
    hints=("Read the page once more: the first formula is the whole forward pass.",),
    shipped={path!r},
    forbids=(),
)
'''


def _with_helpers(function: ast.FunctionDef, module: ast.Module) -> list[str]:
    """List the names of the function and of those of its file that it calls, directly or not; helpers first."""
    known = {node.name: node for node in module.body if isinstance(node, ast.FunctionDef)}
    found: list[str] = []
    left = [function.name]
    while left:
        name = left.pop()
        if name in known and name not in found:
            found.insert(0, name)
            left += [node.id for node in ast.walk(known[name]) if isinstance(node, ast.Name)]
    return found


def _examples(op: Op, arguments: list[str]) -> list[int]:
    """List the numbers of the examples that can be sent to a program: tensors and plain numbers."""
    import torch

    plain = (torch.Tensor, int, float, bool, str, type(None))
    found = [n for n, example in enumerate(op.examples()) if all(isinstance(v, plain) for v in example.values())]
    if not found or not arguments:
        raise ValueError(f"the examples of {op.name!r} hold more than tensors and numbers: write its rung by hand")
    return found[:4]
