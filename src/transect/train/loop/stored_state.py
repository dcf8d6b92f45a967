"""Read tensors of a training checkpoint on demand, from one file or from one file of each rank.

Parts of a tensor from several ranks (``parallel/part_names.py``) become one tensor again, whatever the number of ranks
was. So a run can be resumed with any number of ranks.

Files are written tensor by tensor: safetensors' own function first makes a copy of all of them, which for states in
host memory would be a second time that memory.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from ...parallel.part_names import parse


def write_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write a safetensors file: the header's length in 8 bytes, the header in JSON, then the numbers of each tensor.

    Raises:
        OSError: it cannot be written.
    """
    ordered = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # each aligned to its own size
    header: dict[str, Any] = {}
    at = 0
    for name in ordered:
        tensor = tensors[name]
        end = at + tensor.nbytes
        header[name] = {"dtype": TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in ordered:
            if tensors[name].numel():
                file.write(tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy().data)


def digest(path: Path) -> str:
    """Compute the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


TYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""Dtypes by their names in such a file."""


@dataclass(frozen=True, slots=True)
class _Part:
    file: Any
    key: str
    begin: int
    shape: tuple[int, ...] | None
    """Shape of the part; None for the whole tensor."""


class StoredTensors(Mapping[str, Tensor]):
    """Whole tensors by name, each read on demand.

    Args:
        files: all files of the state.

    Raises:
        OSError, SafetensorError: a file cannot be read. ValueError: a part of a tensor is not there.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self._parts: dict[str, list[_Part]] = {}
        for path in files:
            file = safe_open(path, framework="pt")
            for key in file.keys():  # noqa: SIM118 (not a mapping)
                name, begin, shape = parse(key)
                self._parts.setdefault(name, []).append(_Part(file, key, begin, shape))
        for parts in self._parts.values():
            parts.sort(key=lambda part: part.begin)

    def __getitem__(self, name: str) -> Tensor:
        parts = self._parts[name]
        first = parts[0]
        if first.shape is None:
            whole: Tensor = first.file.get_tensor(first.key)
            return whole
        found = [part.file.get_tensor(part.key) for part in parts]
        starts = [part.begin for part in parts]
        ends = [begin + len(values) for begin, values in zip(starts, found, strict=True)]
        if [0, *ends] != [*starts, math.prod(first.shape)]:
            raise ValueError(f"the state of {name} has a gap: parts begin at {starts} and end at {ends}")
        return torch.cat(found).view(first.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)


class Below(Mapping[str, Tensor]):
    """View of the tensors whose names begin with ``prefix``, by the rest of the name; read on demand."""

    def __init__(self, prefix: str, tensors: Mapping[str, Tensor]) -> None:
        self._prefix, self._tensors = prefix, tensors
        self._names = [name.removeprefix(prefix) for name in tensors if name.startswith(prefix)]

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[self._prefix + name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def write_json(values: Any, path: Path) -> None:
    """Write plain values."""
    path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
