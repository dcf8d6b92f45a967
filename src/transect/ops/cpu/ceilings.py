"""The ceilings of this machine for the C++ kernels: memory bandwidth, and the rate of float32 multiply-adds."""

from __future__ import annotations

import torch

from ...hardware.ceilings import Ceilings
from ...hardware.cpu import best_seconds, memory_bandwidth, processor_name
from .library import Library

FMA_ROUNDS = 2_000_000


def measure(library: Library) -> Ceilings:
    """Measure with the library's team of threads. The float32 rate counts multiply-adds on registers alone."""
    before = torch.get_num_threads()
    torch.set_num_threads(library.threads)
    try:
        read, copy = memory_bandwidth()
    finally:
        torch.set_num_threads(before)
    flops = library.fma_probe(FMA_ROUNDS) / best_seconds(lambda: library.fma_probe(FMA_ROUNDS))
    name = f"{processor_name()}, {library.threads} threads, {library.isa}"
    return Ceilings(name, read, copy, {"float32": flops})
