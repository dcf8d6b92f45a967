"""Reading GGUF files (versions 2 and 3): metadata and tensors, memory-mapped.

Layout, all little-endian: ``GGUF``, version u32, number of tensors u64, number of metadata entries u64; the entries
(key string, type u32, value); the tensor list (name string, number of dimensions u32, dimensions u64 with the fastest
first, type u32, offset u64); padding to ``general.alignment``; the data, to which the offsets are relative. A string is
its length in bytes as u64, then UTF-8. Source: the GGUF specification in ggml's ``docs/gguf.md``.

The reader of the ``gguf`` package needs two seconds for a vocabulary of 49k tokens; this one takes about 20 ms. It
checks everything against the size of the file before it uses it. So a corrupt file gives a ``ValueError``, and neither
a crash nor a large allocation.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ..spec.numbers.gguf import BLOCK_TYPES, BlockType
from .ggml_blocks import QuantizedTensor

_BY_ID = {t.ggml_id: t for t in BLOCK_TYPES.values()}
_UNSUPPORTED = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0",
}  # fmt: skip
_BOOL = 7
_SCALARS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", _BOOL: "<u1", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_MIN_ENTRY = 8 + 1 + 4 + 1  # bytes of the shortest metadata entry: a one-letter key, its type and one byte
_MIN_TENSOR = 8 + 1 + 4 + 8 + 4 + 8
_MAX_KEY = 1 << 16
_MAX_STRING = 1 << 26
_MAX_ARRAY = 1 << 22
_MAX_DIMS = 4
_PART = re.compile(r"(.+)-\d{5}-of-(\d{5})\.gguf")


@dataclass(frozen=True, eq=False)
class GGUFFile:
    """An open GGUF file.

    Attributes:
        path: path of the file.
        metadata: key to value: int, float, bool, str, or a (nested) list of these.
        tensors: name to tensor, in the order of the file; their blocks are read-only views of the mapped file.
        parts: the files that it is cut into, where it is (``NAME-00001-of-00003.gguf``), all of which are read.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, QuantizedTensor]
    parts: tuple[Path, ...] = ()

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> GGUFFile:
        """Map a file and read its lists; the tensor data stays on disk until it is used.

        Raises:
            ValueError: the file cannot be read, is not a GGUF file, is truncated or corrupt, is one part of several of
                which others are not beside it, or holds a tensor of an unsupported type. The message is one line that
                names the file and says what to do.
        """
        path = Path(path)
        metadata, tensors = _read(path)
        count = metadata.get("split.count", 1)
        if not isinstance(count, int) or count <= 1:
            return cls(path, metadata, tensors)
        parts = _parts(path, count)
        first, tensors = _joined(parts)
        return cls(path, first, tensors, parts)


def _read(path: Path) -> tuple[dict[str, Any], dict[str, QuantizedTensor]]:
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size == 0:
                raise ValueError(f"{path} is empty; fetch it again")
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}; give the path of a GGUF file") from None
    return _Reader(path, mapped).read()


