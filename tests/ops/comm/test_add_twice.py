"""A sum in two places has the bits of torch's, also where one of them is a summand."""

import pytest
import torch

pytest.importorskip("triton")

from transect.ops.comm.add_twice import BLOCK, add_twice, triton_add_twice
from transect.ops.lang.jit import INTERPRETED

pytestmark = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="needs the interpreter or a GPU"
)
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")


@pytest.mark.parametrize("add", [add_twice, triton_add_twice])
@pytest.mark.parametrize("n", [0, 7, BLOCK + 3])
def test_both_places_have_the_sum(add, n):
    dtype = torch.float32 if INTERPRETED else torch.bfloat16  # the interpreter does not round to bfloat16
    a, b = (torch.randn(n, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype) for seed in (0, 1))
    expected, around = a + b, torch.full((n + 1,), 9.0, device=DEVICE, dtype=dtype)
    squares = torch.full((-(-n // BLOCK) + 1,), 3.0, device=DEVICE)
    add(a, b, a, around[:n], squares)
    assert torch.equal(a, expected) and torch.equal(around[:n], expected) and around[n] == 9
    assert squares[-1] == 3
    torch.testing.assert_close(squares[:-1].sum(), expected.float().square().sum())


def test_what_does_not_fit_is_said():
    a, b = torch.zeros(8, device=DEVICE), torch.zeros(9, device=DEVICE)
    for others in ((b, a, a), (a[::1].view(2, 4), a, a), (a.double().float(), a, b[::2])):
        with pytest.raises(ValueError, match="contiguous vectors"):
            triton_add_twice(a, *others)
    with pytest.raises(ValueError, match="one for each"):
        triton_add_twice(a, a.clone(), a.clone(), a.clone(), b[:0])
