r"""Product of 17 to 256 rows with a weight on Hopper, bfloat16: bulk copies and wgmma (``small_matmul_hopper.cu``).

    Y = X W^T + b        or, with a gate,        Y = silu(X V^T) * (X U^T), W being V above U

Shapes: x ``[M, K]``, weight ``[N, K]``, bias ``[N]``, result ``[M, N]`` (with a gate ``[M, N / 2]``, no bias).

For 32 rows the product is bound by reading W, for 256 by the tensor cores as well: 2 M N K FLOPs against 2 N K bytes is
M FLOPs a byte, of which an H200 does 180. In between it is bound by what every multiprocessor takes in, W's share and
all of X for it: X comes from the L2 cache once for each tile of W's rows. So

* a warp does nothing but copy, by the bulk copy engine, into a ring of 100 to 220 KB, as far ahead as that has room;
* tiles are as wide as the sums fit in registers, and of the widths that make 128 equal shares of the models' weights:
  X as the left operand of the tensor cores takes any multiple of 8 rows of W as a tile, 224 for 28672;
* W as the left operand takes the rows of X at their number, 32 for 32 rows, where the other way they are 64;
* where a weight has too few tiles, K is shared out: among the blocks of a cluster, which add over each other's shared
  memory, or over the grid, where each block adds a part of the tile from memory; always in the order of k;
* the first copies of W are asked for before the kernel that makes X has ended (``dependent_launch``);
* copies of X end with its rows: what reaches past the end of a tensor is slow, and so a tile for 128 rows takes less
  time with 96;
* the gate of a gated MLP is applied to the sums in registers, where both its halves are in one tile.

What a row gets depends on how many rows there are: for the same bits in any batch see ``linear.triton_fixed_rows``.
Bits are the same in every run.

Predicted for 128 rows and W of 28672 x 4096 before it was written: 55 us to read W, 59 to 60 with X arriving once for
each 224 rows of W. Measured on an H200: 64 when sums went to Y in pieces of 4 bytes, 60.2 by way of shared memory;
cuBLAS 66.0. With the gate 60.3, where cuBLAS and a kernel for the gate take 69.7. Reading the other ranks' sums sixteen
at a time instead of one after another was worth 1.7 to 2.3 us of each product whose K is shared out. Lost: multicast of
X to 2, 4 or 8 blocks (no less time, as what the multiprocessors take in stays the same), k in a rotated order, other
widths of prefetch to the L2 cache; without the hint that W is read once, 2 to 5% slower.

Which one runs, with which tiling, is measured where it runs, in a chain of whole layers, by
``benchmarks/products_in_layers.py``, for the heads and the other sizes by ``benchmarks/ops_many_rows.py``, and kept as
data for each device. Called by itself, without ``dependent_launch``, a launch may ask for no weights early; what is
quickest then is measured apart (``alone``). In a chain cuBLAS stays quicker, and runs, at 160 rows and more for most
weights of the 8B models (at 256 not for the output projections, nor for the gate and up projections of Llama-3.1-8B),
from 128 rows on for the heads, and for a few more below; the Triton kernels for most of Qwen3-0.6B's from 64 rows on.
Times are in ``results/h200/ops_many_rows.json``.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ...lang import cuda
from ...tuning import SHIPPED, file_name
from .cuda import CudaTiling
from .gluon import GluonTiling
from .triton import TritonTiling

log = logging.getLogger(__name__)

FOLDER = SHIPPED / "small_matmul"
"""One file for each device that was measured: which implementation, and how it cuts the product up."""
MOST_ROWS = 256
ROWS = (1, 8, 16, 32, 64, 96, 128, 160, 192, 256)
"""What rows are rounded up to when a choice is looked up."""
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
    (0, 0, 96, 1, 1, 1, 2),
    (0, 0, 112, 1, 1, 1, 2),
    (0, 0, 128, 1, 1, 1, 2),
    (0, 0, 224, 2, 1, 1, 1),
    (0, 0, 224, 2, 1, 2, 1),
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


@dataclass(frozen=True, slots=True)
class HopperTiling:
    """How ``small_matmul_hopper.cu`` cuts a product up; the fields are the arguments of its launcher."""

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
        """What is fixed when it is compiled."""
        return (self.swap, self.gated, self.right, self.groups, self.repeats, self.pair, self.blocks)

    @property
    def left(self) -> int:
        """Rows of the left operand in a tile of a block."""
        return 64 * self.groups * self.repeats

    @property
    def columns(self) -> int:
        """Columns of Y in a tile of a cluster."""
        return self.left * self.pair if self.swap else self.right // 2 if self.gated else self.right

    @property
    def most_rows(self) -> int:
        """Rows of X that it takes."""
        return self.right if self.swap else self.left * self.pair

    @property
    def ring(self) -> int:
        """Bytes of the ring."""
        return self.stages * (self.left + self.right) * 2 * CHUNK

    def tiles(self, n: int) -> int:
        """Tiles of n columns of Y."""
        return -(-n // self.columns)

    def grid(self, n: int) -> int:
        """Blocks launched for n columns of Y."""
        return self.pair * (self.clusters if self.ranks == 0 else self.tiles(n) * abs(self.ranks))

    def parts(self, n: int) -> int:
        """Floats that blocks leave for each other in memory."""
        alone = self.ranks > 0 or (self.ranks == 0 and self.tiles(n) % self.clusters == 0)
        return 0 if alone else self.grid(n) * self.left * self.right

    def refusal(self, m: int, n: int, k: int, bias: bool = False) -> str | None:
        """Why this tiling does not take m rows, n columns of Y, K = k and perhaps a bias, or None."""
        chunks = -(-k // CHUNK)
        if self.compiled not in COMPILED:
            return f"no kernel {self.compiled} is compiled"
        if m > self.most_rows:
            return f"the tiling takes {self.most_rows} rows, not {m}"
        if not 2 <= self.stages <= MOST_STAGES or self.ring > SHARED:
            return f"its ring of {self.stages} stages has {self.ring} bytes, of {SHARED} that there are"
        if self.gated and (bias or self.ranks not in (0, 1)):
            return "with a gate it takes no bias, and no ranks"
        if self.ranks == 0 and not 1 <= self.clusters <= self.tiles(n) * chunks:
            return f"{self.clusters} clusters are too many or too few"
        if abs(self.ranks) > min(8 if self.ranks < 0 else 8 // self.pair, chunks):
            return f"{self.ranks} ranks are too many"
        if self.ranks > 1 and 4 * self.left * self.right > self.ring:
            return "its sums do not fit where its ring was"
        return None if not self.parts(n) or self.grid(n) <= FLAGS else "more blocks than counters"


def _stages(compiled: Compiled, k: int, shared: int) -> int:
    tiling = HopperTiling(*compiled, 1, 0, 1)
    return min(MOST_STAGES, shared // tiling.ring, max(2, -(-k // CHUNK)))


def _fitting(m: int, gated: bool) -> list[Compiled]:
    """Kernels whose tiles are as high as m rows need."""
    heights = sorted(kernel[2] for kernel in COMPILED if kernel[0] and kernel[2] >= m)
    right = set(heights[:1]) | ({128} if 64 < m <= 96 else set())
    left = {64 if m <= 64 else 128 if m <= 128 else 256}
    fitting = []
    for kernel in COMPILED:
        most_rows = HopperTiling(*kernel, 1, 0, 2).most_rows
        if kernel[1] == gated and most_rows in (right if kernel[0] else left):
            fitting.append(kernel)
    return fitting


def candidates(m: int, n: int, k: int, *, gated: bool = False, units: int = 132) -> list[HopperTiling]:
    """Tilings worth measuring for m rows (17 to 256), n columns of Y and K = k on a GPU of ``units``
    multiprocessors."""
    found = []
    for compiled in _fitting(m, gated):
        pair, blocks = compiled[5], compiled[6]
        for resident in (1, 2) if blocks == 2 else (1,):
            stages = _stages(compiled, k, SHARED if resident == 1 else SHARED // 2 - 2048)
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
    return [tiling for tiling in dict.fromkeys(found) if not tiling.refusal(m, n, k)]


def choose_tiling(m: int, n: int, k: int) -> HopperTiling:
    """A tiling for a product that nobody measured: W is the left operand, and as many ranks share K as fill some 130
    blocks. By the shape alone."""
    compiled = _fitting(m, False)[0]
    stages = _stages(compiled, k, SHARED)
    whole = HopperTiling(*compiled, 1, 0, stages)
    ranks = max(1, min(8 // whole.pair, 130 // (whole.tiles(n) * whole.pair), -(-k // CHUNK)))
    split = HopperTiling(*compiled, ranks, 0, stages)
    return whole if split.refusal(m, n, k) else split


TILINGS: Mapping[str, type] = {
    "hopper": HopperTiling, "cuda": CudaTiling, "triton": TritonTiling, "gluon": GluonTiling
}  # fmt: skip
"""How each kernel cuts a product up, by its name in a ``Choice``."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Which kernel runs a product of a size, and how it cuts the product up."""

    by: str
    """``hopper``, ``cuda`` (``small_matmul.cu``), ``triton``, ``gluon``, or ``cublas``, which is
    ``torch.nn.functional.linear``."""
    tiling: Any = None
    """Of the class that ``TILINGS`` has for ``by``; None: as the kernel's own rule says."""

    def __post_init__(self) -> None:
        if self.tiling is not None and type(self.tiling) is not TILINGS.get(self.by):
            raise TypeError(f"{self.tiling} is no tiling of {self.by}")


