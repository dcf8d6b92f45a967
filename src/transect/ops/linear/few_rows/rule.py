"""Choose the tiling of ``small_matmul_hopper.cu`` for an unmeasured product: that of the least predicted time.

The time of a launch is that of its busiest multiprocessor, and no less than memory takes for the weight:

    time = START + max(weight / MEMORY, steps x step + tiles x END x sums) + meeting        (see ``Costs``)

A step is one chunk of 64 k of one tile. It takes what the multiprocessor needs to take in both operands' rows through
the L2 cache, or what its tensor cores need for them, whichever is more, and STEP besides; blocks that share a
multiprocessor share both. ``sums`` are those of a tile, which are stored at its end. ``meeting`` is for parts of a tile
that are added up over memory or over a cluster's shared memory. cuBLAS has a time by its shape as well, because it is
what runs otherwise.

The costs of bfloat16 are fitted to 3,700 launches at 36 sizes of weights and 48 to 200 rows on an H200
(``benchmarks/ops/products_by_shape.py``). What the rule takes was 1.9% slower than the quickest of each size on
average. Those of fp8 are fitted to 9,547 launches at 30 sizes and 32 to 256 rows: 2.9% slower. Those of fp8 with scales
of blocks are fitted to the matrices of one model, 32 to 256 rows; a step, which multiplies by scales, costs most. A
product in 8 bits is described as one in bfloat16 with half as many k, which takes as many chunks and instructions.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache

from .hopper import CHUNK, COMPILED, SHARED, Compiled, HopperTiling, candidates


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of the parts of a launch, in seconds unless stated otherwise."""

    memory: float
    """Bytes of a weight a second."""
    intake: float
    """Bytes that all multiprocessors read per second."""
    tensor: float
    """FLOP/s of all tensor cores, in bfloat16."""
    start: float
    step: float
    end: float
    """For each float32 sum of a tile."""
    stream: float
    stream_sum: float
    """For parts that blocks with even stretches leave in memory; for each sum of a further part, one after another."""
    grid: float
    grid_sum: float
    """The same for parts of blocks of the grid, which each adds its share of."""
    cluster: float
    cluster_sum: float
    """The same in a cluster's shared memory."""
    clustered: float
    """Share of the multiprocessors that clusters of three or more blocks can use."""
    same: float = 1.0
    """Fraction of the bytes of the shared operand that counts, if the blocks read the same k at a time, which the L2
    cache serves together."""
    apart: float = 1.0
    """The same if they read different k."""
    tail: float = 0.0
    """Share of the last wave's idle capacity that is lost for streaming the weight."""
    sharpness: float = math.inf
    """p of the transition between the two bounds, a weight's bytes and work: the time is (bytes^p + work^p)^(1/p)."""
    most_ranks: int = 8
    """Most blocks of a cluster that share k; the time of more varies too much."""


BF16 = Costs(3.83e12, 7.73e12, 7.23e14, 2.9e-6, 37e-9, 4.4e-12, 1.2e-6, 8.2e-11, 1.2e-6, 1.2e-10, 2.4e-6, 5.9e-11, 0.83)
FP8 = Costs(
    4.36e12, 1.06e13, 8.5e14, 2e-6, 41e-9, 1.6e-11, 2.7e-6, 8.1e-11, 1.9e-6, 1.5e-10, 1.8e-6, 4.1e-11, 0.67,
    same=0.6, apart=0.72, tail=0.38, sharpness=3, most_ranks=2,
)  # fmt: skip
FP8_BLOCKS = Costs(
    8.5e12, 5.6e12, 3.4e15, 1.1e-6, 131e-9, 1.6e-11, 1.94e-6, 5.2e-11, 1.43e-6, 1.5e-10, 1.08e-6, 5.1e-11, 0.32,
    same=0.96, apart=0.9, tail=0.23, sharpness=3, most_ranks=4,
)  # fmt: skip
CUBLAS_START, CUBLAS_STEP, CUBLAS_MEMORY, CUBLAS_TENSOR = 3.1e-6, 25.7e-9, 3.96e12, 8.7e14
GATE_START, GATE_BYTES = 1.5e-6, 3.5e12
MOST_PARTS = 4
"""Most blocks of the grid that add over memory; the time of more varies too much."""


