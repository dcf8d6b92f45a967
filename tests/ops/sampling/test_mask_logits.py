"""Masks of grammars, and what they say of the logits that they mask."""

import pytest
import torch

from transect.ops.lang.jit import INTERPRETED
from transect.ops.sampling.mask_logits import _inputs, reference, triton_mask

pytestmark = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="needs Triton's interpreter or a GPU"
)
DEVICE = "cpu" if INTERPRETED else "cuda"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_sound_or_not_before_they_are_masked(dtype):
    """NaN and infinity count also where the mask hides them; a row of -inf alone is not sound, masked or not."""
    logits = torch.randn(6, 700, device=DEVICE, dtype=dtype)
    given = _inputs(logits, 3, 0)
    given["index"] = torch.tensor([0, 1, 2, -1, -1, 0], dtype=torch.int32, device=DEVICE)
    logits[1, 650], logits[2, 3], logits[3], logits[4, 5] = torch.nan, torch.inf, -torch.inf, torch.nan
    given["mask"][0] = 0  # nothing is allowed, and the row is sound all the same
    found, wanted = (torch.zeros(6, dtype=torch.bool, device=DEVICE) for _ in range(2))
    ours, theirs = logits.clone(), logits.clone()
    triton_mask(ours, given["mask"], given["index"], found)
    reference(theirs, given["mask"], given["index"], wanted)
    assert found.tolist() == wanted.tolist() == [True, False, False, False, False, True]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    triton_mask(again := logits.clone(), given["mask"], given["index"])
    torch.testing.assert_close(again, ours, rtol=0, atol=0, equal_nan=True)