def key(m: int, n: int, k: int, gated: bool = False, stream: bool = False, alone: bool = False) -> str:
    """The name of a size in a file of choices: rows rounded up to one of ``ROWS``, the weight's size as it is.
    ``stream``: for ``stream_products.py``. ``alone``: by itself, not in a chain of layers."""
    rows = next(rows for rows in ROWS if rows >= m)
    return f"{rows}x{n}x{k}{' gated' * gated}{' stream' * stream}{' alone' * alone}"


@cache
def choices(device_name: str) -> Mapping[str, Choice]:
    """The choices shipped for a device, by ``key``; none for a device that was not measured."""
    path = FOLDER / file_name(device_name)
    if not path.is_file():
        return {}
    found = json.loads(path.read_text())["choices"]
    return {size: read_choice(entry) for size, entry in found.items()}


def read_choice(entry: Mapping[str, Any]) -> Choice:
    """From its form in a file."""
    by, tiling = entry["by"], entry.get("tiling")
    return Choice(by, None if tiling is None else TILINGS[by](**tiling))


@cache
def chosen(
    m: int, n: int, k: int, device: torch.device, gated: bool = False, stream: bool = False, alone: bool = False
) -> Choice | None:
    """What was quickest for a product of m rows with a weight of n x k on this device; None where nobody measured.

    From 193 to 255 rows no tiling of ``small_matmul_hopper.cu``, but cuBLAS, whose time falls with the rows there.
    ``alone``: by itself; where no other is named for that, the one for a chain of layers.
    """
    if device.type != "cuda" or not 0 < m <= MOST_ROWS:
        return None
    known = choices(torch.cuda.get_device_name(device))

    def of(rows: int) -> Choice | None:
        in_layers = known.get(key(rows, n, k, gated, stream))
        return known.get(key(rows, n, k, gated, stream, alone), in_layers)

    found = of(m)
    if found is None and 64 < m <= 96:
        found = of(128)
    if 128 < m < MOST_ROWS and (found is None or (m > 192 and found.by == "hopper")):
        return Choice("cublas") if of(MOST_ROWS) is not None else None
    return found


