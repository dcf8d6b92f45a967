r"""Product of 17 to 256 rows with a weight on Hopper, bfloat16: bulk copies and wgmma (``small_matmul_hopper.cu``).

    Y = X W^T + b        or, with a gate,        Y = silu(X V^T) * (X U^T), where W is V above U

Shapes: x ``[M, K]``, weight ``[N, K]``, bias ``[N]``, result ``[M, N]`` (with a gate ``[M, N / 2]``, no bias).

Bound by bytes at 32 rows, and also by the tensor cores at 256: 2 M N K FLOPs against 2 N K bytes is M FLOPs a byte, and
an H200 does 180. In between, the limit is what each multiprocessor must take in: its share of W, and all of X for that
share. X comes from the L2 cache once for each tile of W's rows. This leads to the design:

* One warp does nothing but copy, with the bulk copy engine, into a ring of 100 to 220 KB, as far ahead as the ring has
  room.
* Tiles are as wide as the sums fit in registers, in widths that cut the models' weights into about 128 equal shares. X
  as the left operand of the tensor cores allows tiles of any multiple of 8 rows of W, such as 224 for 28672.
* W as the left operand takes exactly as many rows of X as there are: 32 for 32 rows, where the other way needs 64.
* Where a weight has too few tiles, several blocks share K. The blocks of a cluster add up their parts in each other's
  shared memory; blocks of the grid add them up in memory. The order is always that of k.
* The first copies of W start before the kernel that makes X has ended (``dependent_launch``).
* Copies of X end with its rows, because copies that reach past the end of a tensor are slow.
* The gate is applied to the sums in registers, because both halves of it are in one tile.

A row's result depends on the number of rows (``invariant.py`` gives the same bits in any batch). It is the
same in every run.

``choices.py`` says which tiling runs a size, as measured or by ``rule.py``. Times: ``docs/results/products.md``; what
was tried and lost: ``docs/lab-notes/few-row-products.md``.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from ...lang import cuda

MOST_ROWS = 256
CHUNK = 64
"""k that a copy brings of each row: 128 bytes."""
SHARED = 225 * 1024
"""Bytes of shared memory that a block's ring may take."""
MOST_STAGES = 16
FLAGS = 4096
"""Counters of a launcher: one for each block or tile of a launch that adds over memory."""
Compiled = tuple[int, int, int, int, int, int, int]
COMPILED: tuple[Compiled, ...] = (
    (1, 0, 32, 2, 1, 1, 2),
    (1, 0, 32, 1, 1, 1, 2),
    (1, 0, 32, 3, 1, 1, 1),
    (1, 0, 64, 1, 1, 1, 2),
    (1, 0, 64, 3, 1, 1, 1),
    (1, 0, 96, 1, 1, 1, 2),
    (1, 0, 128, 2, 1, 1, 1),
    (1, 0, 128, 3, 1, 1, 1),
    (1, 0, 128, 1, 2, 1, 1),
    (1, 0, 128, 1, 1, 1, 2),
    (1, 0, 192, 2, 1, 1, 1),
    (1, 0, 192, 1, 1, 1, 2),
    (1, 0, 160, 2, 1, 1, 1),
    (1, 0, 208, 2, 1, 2, 1),
    (0, 0, 96, 1, 1, 1, 2),
    (0, 0, 112, 1, 1, 1, 2),
    (0, 0, 128, 1, 1, 1, 2),
    (0, 0, 224, 2, 1, 1, 1),
    (0, 0, 224, 2, 1, 2, 1),
    (1, 1, 64, 1, 1, 1, 2),
    (1, 1, 128, 2, 1, 1, 1),
    (1, 1, 160, 2, 1, 1, 1),
    (1, 1, 208, 2, 1, 2, 1),
    (1, 1, 256, 2, 1, 2, 1),
    (0, 1, 48, 1, 1, 1, 2),
    (0, 1, 112, 1, 1, 1, 2),
    (0, 1, 128, 1, 1, 1, 2),
    (0, 1, 192, 1, 1, 1, 2),
    (0, 1, 224, 1, 1, 1, 2),
    (0, 1, 128, 2, 1, 1, 1),
    (0, 1, 192, 2, 1, 1, 1),
    (0, 1, 224, 2, 1, 1, 1),
    (0, 1, 224, 2, 1, 2, 1),
)
"""(swap, gated, right, groups, repeats, pair, blocks) that are compiled; see ``HopperTiling``."""
INVARIANT: tuple[Compiled, ...] = (
    (0, 0, 32, 1, 1, 1, 2),
    (0, 0, 48, 1, 1, 1, 2),
    (0, 0, 64, 1, 1, 1, 2),
    (0, 0, 64, 2, 1, 1, 2),
    (0, 0, 64, 2, 1, 2, 2),
    (0, 0, 64, 2, 1, 2, 1),
    (0, 0, 96, 2, 1, 2, 1),
    (0, 0, 128, 2, 1, 2, 1),
    (0, 0, 192, 2, 1, 2, 1),
    (1, 0, 256, 2, 1, 2, 1),
)
"""Further tilings, which are compiled for ``invariant.py``."""


