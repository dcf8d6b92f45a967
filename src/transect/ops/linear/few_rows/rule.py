"""Which tiling of ``small_matmul_hopper.cu`` runs a product that nobody measured: that of the least predicted time.

The time of a launch is that of its busiest multiprocessor, and no less than memory takes for the weight:

    time = START + max(weight / MEMORY, steps x step) + END x sums + meeting

A step is one chunk of 64 k of one tile. It takes what the multiprocessor needs to take in both operands' rows through
the L2 cache, or what its tensor cores need for them, whichever is more; blocks that share a multiprocessor share both.
``meeting`` is for parts of a tile that are added up over memory or over a cluster's shared memory. cuBLAS has a time by
its shape as well, because it is what runs otherwise.

The constants are fitted to times of one H200 (``benchmarks/products_by_shape.py``); docs/results/products.md compares
what the rule takes with the quickest that was measured.
"""

from __future__ import annotations

from functools import lru_cache

from .hopper import CHUNK, HopperTiling, candidates

MEMORY = 4.2e12
"""Bytes of a weight that arrive in a second."""
INTAKE = 5.6e12
"""Bytes a second that all multiprocessors take in through the L2 cache."""
TENSOR = 7.4e14
"""FLOP/s of all tensor cores."""
START = 2.0e-6
END = 1.0e-11
"""Seconds for a float32 sum of a tile, until it is stored."""
OVER_MEMORY, OVER_CLUSTER = 2.0e-6, 1.0e-6
CUBLAS_START, CUBLAS_MEMORY, CUBLAS_TENSOR = 3.0e-6, 4.0e12, 6.8e14
GATE_START, GATE_BYTES = 1.5e-6, 3.5e12


def seconds(tiling: HopperTiling, m: int, n: int, k: int, units: int = 132) -> float:
    """Predicted time of a launch for m rows, n columns of Y and K = k, on a GPU of ``units`` multiprocessors."""
    chunks, tiles = -(-k // CHUNK), tiling.tiles(n)
    resident = min(tiling.blocks, max(1, (225 * 1024) // (tiling.ring + 2048)))
    blocks = tiling.grid(n)
    slots = units * resident
    if tiling.ranks:
        steps = -(-chunks // abs(tiling.ranks)) * -(-blocks // slots)
        meeting = 0.0 if tiling.ranks == 1 else OVER_CLUSTER if tiling.ranks > 0 else OVER_MEMORY
    else:
        steps = -(-tiles * chunks // tiling.clusters)
        meeting = 0.0 if tiles % tiling.clusters == 0 else OVER_MEMORY
    taking = min(resident, -(-blocks // units))  # blocks that share a multiprocessor
    right = min(m, tiling.right) if tiling.swap else tiling.right
    left = tiling.left if tiling.swap else min(m, tiling.left)
    intake = (left + right / tiling.pair) * 2 * CHUNK * taking / (INTAKE / units)
    multiply = 2 * tiling.left * tiling.right * CHUNK * taking / (TENSOR / units)
    work = steps * max(intake, multiply)
    weight = 2 * n * (2 if tiling.gated else 1) * k / MEMORY
    return START + max(weight, work) + END * tiling.left * tiling.right + meeting


def cublas_seconds(m: int, n: int, k: int) -> float:
    """Predicted time of cuBLAS for m rows, n columns of Y and K = k."""
    high = -(-m // 64) * 64
    return CUBLAS_START + max(2 * n * k / CUBLAS_MEMORY, 2 * high * n * k / CUBLAS_TENSOR)


def gate_seconds(m: int, columns: int) -> float:
    """Predicted time of the kernel that applies a gate to both halves of a product."""
    return GATE_START + 6 * m * columns / GATE_BYTES


@lru_cache(maxsize=4096)
def quickest(m: int, n: int, k: int, gated: bool, units: int = 132) -> HopperTiling | None:
    """The tiling with the least predicted time for m rows (17 to 256) by a weight of n x k; with a gate n is twice the
    columns. None: cuBLAS is quicker, or with a gate one launch for the product and one for the gate."""
    columns = n // 2 if gated else n
    tried = candidates(m, columns, k, gated=gated, units=units)
    best = min(tried, key=lambda tiling: seconds(tiling, m, columns, k, units), default=None)
    if best is None:
        return None
    otherwise = cublas_seconds(m, n, k)
    if gated:
        apart = quickest(m, n, k, False, units)
        otherwise = min(otherwise, otherwise if apart is None else seconds(apart, m, n, k, units))
        otherwise += gate_seconds(m, columns)
    return best if seconds(best, m, columns, k, units) < otherwise else None
