"""The account of a training step's GPU, from records that are written down here."""

import pytest

from benchmarks.train.step_trace import account


def test_every_millisecond_has_one_place():
    records = [
        (0, 10, "spin_kernel"), (50, 100, "product"), (80, 120, "ncclKernel"), (200, 300, "norm"),
        (500, 510, "spin_kernel"), (550, 600, "product"), (600, 700, "Memcpy PtoP"),
    ]  # fmt: skip
    found = account(records)
    steps = 2
    assert found["computing_ms"] == pytest.approx((50 + 100 + 50) / 1e3 / steps)
    assert found["communication_ms"] == pytest.approx((40 + 100) / 1e3 / steps)
    assert found["exposed_ms"] == pytest.approx((20 + 100) / 1e3 / steps)
    assert found["begin_ms"] == pytest.approx((40 + 40) / 1e3 / steps)
    assert found["idle_ms"] == pytest.approx((40 + 80 + 40) / 1e3 / steps)
    assert found["end_ms"] == pytest.approx(0.2)
    assert found["kernels"]["product"] == [0.05, 1.0] and "spin_kernel" not in found["kernels"]
    assert found["gaps"][0][1:] == ["norm", "spin_kernel"]
    assert account([])["computing_ms"] == 0
