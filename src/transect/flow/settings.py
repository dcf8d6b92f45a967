"""A flow as a frozen description, read from a TOML file: its name, its folder, and a table for each step."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..train.config.parse import overridden
from .steps.registry import steps as all_steps
from .steps.step import FlowStep

NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,63}")


def read_flow(path: Path) -> dict[str, Any]:
    """Read a flow's file as nested values. Raises ValueError if it cannot be read or is not TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not TOML: {error}") from None


def flow_folder(values: Mapping[str, Any], path: Path) -> Path:
    """Return the directory of a flow's states. Raises ValueError for a ``name`` or ``dir`` that cannot be used."""
    name = values.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ValueError(f"{path}: name must be letters, digits, dots, - and _ (at most 64), not {name!r}")
    folder = values.get("dir", f"flows/{name}")
    if not isinstance(folder, str) or not folder:
        raise ValueError(f"{path}: dir must be a directory, not {folder!r}")
    return path.parent / Path(folder).expanduser()


@dataclass(frozen=True, slots=True)
class FlowConfig:
    """Settings of a flow.

    Attributes:
        name: name of the model that the flow makes: in the registry, and for clients of the server.
        path: the flow's file.
        folder: directory of states and results; ``dir`` in the file, relative to the file. Default: ``flows/NAME``.
        tables: settings of each step that runs, by name.
    """

    name: str
    path: Path
    folder: Path
    tables: Mapping[str, Any]

    @classmethod
    def from_toml(
        cls, path: str | Path, settings: Sequence[str] = (), steps: Mapping[str, FlowStep] | None = None
    ) -> FlowConfig:
        """Read a flow's file.

        Args:
            settings: ``key=value``, which replace the file's, such as ``release.share=0.2``.
            steps: the steps of the chain; None for all that are shipped.

        Raises:
            ValueError: not readable, not TOML, an unknown key, or a value of the wrong type or out of its range; the
                message names the key.
        """
        path = Path(path)
        return cls.from_dict(overridden(read_flow(path), settings), path, all_steps() if steps is None else steps)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], path: Path, steps: Mapping[str, FlowStep]) -> FlowConfig:
        """Build the settings from nested values. Raises ValueError as ``from_toml``."""
        known = ["name", "dir", *steps]
        for key in values:
            if key not in known:
                near = difflib.get_close_matches(key, known, 1)
                hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
                raise ValueError(f"{path}: the setting {key} is not known; {hint}")
        folder = flow_folder(values, path)
        tables = {}
        for step in steps.values():
            if step.name not in values and step.missing == "out":
                continue
            if step.name not in values and step.missing == "refuse":
                raise ValueError(f"{path} has no table [{step.name}]: add it")
            table = values.get(step.name, {})
            if not isinstance(table, Mapping):
                raise ValueError(f"{path}: {step.name} must be a table, not {table!r}")
            try:
                tables[step.name] = step.read(step.settings, table, f"{step.name}.")
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from None
        return cls(values["name"], path, folder, tables)
