"""What a measured row was measured of: a digest of the files that an operator's kernels come from.

Python files are followed through their imports inside this folder, CUDA C++ files through their includes, and the
tuned choices of the operator's launchers count too. What all operators share without it being part of any kernel
(the registry, shapes, peers, how kernels are found and loaded) does not. So a row stays good for as long as its
digest does, and a run needs to measure only what has changed.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .. import tuning
from ..lang.cuda import SOURCES
from ..registry import Op

SHARED = frozenset({"cuda", "jit", "numerics", "opset", "peers", "registry", "shapes", "tuning"})
"""Modules that are part of no kernel."""


def files_of(op: Op, folder: Path = SOURCES) -> list[Path]:
    """The operator's files in ``folder``, by name: its own, and whatever those import or include."""
    found: set[Path] = set()
    waiting = [Path(inspect.getfile(inspect.unwrap(op.reference))).name]
    waiting += [made.source for made in op.implementations.values() if made.source]
    while waiting:
        path = folder / waiting.pop()
        if path.stem in SHARED or path in found or not path.is_file():
            continue
        found.add(path)
        waiting += _imports(path) if path.suffix == ".py" else re.findall(r'#include "([^"]+)"', path.read_text())
    return sorted(found)


def _imports(path: Path) -> list[str]:
    """Files of the same folder that a module imports, wherever in it."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            names += [node.module.partition(".")[0]] if node.module else [alias.name for alias in node.names]
    return [f"{name}.py" for name in names]


def digest(op: Op, device_name: str, folder: Path = SOURCES) -> str:
    """12 hexadecimal digits of the operator's files and of its launchers' choices that are shipped for a device: those
    in the device's file, and that in the folder of a module's name."""
    made = hashlib.sha256()
    tuned, file = folder / tuning.SHIPPED.name, tuning.file_name(device_name)
    for path in files_of(op, folder):
        made.update(f"{path.name}\n".encode() + path.read_bytes())
        own = tuned / path.stem / file
        made.update(own.read_bytes() if path.suffix == ".py" and own.is_file() else b"")
    shipped = tuned / file
    choices = json.loads(shipped.read_text())["choices"] if shipped.is_file() else {}
    mine = {knobs.name: choices[knobs.name] for knobs in op.knobs if knobs.name in choices}
    made.update(json.dumps(mine, sort_keys=True).encode())
    return made.hexdigest()[:12]


def still_good(
    kept: Mapping[str, Any], run: Mapping[str, Any], digests: Mapping[str, str]
) -> frozenset[tuple[str, str]]:
    """(operator, case) pairs of a result file that a new run on this machine need not measure.

    Args:
        kept: a result file, as ``results.read`` gives it.
        run: the new run's machine and versions, as they will be recorded.
        digests: today's digest of each operator.
    """

    def place(made: Mapping[str, Any]) -> tuple[Any, Any]:
        return made["device"]["name"], made["environment"]["packages"]

    same = {number for number, made in kept["runs"].items() if place(made) == place(run)}
    good: dict[tuple[str, str], bool] = {}
    for row in kept["rows"]:
        unchanged = row["run"] in same and row.get("source") == digests.get(row["op"], "")
        good[row["op"], row["case"]] = good.get((row["op"], row["case"]), True) and unchanged
    return frozenset(pair for pair, unchanged in good.items() if unchanged)
