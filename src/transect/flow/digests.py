"""Content hashes: of plain values, files and models. Equal hashes mean equal inputs, wherever the files are."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

KEY = 16
"""Hexadecimal digits of a key."""


def key_of(values: Any) -> str:
    """Hash plain values: equal for equal contents, in any order of keys."""
    return hashlib.sha256(canonical(values)).hexdigest()[:KEY]


def canonical(values: Any) -> bytes:
    """Write plain values as JSON in one form: sorted keys, no spaces; other types by their text."""
    return json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=str).encode()


def file_digest(path: Path) -> str:
    """Hash a file's content (SHA-256); a file that did not change since is not read again.

    Raises:
        ValueError: it cannot be read.
    """
    try:
        found = path.stat()
        return _digest(path, found.st_ino, found.st_size, found.st_mtime_ns)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from None


@lru_cache(4096)
def _digest(path: Path, *_version: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def files_digest(paths: Iterable[Path]) -> str:
    """Hash files by name and content, in the order of their names."""
    return key_of([[path.name, file_digest(path)] for path in sorted(paths, key=lambda path: path.name)])


def differences(old: Mapping[str, Any], new: Mapping[str, Any], before: str = "") -> list[str]:
    """List the dotted keys whose values differ between two nested mappings."""
    found = []
    for name in sorted(old.keys() | new.keys()):
        mine, other = old.get(name), new.get(name)
        if isinstance(mine, Mapping) and isinstance(other, Mapping):
            found += differences(mine, other, f"{before}{name}.")
        elif canonical(mine) != canonical(other):
            found.append(before + name)
    return found
