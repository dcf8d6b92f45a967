"""A function of a file of this package with all that it needs: a program that stands alone, for ``learn new``.

Functions, classes and constants of the same file come as excerpts. Names of other files are imported; so the program
may import those files, and no others.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

from .texts import PACKAGE, definitions, excerpt


@dataclass(frozen=True, slots=True)
class WholeProgram:
    """Text of a program, and the modules of this package that it imports."""

    text: str
    allows: tuple[str, ...]


def program_of(file: str, *roots: str) -> WholeProgram:
    """Write the program of some functions or classes.

    Args:
        file: path in the package, ``ops/norm/norms.py``.
        roots: the functions and classes that are wanted.

    Raises:
        ValueError: the file lacks one of them.
    """
    known = definitions(ast.parse((PACKAGE / file).read_text()))
    if missing := [name for name in roots if name not in known]:
        raise ValueError(f"{file} has no {missing[0]!r}")
    return needs(file, *roots)


def needs(file: str, *used: str) -> WholeProgram:
    """Write the program of those of the names ``used`` that the file defines or imports."""
    tree = ast.parse((PACKAGE / file).read_text())
    known, imported = definitions(tree), _imports(tree, file)
    found: dict[str, int] = {}
    lines: dict[str, None] = {}
    modules: dict[str, None] = {}
    left = list(used)
    while left:
        name = left.pop()
        if name in found:
            continue
        if name in imported:
            line, module = imported[name]
            lines[line] = None
            if module:
                modules[module] = None
            continue
        if name not in known:
            continue
        found[name] = known[name].lineno
        left += _names(known[name])
    text = excerpt(file, *sorted({line: name for name, line in found.items()}.values(), key=lambda name: found[name]))
    head = "\n".join(["from __future__ import annotations", "", *sorted(lines)])
    return WholeProgram(f"{head}\n\n\n{text}", tuple(sorted(modules)))


def _imports(tree: ast.Module, file: str) -> dict[str, tuple[str, str]]:
    """Find, by name, the line that imports it, with absolute names, and the module of this package in that line."""
    package = ["transect", *Path(file).parts[:-1]]
    found: dict[str, tuple[str, str]] = {}
    for node in tree.body:
        if isinstance(node, ast.Import):
            for each in node.names:
                line = f"import {each.name}" + (f" as {each.asname}" if each.asname else "")
                found[each.asname or each.name.partition(".")[0]] = (line, "")
        elif isinstance(node, ast.ImportFrom) and node.module != "__future__":
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            ours = module.split(".")[0] == "transect"
            for each in node.names:
                line = f"from {module} import {each.name}" + (f" as {each.asname}" if each.asname else "")
                inner = (PACKAGE.parent / Path(*module.split("."), each.name)).with_suffix(".py")
                target = f"{module}.{each.name}" if ours and inner.exists() else module
                found[each.asname or each.name] = (line, target if ours else "")
    return found


def _names(node: ast.AST) -> list[str]:
    """List the names that a definition uses when it is loaded or runs; annotations are not evaluated."""
    found = []
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns") and not isinstance(node, ast.AnnAssign):
            continue
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, ast.Name):
                found.append(each.id)
            if isinstance(each, ast.AST):
                found += _names(each)
    return found
