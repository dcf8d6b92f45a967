"""The file of packed weights is believed only where every byte is what was written. No kernels are needed for that."""

import os
from pathlib import Path

import pytest
import torch

from transect.ops.cpu import packing
from transect.ops.cpu.library import Kind, PackedWeight


@pytest.fixture
def weights():
    generator = torch.Generator().manual_seed(1)
    sizes = {"a": 1000, "b": 64, "c": 333}
    return {
        name: PackedWeight(Kind.Q4_HALF, 16, 32, torch.randint(256, (size,), dtype=torch.uint8, generator=generator))
        for name, size in sizes.items()
    }


@pytest.fixture
def path(tmp_path, weights):
    path = tmp_path / "packed" / "model.pack"
    packing.write_packed(path, weights)
    assert packing.read_packed(path, weights) is not None
    return path


def test_no_changed_byte_is_read(path, weights):
    whole = path.read_bytes()
    padding = set(range(len(whole)))
    for name, found in packing.read_packed(path, weights).items():
        assert torch.equal(found.data, weights[name].data)
        start = whole.index(bytes(weights[name].data.tolist()))
        padding -= set(range(start, start + len(weights[name].data)))
    padding -= set(range(whole.rindex(b"}}") + 2))
    for at in range(0, len(whole), 7):
        changed = bytearray(whole)
        changed[at] ^= 0x40
        path.write_bytes(changed)
        assert (packing.read_packed(path, weights) is None) == (at not in padding), at


def test_no_shortened_or_exchanged_file_is_read(path, weights):
    whole = path.read_bytes()
    for length in (0, 4, 12, 20, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        assert packing.read_packed(path, weights) is None
    path.write_bytes(whole[:-64] + bytes(64))  # a page that was never written
    assert packing.read_packed(path, weights) is None
    path.write_bytes(whole)
    assert packing.read_packed(path, ["a", "b"]) is None
    assert packing.read_packed(path, weights) is not None


def test_the_bytes_are_on_the_disk_before_the_name_is(tmp_path, weights, monkeypatch):
    happened = []
    monkeypatch.setattr(
        os, "fsync", lambda handle: happened.append(Path(os.readlink(f"/proc/self/fd/{handle}")).suffix)
    )
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda *names: happened.append("replace") or replace(*names))
    packing.write_packed(tmp_path / "model.pack", weights)
    assert happened == [".partial", "replace", ""]
