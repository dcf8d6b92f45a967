"""The gate's kernel, in Triton's interpreter."""

import pytest
import torch

from transect.ops.activation import swiglu
from transect.ops.linear.gate_up import gate_halves


@pytest.mark.parametrize(("rows", "width", "turns"), [(1, 48, 16), (3, 160, 16), (2, 100, 0)])
def test_halves_one_after_the_other_or_in_turns(rows: int, width: int, turns: int) -> None:
    gate, up = torch.randn(2, rows, width)
    both = torch.cat((gate, up), -1)
    if turns:
        both = torch.stack((gate.unflatten(-1, (-1, turns)), up.unflatten(-1, (-1, turns))), 2).flatten(1)
    torch.testing.assert_close(gate_halves(both, turns=turns), swiglu.by_exp(gate, up))
