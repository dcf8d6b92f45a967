"""Which kernel multiplies many rows."""

import pytest
import torch

from transect.hardware.targets import TARGETS
from transect.ops.linear.many_rows import tiling
from transect.ops.linear.many_rows.tiling import cublas_is_quicker, leaves_idle

H200 = torch.device("cuda", 0)


class _OnHopper:
    """What is asked of a tensor on a GPU."""

    device = H200

    def __init__(self, *shape: int, dtype: torch.dtype = torch.bfloat16, turned: bool = False) -> None:
        made = torch.empty(*shape, dtype=dtype, device="meta")
        self._made = made.T if turned else made

    def __len__(self) -> int:
        return len(self._made)

    def element_size(self) -> int:
        return self._made.element_size()

    def stride(self, dim: int) -> int:
        return self._made.stride(dim)


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transect.hardware.device.own_target", lambda device: TARGETS["sm_90"])
    monkeypatch.setattr(tiling, "multiprocessors", lambda device: 132)


def test_cublas_multiplies_what_lies_in_rows_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = _OnHopper(300, 64), _OnHopper(128, 64)
    assert cublas_is_quicker(x, weight)
    assert not cublas_is_quicker(_OnHopper(8192, 64), weight)
    assert not cublas_is_quicker(x, _OnHopper(64, 128, turned=True))
    assert not cublas_is_quicker(_OnHopper(300, 64, dtype=torch.float32), _OnHopper(128, 64, dtype=torch.float32))
    assert not cublas_is_quicker(torch.empty(300, 64, dtype=torch.bfloat16), torch.empty(128, 64, dtype=torch.bfloat16))
    monkeypatch.setattr("transect.hardware.device.own_target", lambda device: TARGETS["sm_80"])
    assert not cublas_is_quicker(x, weight)


@pytest.mark.parametrize(
    ("m", "n", "idle"),
    [
        (272, 14336, True),
        (384, 14336, True),
        (1024, 14336, False),
        (512, 18944, False),
        (320, 18944, True),
        (8192, 18944, False),
    ],
)
def test_a_gate_has_its_own_launch_where_tiles_leave_the_device_idle(m: int, n: int, idle: bool) -> None:
    """The rule says what was quicker on an H200."""
    assert leaves_idle(m, n, H200) == idle
