"""The speeds that bound every operator on a device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Measured upper bounds of one device.

    Attributes:
        device: name of the device, with the number of threads for a processor.
        read_bytes_per_second: streaming read of memory much larger than the caches.
        copy_bytes_per_second: bytes read plus bytes written of a large copy.
        flops_per_second: by dtype name (``float32``, ``bfloat16``), a multiply-add counting as two.
    """

    device: str
    read_bytes_per_second: float
    copy_bytes_per_second: float
    flops_per_second: Mapping[str, float]

    def floor(self, flops: float, bytes_read: float, dtype: str) -> float:
        """Seconds needed at the least for this work: the larger of the time to compute and the time to read.

        Raises:
            ValueError: no rate is known for ``dtype``.
        """
        if dtype not in self.flops_per_second:
            raise ValueError(f"no rate was measured for {dtype}; known are: {', '.join(self.flops_per_second)}")
        return max(flops / self.flops_per_second[dtype], bytes_read / self.read_bytes_per_second)
