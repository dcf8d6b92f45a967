"""What an engine on a GPU is made of."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from transect.engine import gpu_build
from transect.ops.opset import OpSet, resolve_ops


@pytest.mark.parametrize(
    ("capability", "deterministic", "early", "streams"),
    [
        ((9, 0), False, True, True),
        ((9, 0), True, True, False),
        ((9, 0), False, False, False),
        ((8, 0), False, True, False),
    ],
)
def test_norms_are_in_the_products_on_hopper_only_and_not_where_batches_may_change_nothing(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], deterministic: bool, early: bool, streams: bool
) -> None:
    def of_the_cpu(device: Any, backends: Any, *, batch_invariant: bool) -> OpSet:
        assert batch_invariant == deterministic
        return resolve_ops("cpu")

    monkeypatch.setattr(gpu_build, "resolve_ops", of_the_cpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    ops = gpu_build.gpu_ops(torch.device("cuda", 0), deterministic=deterministic, early=early)
    assert (ops.stream_products is not None) == streams
