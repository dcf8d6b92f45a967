"""Divide a product into tiles: the knobs of the kernels in ``matmul.py``, a rule for them, and their tuning."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ....hardware.device import target_of
from ...lang.jit import INTERPRETED, multiprocessors
from ...registry import Knobs
from ...tuning import Config
from ...tuning import choose as tuned


@dataclass(frozen=True, slots=True)
class ManyRowsTiling:
    """The tiling of a product: the knobs of both kernels."""

    bm: int = 128
    bn: int = 128
    bk: int = 64
    group: int = 8
    warps: int = 8
    stages: int = 3
    persistent: bool = False
    halves: bool = False
    parts: int = 1
    """Parts of K that are summed apart and then added in order. K must be a multiple of ``parts * bk``."""


SMALL = ManyRowsTiling(bm=16, bn=16, bk=16, group=2, warps=1)
CHOICES = {
    "bm": (64, 128, 256),
    "bn": (64, 128, 256),
    "bk": (64, 128),
    "group": (4, 8, 16, 32),
    "warps": (4, 8),
    "stages": (3, 4, 5),
}
"""The knobs to tune for 16-bit products whose operands lie as ``[M, K]`` and ``[N, K]``, without a residual."""
Size = tuple[int, int, int]


def _rule(size: Size, gated: bool) -> dict[str, int]:
    """Choose the knobs for M, N, K on the current GPU. Measured on an H200; elsewhere an estimate from the same
    numbers."""
    m, n, _ = size
    hopper = target_of().bulk_copies
    # Bands of tiles about as high as the tiles in flight are wide: operands are then read from memory least often.
    group = 16 if m > 1024 else 8
    knobs = {"bm": 128, "bn": 128 if gated else 256, "bk": 64, "group": group, "warps": 8, "stages": 4 if hopper else 3}
    if m <= 64:
        knobs |= {"bm": 64 if m > 32 else 16, "bn": 64, "warps": 4}
    elif -(-m // knobs["bm"]) * -(-n // knobs["bn"]) < multiprocessors(torch.device("cuda")):
        knobs |= {"bn": 64, "warps": 8} if gated else {"bn": 128, "warps": 4}
    return knobs if hopper else knobs | {"bn": min(knobs["bn"], 64 if gated else 128), "warps": 4}


def rule(size: Size) -> Config:
    """Return the tiling rule without a gate."""
    return _rule(size, False)


def gated_rule(size: Size) -> Config:
    """Return the tiling rule with a gate, whose sums take as many registers again."""
    return _rule(size, True)


def tiling_of(config: Config) -> ManyRowsTiling:
    """Return the kernel and its tiling for a configuration: persistent where the current GPU has bulk copies."""
    persistent = target_of().bulk_copies
    return ManyRowsTiling(**config, persistent=persistent, halves=persistent and config["bn"] >= 256)


def choose(x: Tensor, weight: Tensor, gated: bool, residual: bool) -> ManyRowsTiling:
    """Return the tiling of a product on the device of ``x``: the tuned one if the operands have the layout it was tuned
    for."""
    m, k = x.shape
    if INTERPRETED:
        return SMALL
    if x.element_size() == 4:
        return ManyRowsTiling(bm=64 if m > 32 else 16, bn=64, bk=32, warps=4)
    size, by_rule = (m, weight.shape[0], k), gated_rule if gated else rule
    if residual or x.stride(1) != 1 or weight.stride(1) != 1:
        return tiling_of(by_rule(size))
    return tiling_of(tuned("matmul.gated" if gated else "matmul", size, x.device, by_rule))


CUBLAS_ROWS = 2048
"""The most rows that cuBLAS multiplies."""


def cublas_is_quicker(x: Tensor, weight: Tensor) -> bool:
    """Return True if cuBLAS is faster than the kernels here, for 16-bit operands ``[M, K]`` and ``[N, K]`` on Hopper.

    Of 48 such products of 272 to 1024 rows on an H200 it was quicker than the tiling by the rule in 45, by 2 to 49%
    (``benchmarks/ops/products_by_shape.py``). At 8192 rows both take as long: 12 prompts of 12,000 tokens took 3.57 s
    with cuBLAS and 3.56 without (Qwen2.5-7B's shape), so our kernels run there.
    """
    if x.device.type != "cuda" or torch.version.hip is not None or x.element_size() != 2 or len(x) > CUBLAS_ROWS:
        return False
    return x.stride(1) == weight.stride(1) == 1 and target_of(x.device).hopper


HOPPER_ROOM = 225 * 1024
BUSY = 0.86
"""Share of the last wave of tiles, and of their rows, that must be at work for one launch with the gate inside."""


def leaves_idle(m: int, n: int, device: torch.device) -> bool:
    """Return True if tiles of 128 x 128 with a gate leave so much of the device idle that cuBLAS with a separate launch
    for the gate is faster: M rows, N columns of the result."""
    units, high = multiprocessors(device), -(-m // 128)
    tiles = high * -(-n // 128)
    waves = -(-tiles // units)
    return tiles / (waves * units) * m / (128 * high) < BUSY


def _size(inputs: Mapping[str, Any]) -> Size:
    return (*inputs["x"].shape[:1], *inputs["weight"].shape)


def _tunable(inputs: Mapping[str, Any], gated: bool) -> bool:
    x, weight = inputs["x"], inputs["weight"]
    plain = x.element_size() == 2 and x.stride(1) == weight.stride(1) == 1 and inputs.get("residual") is None
    return plain and ("gate" in inputs) == gated


def _valid(config: Mapping[str, Any], size: Size, gated: bool) -> bool:
    """Return True if a tiling fits into a multiprocessor and keeps it busy.

    That means 64 to 128 sums a thread, and all stages and the result in a block's shared memory.
    """
    bm, bn = config["bm"], config["bn"] * (2 if gated else 1)
    target = target_of()
    room, held, result = HOPPER_ROOM, config["stages"], bm * config["bn"] * (1 if config["bn"] >= 256 else 2)
    if target.nvidia and not target.bulk_copies:  # one stage less is held, and the result takes their place
        room, held, result = target.block_bytes, config["stages"] - 1, 0
    staged = held * (bm + bn) * config["bk"] * 2
    sums = bm * bn / (32 * config["warps"])
    return 64 <= sums <= 128 and staged + result <= room and bm <= 2 * size[0] and config["bn"] <= 2 * size[1]


def knobs(launch: Callable[..., Tensor], gated: bool) -> Knobs:
    """Return the knobs for ``transect tune`` of a launcher that takes ``matmul``'s arguments and ``tiling``."""

    def run(config: Config, **inputs: Any) -> Tensor:
        return launch(**inputs, tiling=tiling_of(config))

    return Knobs(
        "matmul.gated" if gated else "matmul",
        CHOICES,
        gated_rule if gated else rule,
        run,
        dict,
        _size,
        functools.partial(_valid, gated=gated),
        functools.partial(_tunable, gated=gated),
    )
