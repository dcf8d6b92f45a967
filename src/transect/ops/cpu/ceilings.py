"""The ceilings of a device as every command knows them: on a processor with the rate of float32 multiply-adds.

torch's matrix product does not use every instruction that a processor has; what the C++ kernels can reach is above.
"""

from __future__ import annotations

import torch

from ...hardware.cpu import best_seconds
from ...hardware.device import Device
from ...hardware.measured import Measurement, measurement
from ..registry import Unavailable
from .build import library_path
from .library import Library, load

FMA_ROUNDS = 2_000_000


def multiply_adds(library: Library) -> float:
    """Measure the FLOP/s of float32 multiply-adds on registers alone, by the library's team of threads."""
    return library.fma_probe(FMA_ROUNDS) / best_seconds(lambda: library.fma_probe(FMA_ROUNDS))


def device_measurement(device: Device, *, again: bool = False, build: bool = True) -> Measurement:
    """Return the ceilings of ``device`` from the user's cache, or measure (seconds) and keep them.

    Args:
        device: of a processor, with torch's number of threads at this moment.
        again: measure in any case.
        build: compile the C++ kernels if they are not, for the rate of multiply-adds.
    """
    if device.kind != "cpu":
        return measurement(device, again=again)
    try:
        if not build:
            library_path(build=False)
        library = load(torch.get_num_threads())
    except Unavailable:
        return measurement(device, again=again)
    return measurement(device, again=again, multiply_adds=lambda: multiply_adds(library))
