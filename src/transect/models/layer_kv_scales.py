"""``KVScales``: keys and values of a layer in fp8, each head's divided by a number.

    k' = k / s        q' = q s        v' = v / u        out = u attention(q', k', v')

with s and u of a key head, and of the query heads that read it. What is cached in fp8 (e4m3) then fits below 448, and
small numbers keep their digits. Scales are rounded up to powers of two, so none of these products rounds anything: with
a cache in another dtype a model's results are the same.

Shapes: K key heads, H query heads, T tokens, d head size.
"""

from __future__ import annotations

import torch
from torch import Tensor


class KVScales:
    """The scales ``[2, K]`` of one layer, on the device and in the dtype of its keys.

    Attributes:
        keys, values: the powers of two, float32 ``[K]``.
    """

    def __init__(self, scales: Tensor, heads: int, device: torch.device, dtype: torch.dtype) -> None:
        keys, values = self.keys, self.values = powers_of_two(scales).contiguous()
        queries, self._out = (
            each.repeat_interleave(heads // len(each)).to(device, dtype)[:, None] for each in (keys, values)
        )
        keys, values = (each.reciprocal().to(device, dtype)[:, None] for each in (keys, values))
        self._apart = queries, keys, values
        self._joined = torch.cat(self._apart)

    def before(self, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Scale q, k and v for attention and the cache."""
        q, k, v = (x * factor for x, factor in zip((q_THd, k_TKd, v_TKd), self._apart, strict=True))
        return q, k, v

    def joined(self, qkv_TE: Tensor) -> Tensor:
        """Apply ``before`` to one projection ``[T, (H + 2 K) d]``; before or after the rotation, which is linear."""
        return (qkv_TE.unflatten(-1, (len(self._joined), -1)) * self._joined).flatten(-2)

    def norms(self, q_weight_d: Tensor, k_weight_d: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights ``[H, d]`` and ``[K, d]`` of norms that scale q and k as ``before`` does."""
        queries, keys, _ = self._apart
        return q_weight_d * queries, k_weight_d * keys

    def of_values(self, v_TKd: Tensor) -> Tensor:
        """Scale v as ``before`` does."""
        return v_TKd * self._apart[2]

    def after(self, out_THd: Tensor) -> Tensor:
        """Scale attention's output back to the true values."""
        return out_THd * self._out


def powers_of_two(scales: Tensor) -> Tensor:
    """Round each scale up to a power of two."""
    return torch.exp2(torch.ceil(torch.log2(scales.float())))
