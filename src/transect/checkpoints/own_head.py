"""Detect checkpoints whose config.json ties the head to the embedding although the files have a different head.

A separately trained head is saved with the old ``tie_word_embeddings`` unless its author changed the setting.
transformers then takes both tables from the files, and so does this project (no torch).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

_HEAD = "lm_head.weight"
_EMBED = ("embed_tokens.weight", "wte.weight")
_STEP = 1 << 24
"""Bytes that are compared at a time."""


@dataclass(frozen=True, slots=True)
class _Table:
    path: Path
    dtype: str
    begin: int
    end: int

    def read(self, at: int) -> np.ndarray:
        size = min(_STEP, self.end - self.begin - at)
        return np.fromfile(self.path, np.uint8, size, offset=self.begin + at)


def has_own_head(directory: Path) -> bool:
    """Return True if a model's safetensors have a head and an embedding of one type and size with different values.

    Damaged files are reported later, when the weights are read.
    """
    try:
        where = _where(directory)
        head, embed = _table(where, (_HEAD,)), _table(where, _EMBED)
        if head is None or embed is None or head.dtype != embed.dtype:
            return False
        size = head.end - head.begin
        if size != embed.end - embed.begin:
            return False
        return not all(np.array_equal(head.read(at), embed.read(at)) for at in range(0, size, _STEP))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error):
        return False


def _where(directory: Path) -> Mapping[str, Path]:
    """Return the file of each tensor."""
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if not single.is_file() and index.is_file():
        listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {name: directory / Path(file).name for name, file in listed.items()}
    files = [single] if single.is_file() else list(directory.glob("*.safetensors"))
    return dict.fromkeys(_header(files[0])[0], files[0]) if len(files) == 1 else {}


def _table(where: Mapping[str, Path], ends: tuple[str, ...]) -> _Table | None:
    """Return the one tensor whose name ends so; names may be prefixed by parts of a larger model."""
    names = [name for name in where if name in ends or name.endswith(tuple(f".{end}" for end in ends))]
    if len(names) != 1:
        return None
    header, data = _header(where[names[0]])
    stored = header[names[0]]
    begin, end = stored["data_offsets"]
    return _Table(where[names[0]], stored["dtype"], data + begin, data + end)


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """Read a safetensors file's description of its tensors, and the offset of their bytes."""
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        if size > path.stat().st_size:
            raise ValueError("no safetensors file")
        return json.loads(file.read(size)), 8 + size
