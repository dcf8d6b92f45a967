"""Counting drawn tokens in place, in the interpreter or on a GPU."""

import pytest
import torch

from transect.ops.lang.jit import INTERPRETED
from transect.ops.sampling.adjust_logits import IN_PROMPT, MOST, reference_count, triton_count

CUDA = torch.cuda.is_available()


@pytest.mark.skipif(not (CUDA or INTERPRETED), reason="needs a GPU or Triton's interpreter")
@pytest.mark.parametrize("rows", [1, 3, 300])
def test_the_kernel_counts_as_the_reference(rows):
    device = "cuda" if CUDA else "cpu"
    torch.manual_seed(rows)
    counts = torch.zeros((rows + 5, 17), dtype=torch.int16, device=device)
    counts[:, 3] = MOST
    counts[:, 4] = IN_PROMPT
    state = torch.randperm(rows + 5, device=device)[:rows].to(torch.int32)
    state[::4] = -1
    tokens = torch.randint(0, 17, (rows,), device=device)
    tokens[1 : 3 * (rows > 2) : 2] = 3
    expected = counts.clone()
    reference_count(expected, state, tokens)
    triton_count(counts, state, tokens)
    assert torch.equal(counts, expected)
    assert rows < 300 or not torch.equal(counts[:, 5:], torch.zeros_like(counts[:, 5:]))
