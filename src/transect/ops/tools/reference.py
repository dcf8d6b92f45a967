"""The reference page of the operators, written from the registry and the docstrings of their files."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Sequence

from ..registry import Op

COLUMNS = ("implementation", "backend", "targets", "dtypes", "gradient", "batch-invariant", "kernels")


def paragraphs(docstring: str) -> list[str]:
    """Split a docstring into blocks between empty lines."""
    return [block.strip("\n") for block in re.split(r"\n\s*\n", docstring.strip("\n")) if block.strip()]


def markdown(block: str) -> str:
    """Convert one paragraph of a docstring: indented ones are formulas and stay unchanged; RST's double ticks become
    single ones."""
    if all(line.startswith("    ") for line in block.splitlines()):
        return "```text\n" + textwrap.dedent(block) + "\n```"
    text = block.replace("``", "`")
    if any(line.startswith("    ") for line in text.splitlines()):  # a line of text, then formulas
        head = [line for line in text.splitlines() if not line.startswith("    ")]
        formulas = textwrap.dedent("\n".join(line for line in block.splitlines() if line.startswith("    ")))
        return "\n".join(head) + "\n\n```text\n" + formulas + "\n```"
    return text


def math(docstring: str) -> list[str]:
    """Return the title, and the formulas that follow it before the shapes are given."""
    blocks = paragraphs(docstring)
    chosen = [blocks[0]]
    for block in blocks[1:]:
        if block.startswith(("Shapes", "Bound", "Source", "**", "* ")):
            break
        if "    " in block or (block.endswith(":") and "\n" not in block):
            chosen.append(block)
    while chosen[-1].endswith(":"):  # it introduced something that is not a formula
        chosen.pop()
    return chosen


def lines_of(docstring: str, word: str) -> str:
    """Return the text from a line that begins with ``word`` to the end of its paragraph (or to the next such line);
    else ''."""
    found = re.search(rf"(?ms)^{word}\w*.*?(?=^(?:Source|Shapes|Bound)\b|\n\s*\n|\Z)", docstring)
    return found.group().strip().replace("``", "`") if found else ""


def entry(op: Op) -> str:
    """Render one operator: math, shapes, limits, implementations, accuracy."""
    module = sys.modules[op.reference.__module__]
    docstring = module.__doc__ or ""
    parts = [f"## {op.name}", f"`{module.__name__.removeprefix('transect.').replace('.', '/')}.py`"]
    parts += [markdown(block) for block in math(docstring)]
    parts += [text for text in (lines_of(docstring, word) for word in ("Shapes", "Bound", "Source")) if text]
    if op.implementations:
        rows = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
        kernels = list(op.kernels())
        for name, made in op.implementations.items():
            own = sum(kernel.implementation == name for kernel in kernels)
            gradient = "yes" if made.autograd else ""
            invariant = "yes" if made.batch_invariant else ""
            dtypes = ", ".join(made.dtypes)
            compiled = made.source or (str(own) if own else "")
            cells = (name, made.backend, ", ".join(made.targets), dtypes, gradient, invariant, compiled)
            rows.append("| " + " | ".join(cells) + " |")
        parts.append("\n".join(rows))
    error = f"Error: at most {op.error_ratio:g} times that of torch's own operator in the same dtype"
    parts.append(error + (f" ({op.error_note})." if op.error_note else "."))
    if op.peers:
        parts.append("Raced against: " + ", ".join(op.peers) + ".")
    if op.measured_as:
        parts.append("Measured as: " + ", ".join(op.measured_as) + ".")
    if op.knobs():
        parts.append(
            "`transect tune` searches: " + "; ".join(f"{k.name} ({', '.join(k.choices)})" for k in op.knobs()) + "."
        )
    return "\n\n".join(parts)


def page(ops: Sequence[Op]) -> str:
    """Return the entries of all operators, by name."""
    return "\n\n".join(entry(op) for op in ops) + "\n"
