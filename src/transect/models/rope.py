"""The angles of rotary position embedding, and the ways to stretch them to longer contexts.

Plane i of a head of size d turns by ``position * f_i``, where ``f_i = theta ** (-2i / d)`` before scaling:

* linear: ``f_i / factor``.
* llama3: with wavelength ``w = 2 pi / f_i`` and the old context length L, planes that turn often (``L / w`` at least
  ``high_freq_factor``) stay, those that turn seldom (at most ``low_freq_factor``) are divided by ``factor``, and in
  between the frequency is blended linearly in ``L / w``.
* yarn: the same idea, blended linearly in i, between the planes that turn ``beta_fast`` and ``beta_slow`` times within
  L; cos and sin are multiplied by ``attention_factor`` (Peng et al. 2023, arXiv:2309.00071).
* factors: ``f_i / frequency_factors[i]``, as GGUF files spell llama3.

Angles are taken in float32, as the models were trained: at position 100,000 float32 already rounds an angle by some
thousandths of a radian, and a model expects the angles that it knows.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from ..spec.model import RopeConfig


def frequencies(config: RopeConfig, head_dim: int) -> Tensor:
    """Return the radians per position of each plane, ``[head_dim / 2]`` float32 on the CPU."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / config.theta**exponent
    if config.scaling == "none":
        return plain
    if config.scaling == "linear":
        return plain / config.factor
    if config.scaling == "factors":
        return plain / torch.tensor(config.frequency_factors, dtype=torch.float32)
    if config.scaling == "llama3":
        turns = config.original_max_position * plain / (2 * math.pi)
        keep = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    else:
        keep = 1 - _yarn_ramp(config, head_dim)
    keep = keep.clamp(0, 1)
    return keep * plain + (1 - keep) * plain / config.factor


def _yarn_ramp(config: RopeConfig, head_dim: int) -> Tensor:
    """Return the blend of each plane, unclamped: 0 at the plane that turns ``beta_fast`` times within the old context,
    1 at ``beta_slow``."""

    def plane(turns: float) -> float:
        length = config.original_max_position / (turns * 2 * math.pi)
        return head_dim * math.log(length) / (2 * math.log(config.theta))

    low, high = plane(config.beta_fast), plane(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    index = torch.arange(head_dim // 2, dtype=torch.float32)
    return (index - low) / ((high - low) or 0.001)


class Rope:
    """Cos and sin of every plane at given positions.

    Not a module and no buffer: frequencies stay float32 when the model is cast, and are right on a model that was built
    without memory (``device="meta"``) and filled later.
    """

    def __init__(self, config: RopeConfig, head_dim: int) -> None:
        self.attention_factor = config.attention_factor
        self.frequencies = frequencies(config, head_dim)

    def cos_sin(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """Compute cos and sin ``[T, head_dim / 2]`` float32 of positions ``[T]``, on their device."""
        if self.frequencies.device != positions_T.device:
            self.frequencies = self.frequencies.to(positions_T.device)
        angles = positions_T[:, None].float() * self.frequencies
        return angles.cos() * self.attention_factor, angles.sin() * self.attention_factor


def half_rotation_rows(heads: int, head_dim: int) -> np.ndarray:
    """Return, for each row in half-rotation order, the file's row that holds it, int64 [heads * head_dim]."""
    return np.arange(heads * head_dim).reshape(heads, head_dim // 2, 2).swapaxes(1, 2).reshape(-1)