def seconds(tiling: HopperTiling, m: int, n: int, k: int, units: int = 132, costs: Costs = BF16) -> float:
    """Predict the time of a launch for m rows, n columns of Y and K = k, on a GPU of ``units`` multiprocessors."""
    chunks, tiles, blocks = -(-k // CHUNK), tiling.tiles(n), tiling.grid(n)
    resident = min(tiling.blocks, max(1, SHARED // (tiling.ring + 2048)))
    sums = tiling.left * tiling.right
    meeting, full = 0.0, 1.0
    if tiling.ranks:
        slots = int(units * (costs.clustered if tiling.pair * tiling.ranks >= 3 else 1)) * resident
        waves = -(-blocks // slots)
        full = waves * slots / blocks if waves > 1 else 1.0
        steps = -(-chunks // abs(tiling.ranks)) * waves
        if tiling.ranks > 1:
            meeting = costs.cluster + costs.cluster_sum * sums
        elif tiling.ranks < 0:
            meeting = costs.grid + costs.grid_sum * sums
    else:
        waves = -(-tiles // tiling.clusters)
        steps = -(-tiles * chunks // tiling.clusters)
        if tiles % tiling.clusters:
            meeting = costs.stream + costs.stream_sum * sums * -(-tiling.clusters // tiles)
    beside = min(resident, -(-blocks // units))  # blocks that share a multiprocessor
    left = tiling.left if tiling.swap else min(m, tiling.left)
    right = min(m, tiling.right) if tiling.swap else tiling.right
    own, shared = (left, right / tiling.pair) if tiling.swap else (right / tiling.pair, left)
    shared *= costs.same if tiling.ranks > 0 else costs.apart
    intake = (own + shared) * 2 * CHUNK / costs.intake
    multiply = 2 * sums * CHUNK / costs.tensor
    work = steps * (max(intake, multiply) * beside * units + costs.step) + waves * costs.end * sums
    weight = 2 * n * (2 if tiling.gated else 1) * k / costs.memory * (1 + costs.tail * (full - 1))
    most = max(weight, work)
    least = min(weight, work) / most
    return costs.start + most * (1 + least**costs.sharpness) ** (1 / costs.sharpness) + meeting


def cublas_seconds(m: int, n: int, k: int) -> float:
    """Predict the time of cuBLAS for m rows, n columns of Y and K = k."""
    high = -(-m // 64) * 64
    long = CUBLAS_STEP * -(-k // CHUNK)
    return CUBLAS_START + long + max(2 * n * k / CUBLAS_MEMORY, 2 * high * n * k / CUBLAS_TENSOR)


def gate_seconds(m: int, columns: int) -> float:
    """Predict the time of the kernel that applies a gate to both halves of a product."""
    return GATE_START + 6 * m * columns / GATE_BYTES


@lru_cache(maxsize=4096)
def quickest(m: int, n: int, k: int, gated: bool, units: int = 132) -> HopperTiling | None:
    """Return the tiling with the least predicted time for m rows (17 to 256) by a weight of n x k.

    With a gate, n is twice the columns. None if cuBLAS is faster, or with a gate separate launches for product and
    gate.
    """
    columns = n // 2 if gated else n
    best = quickest_of(m, columns, k, gated, units)
    if best is None:
        return None
    otherwise = cublas_seconds(m, n, k)
    if gated:
        apart = quickest(m, n, k, False, units)
        otherwise = min(otherwise, otherwise if apart is None else seconds(apart, m, n, k, units))
        otherwise += gate_seconds(m, columns)
    return best if seconds(best, m, columns, k, units) < otherwise else None


def quickest_of(
    m: int,
    n: int,
    k: int,
    gated: bool,
    units: int = 132,
    costs: Costs = BF16,
    kernels: Collection[Compiled] = COMPILED,
    unsplit: bool = False,
) -> HopperTiling | None:
    """Return the tiling of least predicted time for n columns of Y; None if there is none. ``unsplit``: of those that
    do not split K."""
    tried = [
        tiling
        for tiling in candidates(m, n, k, gated=gated, units=units, kernels=kernels)
        if -MOST_PARTS <= tiling.ranks <= costs.most_ranks and not (unsplit and tiling.splits(n))
    ]
    return min(tried, key=lambda tiling: seconds(tiling, m, n, k, units, costs), default=None)
