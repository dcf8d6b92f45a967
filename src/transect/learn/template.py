"""Makes the file of a new rung from an operator of the registry, for teachers to edit."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

from ..ops.registry import Op, all_ops, get

PACKAGE = Path(__file__).resolve().parent.parent


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
