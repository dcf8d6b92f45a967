"""The rates that bound every operator on a device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Upper bounds of one device, measured or published.

    Attributes:
        device: name of the device, with the number of threads for a processor.
        read_bytes_per_second: streaming read of memory much larger than the caches.
        copy_bytes_per_second: bytes read plus bytes written of a large copy.
        flops_per_second: rate of matrix products, by dtype name (``float32``, ``tf32``, ``bfloat16``, ``float16``,
            ``float8_e4m3fn``), where a multiply-add counts as two. ``float32`` is without the rounding to tf32.
        launch_seconds: host time to start one small eager operation, back to back; None where not known.
        host_to_device_bytes_per_second: from pinned host memory; None on a processor, or where not known.
        device_to_host_bytes_per_second: into pinned host memory.
        memory_bytes: size of the device's memory; None where not known.
        update_bytes_per_second: bytes read plus bytes written where numbers are changed in place, on a processor faster
            than a copy; None where not measured.
    """

    device: str
    read_bytes_per_second: float
    copy_bytes_per_second: float
    flops_per_second: Mapping[str, float]
    launch_seconds: float | None = None
    host_to_device_bytes_per_second: float | None = None
    device_to_host_bytes_per_second: float | None = None
    memory_bytes: int | None = None
    update_bytes_per_second: float | None = None

    def rate(self, dtype: str) -> float:
        """Return the FLOP/s of matrix products on numbers of ``dtype``: a processor that multiplies floats faster than
        halves can turn halves into floats.

        Raises:
            ValueError: no rate is known for ``dtype``.
        """
        if dtype not in self.flops_per_second:
            raise ValueError(
                f"no rate is known for {dtype} on {self.device}; known are: {', '.join(self.flops_per_second)}"
            )
        return max(self.flops_per_second[dtype], self.flops_per_second.get("float32", 0.0))
