"""Weights into the layout of ``kinds.h``, and packed models kept on disk so that the next start reads them.

A packed file is a JSON header (name -> kind, n, k, offset, size, CRC-32 of the bytes) after a magic number, the
header's length and its own CRC-32, then the matrices, each at a multiple of 64 bytes. What the kernels read they do not
check, so a file is used only if every sum is right: whatever happened to it, the matrices are packed again.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import tempfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ...formats.affine import AffineGroups
from ...formats.ggml_blocks import QuantizedTensor
from ...hardware.cores import usable_cores
from ...hardware.host_memory import free_memory, host_memory
from .library import Kind, Library, PackedWeight

MAGIC = b"TRNSPK03"
ALIGNMENT = 64
PREFIX = struct.Struct("<8sQI")
"""Magic number, length of the header, its CRC-32."""
SPARE = 1.5
"""Least free memory, in sizes of the file, for a packed model to be copied rather than mapped."""


def pack(library: Library, weight: Tensor | QuantizedTensor) -> PackedWeight:
    """Return a matrix [n, k], dense or as GGUF blocks, packed without loss (16-bit floats other than bf16 become
    float32)."""
    if isinstance(weight, Tensor):
        kind, data = library.pack_dense(weight)
        return PackedWeight(kind, weight.shape[0], weight.shape[1], data)
    if not weight.is_packed:
        return pack(library, torch.from_numpy(weight.dequantize()))
    if weight.type_name in Kind.__members__:
        return _pack_blocks(library, weight)
    return pack_groups(library, weight.affine())


def _pack_blocks(library: Library, weight: QuantizedTensor) -> PackedWeight:
    kind, (n, k) = Kind[weight.type_name], weight.shape
    codes, halves, steps = (None if a is None else torch.from_numpy(a) for a in weight.parts())
    assert codes is not None and halves is not None
    return PackedWeight(kind, n, k, library.pack_blocks(kind, codes, halves, steps))


def pack_groups(library: Library, groups: AffineGroups) -> PackedWeight:
    """Return a matrix of integer codes in groups, packed without loss."""
    kind = _kind(groups)
    codes, scale, zero = (torch.from_numpy(np.ascontiguousarray(a)) for a in (groups.codes, groups.scale, groups.zero))
    return PackedWeight(kind, *groups.shape, library.pack_affine(kind, codes, scale, zero))


def pack_fp8(library: Library, codes: Tensor, scale: Tensor) -> PackedWeight:
    """Return the bits of e4m3 [n, k] in any type of one byte, and a scale float32 for each 32 of a row [n, k / 32].

    Raises:
        ValueError: a scale of 256 or more, which the kernels' float32 cannot hold times 2^120.
    """
    if scale.numel() and float(scale.abs().max()) >= 256:
        raise ValueError(
            f"the C++ kernels take fp8 with scales below 256, and this matrix has {float(scale.abs().max()):g}; use "
            "native=False to run on plain torch"
        )
    data = library.pack_affine(Kind.FP8, codes.view(torch.uint8), scale, scale)
    n, k = codes.shape
    return PackedWeight(Kind.FP8, n, k, data)


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
    """Write packed matrices to ``path`` atomically: to a temporary file, flushed to the disk, then renamed."""
    header: dict[str, dict[str, int]] = {}
    sums = _sums([weight.data.numpy().data for weight in weights.values()])
    offset = 0
    for (name, weight), crc in zip(weights.items(), sums, strict=True):
        size = weight.data.numel()
        entry = {"kind": int(weight.kind), "n": weight.n, "k": weight.k, "offset": offset, "size": size, "crc": crc}
        header[name] = entry
        offset = _aligned(offset + size)
    text = json.dumps(header).encode()
    start = _aligned(PREFIX.size + len(text))
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".partial")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(PREFIX.pack(MAGIC, len(text), zlib.crc32(text)) + text)
            for name, weight in weights.items():
                file.seek(start + header[name]["offset"])
                file.write(weight.data.numpy().data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except BaseException:
        os.unlink(temporary)
        raise


def read_packed(path: Path, expected: Iterable[str]) -> dict[str, PackedWeight] | None:
    """Return the matrices in ``path``; None if there is no such file, it holds other names, or its bytes are damaged.

    They are read into huge pages: a decode step reads every weight once, and with pages of 4 KiB the look-up of
    addresses took a sixth of its time. Where memory is short they are mapped, so that the system can drop pages.
    """
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        return _read_packed(file, set(expected))
    finally:
        os.close(file)


def _read_packed(file: int, expected: set[str]) -> dict[str, PackedWeight] | None:
    size, prefix = os.fstat(file).st_size, os.pread(file, PREFIX.size, 0)
    if len(prefix) < PREFIX.size:
        return None
    magic, length, crc = PREFIX.unpack(prefix)
    end = PREFIX.size + length
    if magic != MAGIC or end > size:
        return None
    text = os.pread(file, length, PREFIX.size)
    if zlib.crc32(text) != crc:
        return None
    header, start = json.loads(text), _aligned(end)
    spans = [(entry["offset"], entry["offset"] + entry["size"]) for entry in header.values()]
    if set(header) != expected or any(start + last > size for _, last in spans):
        return None
    copied = free_memory() > SPARE * size
    if copied:
        whole = host_memory(max((last for _, last in spans), default=0))
    else:
        whole = torch.frombuffer(mmap.mmap(file, 0, access=mmap.ACCESS_COPY), dtype=torch.uint8)[start:]
    parts = [whole[first:last] for first, last in spans]

    def read(part: Tensor, first: int) -> int:
        """Read a matrix if it is not mapped, and return its CRC-32, or 0 if the file ended."""
        view, at = part.numpy().data, 0
        while copied and at < len(view):
            count = os.preadv(file, [view[at:]], start + first + at)
            if not count:
                return 0
            at += count
        return zlib.crc32(view)

    with ThreadPoolExecutor(usable_cores()) as pool:
        sums = list(pool.map(read, parts, [first for first, _ in spans]))
    if sums != [entry["crc"] for entry in header.values()]:
        return None
    return {
        name: PackedWeight(Kind(entry["kind"]), entry["n"], entry["k"], part)
        for (name, entry), part in zip(header.items(), parts, strict=True)
    }


def _sums(parts: Sequence[memoryview]) -> list[int]:
    """Compute the CRC-32 of each part, on all cores: zlib releases the interpreter lock."""
    with ThreadPoolExecutor(usable_cores()) as pool:
        return list(pool.map(zlib.crc32, parts))


def _sync_folder(folder: Path) -> None:
    """Let the disk know the names in a folder, too."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT
