"""Safetensors and JSON files on their way to a disk: a file has its name when it is whole."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor


def shards(tensors: dict[str, Tensor], limit: int) -> list[dict[str, Tensor]]:
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > limit:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    return shards


def write_shard(tensors: dict[str, Tensor], path: Path) -> None:
    with _replacing(path) as part:
        save_file(tensors, part, metadata={"format": "pt"})


def write_json(value: dict[str, Any], path: Path) -> None:
    with _replacing(path) as part:
        part.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A path to write to instead of ``path``; if all goes well, what is there is flushed and moved to ``path``."""
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=path.parent) as folder:
        part = Path(folder) / path.name
        yield part
        with open(part, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(part, path)
