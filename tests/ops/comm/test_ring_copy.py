"""Rows of a ring in turn, to a place and from there; on a GPU in a graph, with the ring in the host's memory."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from transect.ops.comm.ring_copy import reference, triton_ring_copy
from transect.ops.lang.jit import INTERPRETED, has_dependent_launch

pytestmark = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="needs the interpreter or a GPU"
)
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")


@pytest.mark.parametrize("count", [0, 1, 300, 2000])
@pytest.mark.parametrize("copy", [reference, triton_ring_copy])
def test_rows_take_turns(copy, count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    ring = torch.randint(0, 99, (3, 2000), generator=generator).to(DEVICE)
    back = torch.full((3, 2000), -1, device=DEVICE)
    buffer = torch.full((count + 1,), -1, device=DEVICE)
    turn = torch.tensor([1], dtype=torch.int32, device=DEVICE)
    for row in (1, 2, 0, 1):
        copy(ring, buffer[:count], turn)
        assert turn.item() == row and torch.equal(buffer[:count], ring[row, :count]) and buffer[count] == -1
        copy(buffer[:count], back, turn, advance=True)
        assert turn.item() == (row + 1) % 3
    assert torch.equal(back[:, :count], ring[:, :count]) and bool((back[:, count:] == -1).all())


def test_what_does_not_fit_is_said() -> None:
    ring, vector = torch.zeros(3, 8, device=DEVICE), torch.zeros(9, device=DEVICE)
    turn = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match="at most n elements"):
        triton_ring_copy(ring, vector, turn)
    with pytest.raises(ValueError, match="side by side"):
        triton_ring_copy(vector[::2], ring, turn)
    with pytest.raises(ValueError, match="turn must be int32"):
        triton_ring_copy(ring, vector[:8], turn.long())


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a CUDA GPU")
def test_replays_follow_what_the_host_writes() -> None:
    """Each replay takes the next row, with what the host has written there since, and its answer is in the next."""
    count, rows = 12_000, 3
    questions, answers = (torch.zeros((rows, count), dtype=torch.int64, pin_memory=True) for _ in range(2))
    buffer = torch.zeros(count, dtype=torch.int64, device=DEVICE)
    turn = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    dependent_launch = has_dependent_launch(DEVICE)
    stream = torch.cuda.Stream()

    def step() -> None:
        triton_ring_copy(questions, buffer, turn, dependent_launch=dependent_launch)
        buffer.mul_(2)
        triton_ring_copy(buffer, answers, turn, advance=True, dependent_launch=dependent_launch)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        step()
        stream.synchronize()
        graph.capture_begin()
        step()
        graph.capture_end()
        done: list[torch.cuda.Event | None] = [None] * rows
        for number in range(1, 200):
            row = number % rows
            event = done[row]
            if event is not None:
                event.synchronize()
                assert bool((answers[row] == 2 * (number - rows + torch.arange(count))).all()), number
            questions[row] = number + torch.arange(count)
            graph.replay()
            done[row] = torch.cuda.Event()
            done[row].record(stream)
    stream.synchronize()
