"""Which tiling of ``small_matmul_hopper.cu`` runs a product that nobody measured: that of the least predicted time.

The time of a launch is that of its busiest multiprocessor, and no less than memory takes for the weight:

    time = START + max(weight / MEMORY, steps x step + tiles x END x sums) + meeting

A step is one chunk of 64 k of one tile. It takes what the multiprocessor needs to take in both operands' rows through
the L2 cache, or what its tensor cores need for them, whichever is more, and STEP besides; blocks that share a
multiprocessor share both. ``sums`` are those of a tile, which are stored at its end. ``meeting`` is for parts of a tile
that are added up over memory or over a cluster's shared memory. cuBLAS has a time by its shape as well, because it is
what runs otherwise.

The constants are fitted to 3,700 launches at 36 sizes of weights and 48 to 200 rows on an H200
(``benchmarks/products_by_shape.py``). What the rule takes was 1.9% slower than the quickest of each size on average.
"""

from __future__ import annotations

from functools import lru_cache

from .hopper import CHUNK, SHARED, HopperTiling, candidates

MEMORY, INTAKE, TENSOR = 3.83e12, 7.73e12, 7.23e14
"""Bytes of a weight a second; bytes that all multiprocessors take in; FLOP/s of all tensor cores."""
START, STEP = 2.9e-6, 37e-9
"""Seconds."""
END = 4.4e-12
"""Seconds for each float32 sum of a tile."""
STREAM, STREAM_SUM = 1.2e-6, 8.2e-11
"""Seconds for parts that blocks with even stretches leave in memory; for each sum of a further part, one after another.
"""
GRID_SUM = 1.2e-10
"""The same for parts of blocks of the grid, which each adds its share of."""
CLUSTER, CLUSTER_SUM = 2.4e-6, 5.9e-11
"""The same in a cluster's shared memory."""
CLUSTERED = 0.83
"""Share of the multiprocessors that clusters of three blocks and more find."""
CUBLAS_START, CUBLAS_STEP, CUBLAS_MEMORY, CUBLAS_TENSOR = 3.1e-6, 25.7e-9, 3.96e12, 8.7e14
GATE_START, GATE_BYTES = 1.5e-6, 3.5e12
MOST_PARTS = 4
"""Blocks of the grid that add over memory: what more take varies too much."""


def seconds(tiling: HopperTiling, m: int, n: int, k: int, units: int = 132) -> float:
    """Predicted time of a launch for m rows, n columns of Y and K = k, on a GPU of ``units`` multiprocessors."""
    chunks, tiles, blocks = -(-k // CHUNK), tiling.tiles(n), tiling.grid(n)
    resident = min(tiling.blocks, max(1, SHARED // (tiling.ring + 2048)))
    sums = tiling.left * tiling.right
    meeting = 0.0
    if tiling.ranks:
        found = units * (CLUSTERED if tiling.pair * tiling.ranks >= 3 else 1)
        waves = -(-blocks // int(found * resident))
        steps = -(-chunks // abs(tiling.ranks)) * waves
        if tiling.ranks > 1:
            meeting = CLUSTER + CLUSTER_SUM * sums
        elif tiling.ranks < 0:
            meeting = STREAM + GRID_SUM * sums
    else:
        waves = -(-tiles // tiling.clusters)
        steps = -(-tiles * chunks // tiling.clusters)
        if tiles % tiling.clusters:
            meeting = STREAM + STREAM_SUM * sums * -(-tiling.clusters // tiles)
    beside = min(resident, -(-blocks // units))  # blocks that share a multiprocessor
    left = tiling.left if tiling.swap else min(m, tiling.left)
    right = min(m, tiling.right) if tiling.swap else tiling.right
    intake = (left + right / tiling.pair) * 2 * CHUNK / INTAKE
    multiply = 2 * sums * CHUNK / TENSOR
    work = steps * (max(intake, multiply) * beside * units + STEP) + waves * END * sums
    weight = 2 * n * (2 if tiling.gated else 1) * k / MEMORY
    return START + max(weight, work) + meeting


def cublas_seconds(m: int, n: int, k: int) -> float:
    """Predicted time of cuBLAS for m rows, n columns of Y and K = k."""
    high = -(-m // 64) * 64
    long = CUBLAS_STEP * -(-k // CHUNK)
    return CUBLAS_START + long + max(2 * n * k / CUBLAS_MEMORY, 2 * high * n * k / CUBLAS_TENSOR)


def gate_seconds(m: int, columns: int) -> float:
    """Predicted time of the kernel that applies a gate to both halves of a product."""
    return GATE_START + 6 * m * columns / GATE_BYTES


@lru_cache(maxsize=4096)
def quickest(m: int, n: int, k: int, gated: bool, units: int = 132) -> HopperTiling | None:
    """The tiling with the least predicted time for m rows (17 to 256) by a weight of n x k; with a gate n is twice the
    columns. None: cuBLAS is quicker, or with a gate one launch for the product and one for the gate."""
    columns = n // 2 if gated else n
    tried = [each for each in candidates(m, columns, k, gated=gated, units=units) if each.ranks >= -MOST_PARTS]
    best = min(tried, key=lambda tiling: seconds(tiling, m, columns, k, units), default=None)
    if best is None:
        return None
    otherwise = cublas_seconds(m, n, k)
    if gated:
        apart = quickest(m, n, k, False, units)
        otherwise = min(otherwise, otherwise if apart is None else seconds(apart, m, n, k, units))
        otherwise += gate_seconds(m, columns)
    return best if seconds(best, m, columns, k, units) < otherwise else None
