"""Programs as texts: excerpts of the package's own sources, and the same program with a hole in it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

HOLE = "# --- your turn: write the body of this function ---"
OPEN, CLOSE = "// --- hole ---", "// --- end ---"
"""Marks around the part of a C++ program that the student writes."""
PACKAGE = Path(__file__).resolve().parent.parent


def excerpt(file: str, *names: str) -> str:
    """Extract functions and classes of a file of this package, as they are shipped; kernels with Triton's own
    decorator.

    Args:
        file: path in the package, ``ops/first/vector_add.py``.
        names: in the order that they are wanted in; ``Class.method`` for one method.

    Raises:
        ValueError: the file has no such name.
    """
    text = (PACKAGE / file).read_text()
    nodes = definitions(ast.parse(text))
    lines = text.splitlines()
    parts = []
    for name in names:
        if name not in nodes:
            raise ValueError(f"{file} has no {name!r}")
        node = nodes[name]
        first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))])
        parts.append("\n".join(lines[first - 1 : node.end_lineno]))
    return re.sub(r"(?m)^@kernel$", "@triton.jit", "\n\n\n".join(parts)) + "\n"


def with_hole(text: str, holes: tuple[str, ...]) -> str:
    """Take the bodies of the functions ``holes`` (``name``, ``Class.method``) out of a program; their docstrings
    stay. In C++ the part between two marks goes."""
    if OPEN in text:
        pattern = re.compile(rf"[ \t]*{re.escape(OPEN)}\n.*?{re.escape(CLOSE)}", re.DOTALL)
        return pattern.sub(f"    // {HOLE[2:]}", text)
    nodes = definitions(ast.parse(text))
    lines = text.splitlines()
    for name in sorted(holes, key=lambda each: -nodes[each].lineno):
        node = nodes[name]
        assert isinstance(node, ast.FunctionDef)
        body = node.body[1:] if ast.get_docstring(node) is not None and len(node.body) > 1 else node.body
        first, last = body[0].lineno, node.end_lineno
        indent = " " * body[0].col_offset
        lines[first - 1 : last] = [f"{indent}{HOLE}", f'{indent}raise NotImplementedError("{name} is not written yet")']
    return "\n".join(lines) + "\n"


def definitions(tree: ast.Module) -> dict[str, ast.stmt]:
    """Return the definitions of a file by name: functions, classes, methods (``Class.method``), constants."""
    found: dict[str, ast.stmt] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
            for inner in node.body if isinstance(node, ast.ClassDef) else ():
                if isinstance(inner, ast.FunctionDef):
                    found[f"{node.name}.{inner.name}"] = inner
        elif isinstance(node, ast.Assign):
            for each in ast.walk(node.targets[0]):
                if isinstance(each, ast.Name):
                    found[each.id] = node
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = node
    return found