def _parts(path: Path, count: int) -> tuple[Path, ...]:
    """List all files of a model of which ``path`` is one."""
    named = _PART.fullmatch(path.name)
    if named is None or int(named[2]) != count:
        raise ValueError(
            f"{path} is one of {count} parts of a model and not named so (NAME-00001-of-{count:05}.gguf): give all of "
            "them their names again"
        )
    files = tuple(path.with_name(f"{named[1]}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1))
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ValueError(
            f"{path} is one of {count} parts of a model, and {len(missing)} are not beside it ({missing[0]}"
            f"{', ...' if len(missing) > 1 else ''}): fetch them too"
        )
    return files


def _joined(parts: tuple[Path, ...]) -> tuple[dict[str, Any], dict[str, QuantizedTensor]]:
    """Return the metadata of the first part, and the tensors of all."""
    first: dict[str, Any] = {}
    whole: dict[str, QuantizedTensor] = {}
    for number, path in enumerate(parts):
        metadata, tensors = _read(path)
        first = first or metadata
        said = (metadata.get("split.no"), metadata.get("split.count"))
        if said != (number, len(parts)):
            raise ValueError(f"{path} says that it is part {said[0]} (from 0 on) of {said[1]}; fetch all parts again")
        twice = whole.keys() & tensors.keys()
        if twice:
            raise ValueError(f"{path}: the tensor {min(twice)!r} is in another part too; fetch all parts again")
        whole |= tensors
    expected = first.get("split.tensors.count", len(whole))
    if expected != len(whole):
        raise ValueError(f"{parts[0]}: the parts have {len(whole)} tensors, not {expected}; fetch all parts again")
    return first, whole


class _Reader:
    """A cursor over the mapped file; every read is checked against its end."""

    def __init__(self, path: Path, buffer: mmap.mmap) -> None:
        self.path = path
        self.buffer = buffer
        self.end = len(buffer)
        self.at = 0

    def read(self) -> tuple[dict[str, Any], dict[str, QuantizedTensor]]:
        n_tensors, n_entries = self._header()
        metadata: dict[str, Any] = {}
        for _ in range(n_entries):
            key = self._string("a metadata key", _MAX_KEY)
            if key in metadata:
                raise self._corrupt(f"the metadata key {key!r} occurs twice")
            metadata[key] = self._value(self._number("<I"), key, depth=0)
        listed = [self._tensor_entry() for _ in range(n_tensors)]
        return metadata, self._map_tensors(listed, metadata.get("general.alignment", 32))

    def _header(self) -> tuple[int, int]:
        if self.buffer[:4] != b"GGUF":
            raise ValueError(
                f"{self.path} is not a GGUF file (it begins with {self.buffer[:4]!r}); give the path of one"
            )
        self.at = 4
        version = self._number("<I")
        if version not in (2, 3):
            big_endian = int.from_bytes(struct.pack("<I", version), "big") in (2, 3)
            kind = "big-endian GGUF" if big_endian else f"GGUF version {version}"
            raise ValueError(f"{self.path} is {kind}; versions 2 and 3, little-endian, are supported: convert it again")
        n_tensors, n_entries = self._number("<Q"), self._number("<Q")
        if n_tensors * _MIN_TENSOR + n_entries * _MIN_ENTRY > self.end - self.at:
            raise self._corrupt(
                f"{n_tensors} tensors and {n_entries} metadata entries do not fit in {self.end} bytes", truncated=True
            )
        return n_tensors, n_entries

    def _corrupt(self, what: str, *, truncated: bool = False) -> ValueError:
        kind = "truncated or corrupt" if truncated else "corrupt"
        return ValueError(f"{self.path} is a {kind} GGUF file: {what}; fetch or convert it again")

    def _skip(self, n: int, what: str) -> int:
        """Skip ``n`` bytes; returns their start."""
        start = self.at
        if n > self.end - start:
            raise self._corrupt(f"{what} at byte {start} runs past the end ({self.end} bytes)", truncated=True)
        self.at = start + n
        return start

    def _number(self, layout: str) -> int:
        start = self._skip(struct.calcsize(layout), "a number")
        return struct.unpack_from(layout, self.buffer, start)[0]

    def _string(self, what: str, limit: int = _MAX_STRING) -> str:
        length = self._number("<Q")
        if length > limit:
            raise self._corrupt(f"{what} at byte {self.at} claims to be {length} bytes long (at most {limit})")
        start = self._skip(length, what)
        return self._decode(start, self.at)

    def _decode(self, start: int, end: int) -> str:
        try:
            return self.buffer[start:end].decode()
        except UnicodeDecodeError:
            raise self._corrupt(f"the text at byte {start} is not UTF-8") from None

    def _value(self, kind: int, key: str, depth: int) -> Any:
        if kind == _STRING:
            return self._string(f"the value of {key!r}")
        if kind == _ARRAY:
            return self._array(key, depth)
        return self._numbers(kind, 1, key)[0]

    def _array(self, key: str, depth: int) -> list[Any]:
        kind, count = self._number("<I"), self._number("<Q")
        if count > _MAX_ARRAY or depth > 3:
            raise self._corrupt(f"the list {key!r} claims {count} entries at depth {depth}")
        if kind == _STRING:
            return self._strings(count, key)
        if kind == _ARRAY:
            if count * 12 > self.end - self.at:
                raise self._corrupt(f"the list {key!r} claims {count} lists", truncated=True)
            return [self._array(key, depth + 1) for _ in range(count)]
        return self._numbers(kind, count, key)

    def _numbers(self, kind: int, count: int, key: str) -> list[Any]:
        if kind not in _SCALARS:
            raise self._corrupt(f"the metadata entry {key!r} is of unknown type {kind}")
        dtype = np.dtype(_SCALARS[kind])
        start = self._skip(count * dtype.itemsize, f"the value of {key!r}")
        values = np.frombuffer(self.buffer, dtype, count, start)
        return (values != 0 if kind == _BOOL else values).tolist()

    def _strings(self, count: int, key: str) -> list[str]:
        """Return a list of strings: the vocabulary and the merges, 100k of them, so this one loop must be tight."""
        length_at: Callable[[mmap.mmap, int], tuple[int]] = struct.Struct("<Q").unpack_from  # type: ignore[assignment]
        buffer, at, end = self.buffer, self.at, self.end
        if count * 8 > end - at:
            raise self._corrupt(f"the list {key!r} claims {count} strings", truncated=True)
        out = []
        try:
            for _ in range(count):
                start = at + 8
                at = start + length_at(buffer, at)[0]
                if at > end:
                    break
                out.append(buffer[start:at].decode())
        except UnicodeDecodeError:
            raise self._corrupt(f"entry {len(out)} of {key!r} is not UTF-8") from None
        except struct.error:
            at = end + 1
        if at > end:
            raise self._corrupt(f"entry {len(out)} of {key!r} runs past the end ({end} bytes)", truncated=True)
        self.at = at
        return out

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], BlockType, int]:
        """Read name, shape in torch's order, type, and offset within the data."""
        name = self._string("a tensor name", _MAX_KEY)
        n_dims = self._number("<I")
        if not 1 <= n_dims <= _MAX_DIMS:
            raise self._corrupt(f"the tensor {name!r} has {n_dims} dimensions")
        shape = tuple(self._number("<Q") for _ in range(n_dims))[::-1]
        type_id, offset = self._number("<I"), self._number("<Q")
        kind = _BY_ID.get(type_id)
        if kind is None:
            found = _UNSUPPORTED.get(type_id, f"number {type_id}")
            raise ValueError(
                f"{self.path}: the tensor {name!r} is of unsupported type {found}; "
                f"take a file quantized to one of {', '.join(BLOCK_TYPES)}"
            )
        if 0 in shape:
            raise self._corrupt(f"the tensor {name!r} has the empty shape {list(shape)}")
        if shape[-1] % kind.block:
            raise self._corrupt(
                f"rows of {shape[-1]} values of {name!r} are not whole {kind.name} blocks of {kind.block}"
            )
        return name, shape, kind, offset

    def _map_tensors(
        self, listed: list[tuple[str, tuple[int, ...], BlockType, int]], alignment: Any
    ) -> dict[str, QuantizedTensor]:
        if not isinstance(alignment, int) or alignment <= 0 or alignment % 8:
            raise self._corrupt(f"general.alignment is {alignment!r}, not a positive multiple of 8")
        data = -(-self.at // alignment) * alignment
        tensors: dict[str, QuantizedTensor] = {}
        spans = []
        for name, shape, kind, offset in listed:
            if name in tensors:
                raise self._corrupt(f"the tensor {name!r} is listed twice")
            n_rows, row_bytes = math.prod(shape[:-1]), kind.row_bytes(shape[-1])
            start, nbytes = data + offset, n_rows * row_bytes
            if offset % alignment:
                raise self._corrupt(f"the tensor {name!r} is not aligned to {alignment} bytes")
            if start + nbytes > self.end:
                raise self._corrupt(
                    f"the tensor {name!r} ends at byte {start + nbytes}, the file at {self.end}", truncated=True
                )
            blocks = np.frombuffer(self.buffer, np.uint8, nbytes, start).reshape(n_rows, row_bytes)
            tensors[name] = QuantizedTensor(kind.name, shape, blocks)
            spans.append((start, start + nbytes, name))
        spans.sort()
        for (_, end, name), (start, _, other) in pairwise(spans):
            if start < end:
                raise self._corrupt(f"the tensors {name!r} and {other!r} overlap")
        return tensors