def refusal(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> str | None:
    """Why this kernel does not take these arguments, or None."""
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
            "small_matmul_hopper", "transect_small_matmul_hopper", "ppppppiiill" + "i" * 11 + "p", device
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
    ) -> Tensor:
        """x ``[M, K]``, weight ``[N, K]``, bias ``[N]`` -> ``[M, N]``; with ``tiling.gated`` ``[M, N / 2]``, see
        ``gate_up.py``.

        ``dependent_launch``: W may be read before the kernel before this one on the stream has ended, so that one must
        not write W.

        Raises:
            ValueError: see ``refusal``; or the tiling does not take so many rows, or a bias.
            RuntimeError: the launch failed.
        """
        (m, k), n = x.shape, weight.shape[0]
        tiling = tiling or choose_tiling(m, n, k)
        columns = n // 2 if tiling.gated else n
        out = x.new_empty((m, columns))
        if m == 0 or n == 0:
            return out
        floats = tiling.parts(columns)
        parts = x.new_empty(floats, dtype=torch.float32) if floats else None
        code = self._launch(
            x.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr(),
            0 if parts is None else parts.data_ptr(), self._flags.data_ptr(), m, columns, k, x.stride(0),
            weight.stride(0), tiling.swap, tiling.gated, tiling.right, tiling.groups, tiling.repeats, tiling.pair,
            tiling.blocks, tiling.ranks, tiling.clusters, tiling.stages, 2 if dependent_launch else 1,
            torch.cuda.current_stream(x.device).cuda_stream,
        )  # fmt: skip
        if code:
            reason = refusal(x, weight, bias) or tiling.refusal(m, columns, k, bias is not None)
            if reason:
                raise ValueError(f"small_matmul_hopper.cu: {reason}")
            raise RuntimeError(
                f"small_matmul_hopper.cu: the launch of {tiling} for {m} x {k} by {n} x {k} returned {code}"
            )
        return out
