"""Memory that is aligned, buffers in turn, files past the page cache."""

import os

import pytest
import torch

from transect.hardware.direct_file import PART_BYTES, DirectFile
from transect.hardware.host_memory import ALIGNMENT, Ring, aligned, host_memory, host_tensor


@pytest.fixture
def numbers():
    """Bytes in three parts, the last one short."""
    memory = host_memory(2 * PART_BYTES + ALIGNMENT, threads=2)
    memory.view(torch.int64).copy_(torch.arange(memory.nbytes // 8))
    return memory


def test_memory_is_aligned_zero_and_of_the_size_that_was_asked_for():
    for nbytes in (1, ALIGNMENT, ALIGNMENT + 1, 3 * 2**20 + 5):
        memory = host_memory(nbytes, threads=2)
        assert memory.data_ptr() % ALIGNMENT == 0 and memory.shape == (nbytes,) and not memory.any()
    assert host_memory(0).numel() == 0 and aligned(1) == ALIGNMENT and aligned(ALIGNMENT) == ALIGNMENT
    made = host_tensor((3, 5), torch.bfloat16)
    assert made.shape == (3, 5) and made.dtype == torch.bfloat16


def test_more_memory_than_there_can_be_is_refused():
    with pytest.raises(ValueError, match="offload less"):
        host_memory(2**60)


def test_a_ring_gives_its_buffers_in_turn():
    ring = Ring(3, 1000, pin=False)
    taken = [ring.take() for _ in range(4)]
    assert taken[3] is taken[0] and len({id(slot) for slot in taken}) == 3
    assert all(slot.memory.data_ptr() % ALIGNMENT == 0 and slot.memory.nbytes == 1000 for slot in taken)
    assert taken[0].view(7, torch.float32).shape == (7,)


def test_what_is_written_is_read_back(tmp_path, numbers):
    file = DirectFile(tmp_path / "states", 2 * numbers.nbytes, threads=3)
    file.write(numbers.nbytes, numbers).wait()
    file.flush()
    assert file.nbytes == 2 * numbers.nbytes == (tmp_path / "states").stat().st_size
    found = host_memory(numbers.nbytes)
    file.read(numbers.nbytes, found).wait()
    assert torch.equal(found, numbers)
    file.read(0, found).wait()
    assert not found.any()
    file.close()
    again = DirectFile(tmp_path / "states")
    again.read(numbers.nbytes, found).wait()
    assert torch.equal(found, numbers)
    again.close()


def test_what_cannot_be_read_or_written_is_said(tmp_path, numbers):
    with pytest.raises(ValueError, match="cannot be opened: No such file"):
        DirectFile(tmp_path / "none")
    with pytest.raises(ValueError, match="cannot be made: No such file"):
        DirectFile(tmp_path / "none" / "states", 4096)
    file = DirectFile(tmp_path / "short", ALIGNMENT)
    with pytest.raises(ValueError, match=r"reading .*short failed: it ends before byte"):
        file.read(0, numbers).wait()
    if file.direct:
        with pytest.raises(ValueError, match="multiples of 4096"):
            file.read(512, numbers)
        with pytest.raises(ValueError, match="multiples of 4096"):
            file.write(0, numbers[1:])
    with pytest.raises(ValueError, match="contiguous memory"):
        file.write(0, numbers.view(2, -1).t())
    file.close()


def test_a_file_system_without_direct_access_goes_through_the_page_cache(tmp_path, numbers, monkeypatch):
    real = os.open

    def without(path, flags, *rest, **named):
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", without)
    file = DirectFile(tmp_path / "states", numbers.nbytes)
    assert not file.direct
    file.write(0, numbers).wait()
    found = torch.empty(numbers.nbytes, dtype=torch.uint8)
    file.read(0, found).wait()
    assert torch.equal(found, numbers)
    file.close()