@dataclass(frozen=True, slots=True)
class HopperTiling:
    """The tiling of ``small_matmul_hopper.cu``; the fields are the arguments of its launcher."""

    swap: int
    """1: W is the left operand of the tensor cores, whose tiles have 64 rows or a multiple; 0: X is."""
    gated: int
    """1: half of a tile's rows of W are of the gate, half of the other factor; the result is silu(one) times other."""
    right: int
    """Rows of the right operand in a tile: at least all those of X, or 48 to 224 of W."""
    groups: int
    """Warpgroups that multiply."""
    repeats: int
    """Blocks of 64 rows of the left operand for each of them."""
    pair: int
    """Blocks of a cluster that share the copies of the right operand."""
    blocks: int
    """Blocks that fit on a multiprocessor by their registers."""
    ranks: int
    """Blocks of a cluster (or, if negative, of the grid) that share the k of a tile; 0: see ``clusters``."""
    clusters: int
    """With ``ranks`` 0: how many clusters share the chunks of all tiles evenly, whatever tiles they are of."""
    stages: int
    """Buffers of the ring."""

    @property
    def compiled(self) -> Compiled:
        """The fields that are fixed at compile time."""
        return (self.swap, self.gated, self.right, self.groups, self.repeats, self.pair, self.blocks)

    @property
    def left(self) -> int:
        """Rows of the left operand in a tile of a block."""
        return 64 * self.groups * self.repeats

    @property
    def columns(self) -> int:
        """Columns of Y in a tile of a cluster."""
        columns = self.left * self.pair if self.swap else self.right
        return columns // 2 if self.gated else columns

    @property
    def most_rows(self) -> int:
        """The largest number of rows of X that it takes. Blocks of a pair fetch whole eights of them."""
        return self.right // (8 * self.pair) * 8 * self.pair if self.swap else self.left * self.pair

    @property
    def ring(self) -> int:
        """Bytes of the ring."""
        return self.stages * (self.left + self.right) * 2 * CHUNK

    def tiles(self, n: int) -> int:
        """Count the tiles for n columns of Y."""
        return -(-n // self.columns)

    def grid(self, n: int) -> int:
        """Count the blocks launched for n columns of Y."""
        return self.pair * (self.clusters if self.ranks == 0 else self.tiles(n) * abs(self.ranks))

    @property
    def ordered(self) -> bool:
        """True if a block can add parts of K in the order in which ranks would."""
        few = self.right <= 64 if self.groups == 1 else self.blocks == 1 and self.right <= 96
        return not self.swap and not self.gated and few

    @property
    def over_memory(self) -> bool:
        """True if blocks can only share a tile over memory: there are no registers for the other ways."""
        return not self.gated and self.groups * self.right >= 512

    def splits(self, n: int) -> bool:
        """Return True if blocks share the k of a tile: sums for n columns of Y are then added in another order."""
        return abs(self.ranks) > 1 or (self.ranks == 0 and self.tiles(n) % self.clusters != 0)

    def parts(self, n: int) -> int:
        """Count the floats that blocks exchange through memory."""
        alone = self.ranks > 0 or (self.ranks == 0 and self.tiles(n) % self.clusters == 0)
        return 0 if alone else self.grid(n) * self.left * self.right

    def refusal(
        self, m: int, n: int, k: int, bias: bool = False, kernels: Collection[Compiled] = COMPILED
    ) -> str | None:
        """Return the reason why this tiling does not take m rows, n columns of Y, K = k and perhaps a bias; None if it
        does. ``kernels``: the compiled ones."""
        chunks = -(-k // CHUNK)
        if self.compiled not in kernels:
            return f"no kernel {self.compiled} is compiled"
        if m > self.most_rows:
            return f"the tiling takes {self.most_rows} rows, not {m}"
        if not 2 <= self.stages <= MOST_STAGES or self.ring > SHARED:
            return f"its ring of {self.stages} stages has {self.ring} bytes, of {SHARED} that there are"
        if self.over_memory and self.ranks > -2:
            return "its tiles are shared over memory alone"
        if self.gated and (bias or self.ranks not in (0, 1)):
            return "with a gate it takes no bias, and no ranks"
        if self.ranks == 0 and not 1 <= self.clusters <= self.tiles(n) * chunks:
            return f"{self.clusters} clusters are too many or too few"
        if abs(self.ranks) > min(8 if self.ranks < 0 else 8 // self.pair, chunks):
            return f"{self.ranks} ranks are too many"
        if self.ranks > 1 and 4 * self.left * self.right > self.ring:
            return "its sums do not fit where its ring was"
        return None if not self.parts(n) or self.grid(n) <= FLAGS else "more blocks than counters"


def stages_of(compiled: Compiled, k: int, shared: int) -> int:
    """Return the stages of a kernel's ring for K = k in ``shared`` bytes."""
    tiling = HopperTiling(*compiled, 1, 0, 1)
    return min(MOST_STAGES, shared // tiling.ring, max(2, -(-k // CHUNK)))


def fitting(m: int, gated: bool, kernels: Collection[Compiled] = COMPILED) -> list[Compiled]:
    """List the kernels whose tiles are as high as m rows need."""
    heights = {kernel: HopperTiling(*kernel, 1, 0, 2).most_rows for kernel in kernels if kernel[1] == gated}
    right = sorted({height for kernel, height in heights.items() if kernel[0] and height >= m})
    # From 129 rows on the narrowest is not always quickest: a pair of blocks reads X half as often.
    high = set(right[:1] if m <= 128 else right[:2]) | ({128} if 64 < m <= 96 else set())
    left = {64 if m <= 64 else 128 if m <= 128 else 256}
    return [kernel for kernel, height in heights.items() if height in (high if kernel[0] else left)]


def candidates(
    m: int, n: int, k: int, *, gated: bool = False, units: int = 132, kernels: Collection[Compiled] = COMPILED
) -> list[HopperTiling]:
    """List the tilings worth measuring for m rows (17 to 256), n columns of Y and K = k on a GPU of ``units``
    multiprocessors."""
    found = []
    for compiled in fitting(m, gated, kernels):
        pair, blocks = compiled[5], compiled[6]
        for resident in (1, 2) if blocks == 2 else (1,):
            stages = stages_of(compiled, k, SHARED if resident == 1 else SHARED // 2 - 2048)
            slots = units // pair
            tiles = HopperTiling(*compiled, 1, 0, stages).tiles(n)
            even = {tiles // per for per in (1, 2, 3, 4, 8) if tiles % per == 0}
            streams = {slots, slots // 4 * 4, resident * slots} | {
                c for c in even if 0.7 * slots <= c <= resident * slots
            }
            for clusters in sorted(streams):
                found.append(HopperTiling(*compiled, 0, clusters, stages))
            for ranks in (1,) if gated else (1, 2, 3, 4, 6, 8, -2, -4, -8):
                if ranks == 1 or 0.6 * slots <= tiles * abs(ranks) <= 1.02 * resident * slots:
                    found.append(HopperTiling(*compiled, ranks, 0, stages))
    return [tiling for tiling in dict.fromkeys(found) if not tiling.refusal(m, n, k, kernels=kernels)]


def choose_tiling(m: int, n: int, k: int) -> HopperTiling:
    """Choose a tiling for an unmeasured product from its shape alone: W is the left operand, and enough ranks share
    K to fill about 130 blocks."""
    compiled = fitting(m, False)[0]
    stages = stages_of(compiled, k, SHARED)
    whole = HopperTiling(*compiled, 1, 0, stages)
    ranks = max(1, min(8 // whole.pair, 130 // (whole.tiles(n) * whole.pair), -(-k // CHUNK)))
    split = HopperTiling(*compiled, ranks, 0, stages)
    return whole if split.refusal(m, n, k) else split


def refusal(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> str | None:
    """Return the reason why this kernel does not take these arguments; None if it does."""
    if x.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16 or (bias is not None and bias.dtype != x.dtype):
        return "it computes in bfloat16"
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        return "x must be [M, K] and weight [N, K]"
    if any(t.stride(1) != 1 or t.stride(0) % 8 or t.data_ptr() % 16 for t in (x, weight)) or x.shape[1] % 8:
        return "its copies need K, the rows' strides and the addresses to be multiples of 16 bytes"
    if weight.shape[0] % 8 or not x.shape[1]:
        return "N must be a multiple of 8, and K must not be 0"
    return None if x.shape[0] <= MOST_ROWS else f"it takes up to {MOST_ROWS} rows"


class HopperRows:
    """``small_matmul(x, weight, bias=None, *, dependent_launch=False, tiling=None)`` by ``small_matmul_hopper.cu``, on
    one device.

    Launches share counters, so those of one instance must be on one stream.

    Raises:
        Unavailable: not a Hopper GPU, or no nvcc to build the kernels with.
        RuntimeError: made inside a CUDA graph capture.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._launch = cuda.bind_on_hopper(
            "small_matmul_hopper", "transect_small_matmul_hopper", "ppppppiiill" + "i" * 13 + "p", device
        )
        self._flags = torch.zeros(FLAGS, dtype=torch.int32, device=device or "cuda")

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        dependent_launch: bool = False,
        tiling: HopperTiling | None = None,
        order: int = 1,
        keep: bool = False,
    ) -> Tensor:
        """Multiply x ``[M, K]`` by weight ``[N, K]`` and add bias ``[N]``: ``[M, N]``.

        ``order``: with one rank, parts of K that a block sums apart and adds in order (``tiling.ordered``); 0: clusters
        without ranks take whole tiles. ``keep``: the L2 cache keeps W like other data, instead of dropping it first.

        With ``tiling.gated`` the result is ``[M, N / 2]``, see ``gate_up.py``.

        ``dependent_launch``: W may be read before the kernel before this one on the stream has ended, so that one must
        not write W.

        Raises:
            ValueError: see ``refusal``; or the tiling does not take this number of rows, or a bias.
            RuntimeError: the launch failed.
        """
        (m, k), n = x.shape, weight.shape[0]
        tiling = tiling or choose_tiling(m, n, k)
        columns = n // 2 if tiling.gated else n
        out = x.new_empty((m, columns))
        if m == 0 or n == 0:
            return out
        floats = tiling.parts(columns) if order else 0
        parts = x.new_empty(floats, dtype=torch.float32) if floats else None
        code = self._launch(
            x.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr(),
            0 if parts is None else parts.data_ptr(), self._flags.data_ptr(), m, columns, k, x.stride(0),
            weight.stride(0), tiling.swap, tiling.gated, tiling.right, tiling.groups, tiling.repeats, tiling.pair,
            tiling.blocks, tiling.ranks, tiling.clusters, order, tiling.stages, 2 if dependent_launch else 1,
            int(keep), torch.cuda.current_stream(x.device).cuda_stream,
        )  # fmt: skip
        if code:
            reason = refusal(x, weight, bias)
            reason = reason or tiling.refusal(m, columns, k, bias is not None, (*COMPILED, *INVARIANT))
            if reason:
                raise ValueError(f"small_matmul_hopper.cu: {reason}")
            raise RuntimeError(
                f"small_matmul_hopper.cu: the launch of {tiling} for {m} x {k} by {n} x {k} returned {code}"
            )
        return out
