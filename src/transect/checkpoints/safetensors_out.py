"""Writing of safetensors and JSON files: a file gets its name when it is complete."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import save, save_file
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


def write_with_metadata(tensors: dict[str, Tensor], path: Path, metadata: Mapping[str, str]) -> None:
    """Write tensors and several metadata entries so that the same content has the same bytes in every process; the
    library orders the entries by a random hash."""
    data = save(tensors)
    size = int.from_bytes(data[:8], "little")
    header = {"__metadata__": dict(sorted(metadata.items())), **json.loads(data[8 : 8 + size])}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])


def write_json(value: dict[str, Any], path: Path) -> None:
    with _replacing(path) as part:
        part.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Yield a path to write to instead of ``path``; on success the file is flushed and moved to ``path``."""
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=path.parent) as folder:
        part = Path(folder) / path.name
        yield part
        with open(part, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(part, path)
