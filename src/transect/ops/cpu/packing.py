"""Weights into the layout of ``linear.h``, and packed models kept on disk so that the next start maps them.

A packed file is a JSON header (name -> kind, n, k, offset, size) behind a magic number and the header's length, then
the matrices, each at a multiple of 64 bytes.
"""

from __future__ import annotations

import json
import mmap
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ...formats.affine import AffineGroups
from ...formats.ggml_blocks import QuantizedTensor
from .library import Kind, Library, PackedWeight

MAGIC = b"TRNSPK01"
ALIGNMENT = 64


def pack(library: Library, weight: Tensor | QuantizedTensor) -> PackedWeight:
    """A matrix [n, k], dense or as GGUF blocks, packed without loss (16-bit floats other than bf16 become float32)."""
    if isinstance(weight, Tensor):
        kind, data = library.pack_dense(weight)
        return PackedWeight(kind, weight.shape[0], weight.shape[1], data)
    if not weight.is_packed:
        return pack(library, torch.from_numpy(weight.dequantize()))
    return pack_groups(library, weight.affine())


def pack_groups(library: Library, groups: AffineGroups) -> PackedWeight:
    """A matrix of integer codes in groups, packed without loss."""
    kind = _kind(groups)
    codes, scale, zero = (torch.from_numpy(np.ascontiguousarray(a)) for a in (groups.codes, groups.scale, groups.zero))
    return PackedWeight(kind, *groups.shape, library.pack_affine(kind, codes, scale, zero))


def _kind(groups: AffineGroups) -> Kind:
    if groups.group == 16:
        return Kind.Q8_FLOAT_G16
    half = groups.half_exact and all(
        np.array_equal(a.astype(np.float16).astype(np.float32), a) for a in (groups.scale, groups.zero)
    )
    if groups.bits == 4:
        return Kind.Q4_HALF if half else Kind.Q4_FLOAT
    return Kind.Q8_HALF if half else Kind.Q8_FLOAT


def write_packed(path: Path, weights: Mapping[str, PackedWeight]) -> None:
    """Keep packed matrices in ``path``: written beside it, then moved there, so that readers see all or nothing."""
    header: dict[str, dict[str, int]] = {}
    offset = 0
    for name, weight in weights.items():
        size = weight.data.numel()
        header[name] = {"kind": int(weight.kind), "n": weight.n, "k": weight.k, "offset": offset, "size": size}
        offset = _aligned(offset + size)
    text = json.dumps(header).encode()
    start = _aligned(len(MAGIC) + 8 + len(text))
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".partial")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(MAGIC + len(text).to_bytes(8, "little") + text)
            for name, weight in weights.items():
                file.seek(start + header[name]["offset"])
                file.write(weight.data.numpy().data)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def read_packed(path: Path, expected: Iterable[str]) -> dict[str, PackedWeight] | None:
    """The matrices in ``path``, memory-mapped; None if there is no such file or it does not hold just these names."""
    try:
        with open(path, "rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError):
        return None
    begin = len(MAGIC) + 8
    end = begin + int.from_bytes(mapped[len(MAGIC) : begin], "little")
    if mapped[: len(MAGIC)] != MAGIC or end > len(mapped):
        return None
    try:
        header = json.loads(mapped[begin:end])
    except ValueError:
        return None
    start = _aligned(end)
    if set(header) != set(expected) or any(start + e["offset"] + e["size"] > len(mapped) for e in header.values()):
        return None
    whole = torch.frombuffer(mapped, dtype=torch.uint8)
    return {
        name: PackedWeight(
            Kind(entry["kind"]), entry["n"], entry["k"], whole[start + entry["offset"] :][: entry["size"]]
        )
        for name, entry in header.items()
    }


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT
