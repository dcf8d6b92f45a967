"""Puts a student's piece into modules as they are imported: the ``sitecustomize`` of a run of ``transect learn use``.

``live.placed`` writes a copy of this file into a folder at the front of PYTHONPATH. So every process of the run has it,
engines and ranks too, and the product does not know of it.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import json
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any


class Hook(importlib.abc.MetaPathFinder):
    """Finds the modules that a piece goes into, and lets ``live.place`` change each when it has been executed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.left = set(json.loads((folder / "piece.json").read_text())["modules"])

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module by the other finders, with the change after its execution."""
        if name not in self.left:
            return None
        self.left.discard(name)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def execute_and_place(module: ModuleType) -> None:
                execute(module)
                importlib.import_module("transect.learn.live").place(module, self.folder)

            loader.exec_module = execute_and_place
        return spec


if __name__ == "sitecustomize":
    here = Path(__file__).parent
    sys.meta_path.insert(0, Hook(here))
    sys.path.remove(str(here))
    own = sys.modules.pop("sitecustomize")
    try:
        importlib.import_module("sitecustomize")  # the one that this copy hides
    except ModuleNotFoundError:
        pass
    finally:
        sys.modules.setdefault("sitecustomize", own)
