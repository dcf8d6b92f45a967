"""Explains a process that a launcher started, from inside: starts when torch has been imported, and writes a file when
the process ends. ``job.py`` makes Python call ``install`` at start-up."""

from __future__ import annotations

import atexit
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = "TRANSECT_EXPLAIN_FOLDER"
"""Environment variable with the folder for the files of all processes."""
SETTINGS = "TRANSECT_EXPLAIN_SETTINGS"
"""Environment variable with window, stacks and preset, as JSON."""
TAKEN = "TRANSECT_EXPLAIN_PROCESS"
"""Environment variable that marks explained processes, whose children are not explained."""
LAUNCHER = ("torchrun", "accelerate", "deepspeed", "torch.distributed.run", "torch.distributed.launch")


def install() -> None:
    """Explain this process once it imports torch, if it is one to be explained."""
    if FOLDER in os.environ and TAKEN not in os.environ and not _is_launcher():
        sys.meta_path.insert(0, _Torch())


def _is_launcher() -> bool:
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return False
    words = sys.orig_argv[1:4]
    return any(Path(word).name == name or word.startswith(f"{name}.") for word in words for name in LAUNCHER) or any(
        word in ("accelerate.commands.launch", "accelerate.commands.accelerate_cli") for word in words
    )


class _Torch(importlib.abc.MetaPathFinder):
    """Import hook that starts the explanation when torch has been loaded."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        loader, plain = spec.loader, spec.loader.exec_module

        def load(module: ModuleType) -> None:
            plain(module)
            _begin()

        loader.exec_module = load  # type: ignore[method-assign]
        return spec


def _begin() -> None:
    os.environ[TAKEN] = str(os.getpid())
    from ...costs.presets import preset
    from .explain import Explain

    settings: dict[str, Any] = json.loads(os.environ.get(SETTINGS, "{}"))
    named = str(settings.get("preset", ""))
    ceilings = preset(named).ceilings() if named else None
    run = Explain(ceilings, stacks=bool(settings.get("stacks", True)), window_s=float(settings.get("window_s", 3.0)))
    run.__enter__()
    process = os.getpid()

    def leave() -> None:
        if os.getpid() != process:
            return
        run.__exit__(None, None, None)
        assert run.result is not None
        rank = os.environ.get("RANK")
        name = f"rank {rank}" if rank is not None else f"process {process}"
        path = Path(os.environ[FOLDER], f"{name.replace(' ', '-')}.json")
        path.with_suffix(".part").write_text(json.dumps(run.result.to_dict() | {"name": name}))
        path.with_suffix(".part").rename(path)

    atexit.register(leave)
