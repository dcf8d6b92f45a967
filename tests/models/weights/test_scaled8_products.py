"""The kernels made for products in 8 bits on a GPU; ``tests/ops/linear/packed/eight_bit`` tests their results."""

import pytest

from transect.hardware.targets import TARGETS
from transect.models.weights import kinds, scaled8


@pytest.fixture
def made(monkeypatch):
    """The names of the kernels that a Hopper GPU with a compiler would have got."""
    names = []
    monkeypatch.setattr("transect.hardware.device.own_target", lambda device: TARGETS["sm_90"])
    monkeypatch.setattr(scaled8.scaled8_rows, "CudaRows8", lambda device: names.append("rows") or "rows")
    monkeypatch.setattr(scaled8.scaled8_chain, "CudaChain", lambda device: names.append("chain") or "chain")
    return names


@pytest.mark.parametrize("format", ["fp8", "int8"])
def test_the_chain_is_compiled_for_weights_in_8_bits(made, format):
    kinds.kinds_for(format, "cuda", dependent_launch=True)
    assert made == ["rows", "chain"]


def test_without_dependent_launch_there_is_no_chain(made):
    kinds.kinds_for("fp8", "cuda")
    assert made == ["rows"]
