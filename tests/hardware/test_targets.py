"""Targets: their limits, and a GPU that acts as another one."""

import pytest
import torch

from transect.hardware import device
from transect.hardware.targets import (
    NVIDIA_TARGETS,
    PROCESSOR,
    RELATIVES,
    SETTING,
    TARGETS,
    act_as,
    acted_target,
    compiled_as,
    target_named,
)

GPU = torch.device("cuda", 0)


def test_abilities_follow_the_capability() -> None:
    having = {
        "fp8_products": {"sm_89", "sm_90", "sm_100", "sm_120"},
        "dependent_launch": {"sm_90", "sm_100", "sm_120"},
        "bulk_copies": {"sm_90", "sm_100"},
        "large_blocks": {"sm_80", "sm_90", "sm_100"},
        "hopper": {"sm_90"},
        "nvidia": set(NVIDIA_TARGETS),
    }
    for ability, names in having.items():
        assert {name for name, target in TARGETS.items() if getattr(target, ability)} == names, ability
        assert not getattr(PROCESSOR, ability)


def test_stages_fit_a_block() -> None:
    """Of a loop's stages all but one are in shared memory."""
    assert TARGETS["sm_89"].stages(4, 48 * 1024) == 3
    assert TARGETS["sm_90"].stages(4, 48 * 1024) == 4
    assert TARGETS["sm_89"].stages(4, 99 * 1024) == 2


def test_relatives_have_the_limits_of_another_target() -> None:
    for name, like in RELATIVES.items():
        target = target_named(name)
        assert (target.name, target.block_bytes) == (name, TARGETS[like].block_bytes)
        assert target.capability == divmod(int(name[3:]), 10) and compiled_as(name) == like
    assert compiled_as("sm_89") == "sm_89"
    with pytest.raises(ValueError, match=r"no target 'sm_20'; there are: sm_80"):
        target_named("sm_20")


def test_a_gpu_acts_as_an_older_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SETTING, raising=False)
    monkeypatch.setattr(device, "own_target", lambda _: TARGETS["sm_90"])
    assert acted_target() is None and device.target_of(GPU).hopper
    monkeypatch.setenv(SETTING, "")  # restored at the end, whatever act_as writes
    act_as("sm_89")
    assert device.target_of(GPU) is device.target_of() is TARGETS["sm_89"]
    assert device.target_of(torch.device("cpu")) is PROCESSOR
    act_as("sm_89")
    with pytest.raises(ValueError, match="acts as sm_89 already"):
        act_as("sm_80")
    with pytest.raises(ValueError, match="can act as sm_80, sm_86, sm_89, not as sm_120"):
        act_as("sm_120")
