"""Versions of models in files: each with its weights, its lineage and its state.

    PATH/NAME-v3/                the model, as a server loads it
    PATH/NAME-v3/lineage.json    its origin: data, code, settings, base, parents; its digest and figures
    PATH/NAME.json               the current version, and a history of states with reasons

PATH can be the server's ``--allowed-lora-dir``: an adapter is then served by the name of its version.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from ..digests import key_of
from ..folder import read_json, write_json, writing
from .models import FlowModel, model_of

LINEAGE = "lineage.json"
CURRENT, CANDIDATE, FORMER, REJECTED = "current", "candidate", "former", "rejected"


@dataclass(frozen=True, slots=True)
class ModelVersion:
    """A registered version.

    Attributes:
        name: ``NAME-vNUMBER``.
        state: ``candidate``, ``current``, ``former`` or ``rejected``.
        reason: of that state.
        lineage: contents of ``lineage.json``.
        replaced: name of the version that was current before it; empty if none was.
    """

    name: str
    model: FlowModel
    state: str
    reason: str
    lineage: Mapping[str, Any]
    replaced: str = ""


class VersionCatalog:
    """The versions in a directory.

    Args:
        path: the directory; it is created when something is written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = FileLock(path / ".lock")

    def version(self, name: str) -> ModelVersion | None:
        """Return a version by its name; None if there is none.

        Raises:
            ValueError: its files are damaged.
        """
        folder = self.path / name
        lineage = read_json(folder / LINEAGE)
        if lineage is None:
            return None
        states = self._states(lineage["model"])
        own = [entry for entry in states["history"] if entry["version"] == name]
        last = own[-1] if own else {"state": CANDIDATE, "reason": "registered"}
        replaced = next((entry["replaced"] for entry in reversed(own) if entry["state"] == CURRENT), "")
        state = last["state"]
        if state == CURRENT and self._current_name(lineage["model"]) != name:
            state = FORMER
        return ModelVersion(name, model_of(str(folder), lineage["base"]), state, last["reason"], lineage, replaced)

    def current(self, model: str) -> ModelVersion | None:
        """Return the current version of a model; None if none was promoted yet.

        Raises:
            ValueError: its files are gone.
        """
        name = self._current_name(model)
        if not name:
            return None
        found = self.version(name)
        if found is None:
            raise ValueError(f"{self.path / name}, the current version of {model}, is missing: restore it, or promote "
                             f"another version in {self.path / model}.json")  # fmt: skip
        return found

    def versions(self, model: str) -> list[ModelVersion]:
        """List the versions of a model, oldest first."""
        found = (self.version(path.name) for path in self._folders(model))
        return [each for each in found if each is not None]

    def lineages(self, model: str) -> list[dict[str, Any]]:
        """List the lineages of a model's versions, newest first, without reading weights."""
        found = (read_json(path / LINEAGE) for path in reversed(self._folders(model)))
        return [each for each in found if each is not None]

    def add(self, model: str, weights: FlowModel, folder: Path, lineage: Mapping[str, Any]) -> ModelVersion:
        """Register a model, or return the version that has its weights and its origin already.

        Args:
            folder: directory of its files.
            lineage: plain values; ``made_from`` of them tells equal origins.

        Raises:
            ValueError: the files cannot be written.
        """
        with self._locked():
            key = key_of([weights.digest, lineage.get("made_from")])
            for known in self.lineages(model):
                if known["key"] == key:
                    return self._registered(model, known["version"])
            number = max((_number(path.name) for path in self._folders(model)), default=0) + 1
            name = f"{model}-v{number}"
            partial = self.path / f".partial-{name}"
            with writing(self.path / name):
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
                for file in sorted(folder.iterdir()):
                    if file.is_file() and not file.name.startswith("train_state"):
                        _link(file, partial / file.name)
                values = {
                    **lineage,
                    "model": model,
                    "version": name,
                    "base": weights.base,
                    "digest": weights.digest,
                    "bytes": weights.size,
                    "key": key,
                    "registered": time.time(),
                }
                write_json(values, partial / LINEAGE)
                partial.rename(self.path / name)
            return self._registered(model, name)

    def _registered(self, model: str, name: str) -> ModelVersion:
        """Return a version whose files are there, and note its registration if a kill has prevented that."""
        if not any(entry["version"] == name for entry in self._states(model)["history"]):
            self._note(model, name, CANDIDATE, "registered")
        found = self.version(name)
        assert found is not None
        return found

    def promote(self, version: ModelVersion, reason: str) -> None:
        """Make a version the current one."""
        model = version.lineage["model"]
        if self._current_name(model) != version.name:
            self._note(model, version.name, CURRENT, reason)

    def reject(self, version: ModelVersion, reason: str) -> None:
        """Note that a version was rolled back. If it is the current one, the version that it replaced is current
        again."""
        if version.state != REJECTED:
            model = version.lineage["model"]
            before = self.version(version.replaced) if version.replaced else None
            if self._current_name(model) == version.name and before is not None:
                self.promote(before, f"{version.name} was rolled back")
            self._note(model, version.name, REJECTED, reason)

    def _current_name(self, model: str) -> str:
        return str(self._states(model)["current"])

    def _states(self, model: str) -> dict[str, Any]:
        return read_json(self.path / f"{model}.json") or {"current": "", "history": []}

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Let one process at a time change the directory."""
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        with self._lock:
            yield

    def _note(self, model: str, name: str, state: str, reason: str) -> None:
        with self._locked():
            states = self._states(model)
            entry = {"version": name, "state": state, "reason": reason, "time": time.time()}
            if state == CURRENT:
                entry["replaced"] = self._current_name(model)
                states["current"] = name
            kept = {"current": states["current"], "history": [*states["history"], entry]}
            write_json(kept, self.path / f"{model}.json")

    def _folders(self, model: str) -> list[Path]:
        found = [path for path in self.path.glob(f"{model}-v*") if re.fullmatch(rf"{re.escape(model)}-v\d+", path.name)]
        return sorted(found, key=lambda path: _number(path.name))


def _number(name: str) -> int:
    return int(name.rpartition("-v")[2])


def _link(file: Path, target: Path) -> None:
    """Link a file, which is never changed in place; copy it to another file system."""
    try:
        os.link(file.resolve(), target)
    except OSError:
        shutil.copy2(file, target)
