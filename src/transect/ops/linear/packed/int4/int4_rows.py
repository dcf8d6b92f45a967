"""``int4_matmul.cu`` for Python: its tilings, and the call. bfloat16, Hopper, a few rows of X.

A block takes ``per`` sixteens of rows of W and all of K. Where a weight has too few rows for all multiprocessors, a
cluster of ``ranks`` blocks shares K. Fewer and wider shares of rows mean that X is read less often. The head of
``int4_matmul.cu`` says what a block does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from ....lang.cuda import bind
from ....lang.jit import multiprocessors
from ....tuning import choose
from ...few_rows.cuda import Beside
from .int4_packing import CHUNK, group_of, is_arranged

SHARED = 227 * 1024
"""Bytes of shared memory of a block."""
BESIDE = 113 * 1024
"""Shared memory of a block with which a block of the next launch still fits on the multiprocessor."""
BESIDE_ROWS = 16
"""Up to this many rows of X at a time, a block's registers leave that room too."""
ROWS = (8, 16, 32)
"""The compiled numbers of rows of X at a time. More rows are possible; W is then read again."""
COLUMNS = 2
"""Groups of 16 rows of W for a warp at a time; one more where it has 16 rows of X (``RowsTiling.columns``)."""
MOST_STAGES = 40
CHOICES = {
    "warps": (4, 6, 8, 12),
    "teams": (1, 2, 3, 4),
    "ranks": (1, 2, 4, 8),
    "blocks": (1, 2),
    "late": (1, 2, 3, 4, 5, 6, 7, 8),
    "whole": (False, True),
    "columns": (COLUMNS, COLUMNS + 1),
}
"""Knobs to tune: the most warps of a team; ``teams`` and ``ranks`` of ``RowsTiling``; how many blocks share a
multiprocessor; how many quarters of a ring of stages before its end a block lets the next launch begin; ``whole`` and
``columns`` of ``RowsTiling``."""


@dataclass(frozen=True, slots=True)
class RowsTiling:
    """The tiling of ``int4_matmul.cu``; the fields are arguments of its launcher, in this order."""

    rows: int
    """Rows of X at a time."""
    warps: int
    """Warps of a team, which share the rows of W."""
    teams: int
    """Teams share K: of t teams each takes every t-th span of 128 k."""
    stages: int
    """Stages of each team's ring, 128 k each."""
    per: int
    """Groups of 16 rows of W for a block."""
    ranks: int
    """Blocks of a cluster that share K."""
    late: int
    """The next launch may begin when this many stages or fewer remain to be requested."""
    whole: bool = False
    """X as whole numbers of 16 bits; for 8 rows at a time."""
    columns: int = COLUMNS
    """Groups of 16 rows of W for a warp at a time; ``COLUMNS`` + 1 for 16 rows of X and groups of 128."""
    gated: bool = False
    """Groups of 16 rows of W are gate and up in turn; each warp holds both, so the gate is in the epilogue."""

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers that the launcher takes."""
        return (self.rows, self.warps, self.teams, self.stages, self.per, self.ranks, self.late, int(self.whole),
                self.columns, int(self.gated))  # fmt: skip


MOST_GATED = 8
"""Warps of a block with the gate in its epilogue."""


def most_warps(group: int, columns: int = COLUMNS) -> int:
    """Return the most warps that multiply in a block."""
    return 12 if group == 128 and columns == COLUMNS else 6


def tiles_at_once(tiling: RowsTiling) -> int:
    """Return the groups of 16 rows of W that a block works on at a time: its share in equal passes."""
    passes = -(-tiling.per // (tiling.warps * tiling.columns))
    return -(-tiling.per // passes)


def shared_bytes(tiling: RowsTiling, m: int, group: int) -> int:
    """Return the shared memory of a block: barriers, the parts that the cluster's blocks send to be added, and the
    ring. At the end the teams reuse the ring's memory for their sums."""
    wide = tiles_at_once(tiling)
    held = tiling.rows if tiling.whole or tiling.rows == 16 else min(m, tiling.rows)
    known = 8 if tiling.whole else 4
    stage = wide * (1024 + CHUNK // group * 64) + held * 272 + CHUNK // group * tiling.rows * known
    sent = -(-wide // tiling.ranks) * tiling.ranks * tiling.rows * 64 if tiling.ranks > 1 else 0
    left = (tiling.teams - 1) * tiling.warps * tiling.columns * tiling.rows * 64
    return -(-(tiling.stages * 24 + 40) // 128) * 128 + sent + max(tiling.stages * stage, left)


def tiling_of(
    config: Mapping[str, Any], m: int, n: int, k: int, group: int, clusters: Mapping[int, int], *, gated: bool = False
) -> RowsTiling | None:
    """Return the tiling of a configuration (``CHOICES``) at a shape, with as many stages as fit; None if it makes no
    sense.

    ``clusters``: how many of each size there is room for, one block on a multiprocessor. ``gated``: with the gate in
    the epilogue, for which a warp needs whole pairs of sixteens and all of K.
    """
    rows = next((rows for rows in ROWS if m <= rows), ROWS[-1])
    ranks, teams, chunks, columns = config["ranks"], config["teams"], k // CHUNK, config["columns"]
    if columns > COLUMNS and (rows != 16 or group != 128):
        return None
    if config["warps"] * teams > most_warps(group, columns) or ranks * teams > chunks or not clusters.get(ranks):
        return None
    if (config["blocks"] > 1 and rows > BESIDE_ROWS) or (config["whole"] and rows > ROWS[0]):
        return None
    if gated and (rows > ROWS[0] or ranks > 1 or columns != COLUMNS or n % 32 or config["warps"] * teams > MOST_GATED):
        return None
    per = max(columns, -(-n // (16 * clusters[ranks] * config["blocks"])))
    if gated:  # whole pairs in a block, and in each of its passes
        passes = -(-per // (config["warps"] * columns))
        per = passes * 2 * -(-per // (2 * passes))
    wide = tiles_at_once(RowsTiling(rows, config["warps"], teams, teams, per, ranks, 0, columns=columns))
    if (ranks * teams > 1 and wide < per) or (gated and wide % 2):
        return None
    tiling = RowsTiling(rows, -(-wide // columns), teams, teams, per, ranks, 0, config["whole"], columns, gated)
    most = BESIDE if rows <= BESIDE_ROWS else SHARED
    wanted = max(teams, min(-(-per // wide) * -(-chunks // ranks), MOST_STAGES))
    fitting = [s for s in range(teams, wanted + 1, teams) if shared_bytes(replace(tiling, stages=s), m, group) <= most]
    if not fitting:
        return None
    stages = fitting[-1]
    return replace(tiling, stages=stages, late=config["late"] * stages // 4)


def rule(size: tuple[int, int, int]) -> Mapping[str, Any]:
    """Return the quickest tiling on an H200 for a weight ``[n, k]`` and ``m`` rows of X, as a rule (``size`` is m, n,
    k)."""
    m, n, k = size
    few, deep = m <= 8, k >= 8192
    plain = {"teams": 1, "blocks": 1, "late": 4, "whole": False, "columns": COLUMNS}
    if n >= 16384:
        one_pass = {"ranks": 2, "blocks": 2} if 8 < m <= BESIDE_ROWS else {"ranks": 1}
        return plain | {"warps": 8, "whole": few} | one_pass
    if not deep and n > 5760:  # more than 15 clusters of 8 blocks take at once
        return plain | {"warps": 8, "ranks": 4, "late": 1 if few else 3 if m <= BESIDE_ROWS else 4}
    if 8 < m <= BESIDE_ROWS and deep:
        return plain | {"warps": 6, "ranks": 8, "columns": COLUMNS + 1}
    late = 5 if few and deep else 2 if m <= BESIDE_ROWS else 4
    return plain | {"warps": 12, "ranks": 8, "whole": few, "late": late}


def choose_tiling(
    m: int, n: int, k: int, group: int, clusters: Mapping[int, int], config: Mapping[str, Any] | None = None
) -> RowsTiling:
    """Return the tiling of ``config``, or of ``rule``; where it does not fit the shape, of the first that does.

    Raises:
        ValueError: none fits.
    """
    wanted = config or rule((m, n, k))
    narrower = [dict(wanted) | {"ranks": ranks, "warps": warps, "teams": 1, "blocks": 1, "columns": COLUMNS}
                for ranks in (wanted["ranks"], 4, 2, 1) for warps in (12, 8, 6, 4)]  # fmt: skip
    for tried in (wanted, *narrower):
        tiling = tiling_of(tried, m, n, k, group, clusters)
        if tiling is not None:
            return tiling
    raise ValueError(f"int4_matmul.cu: no cut of {m} x {k} by {n} x {k} fits the shared memory; use the Triton kernel")


class Int4Tiling(Protocol):
    """The tiling of either kernel."""

    @property
    def numbers(self) -> tuple[int, ...]: ...


class Codes(ABC):
    """``int4_matmul`` by the CUDA C++ kernel ``source``; subclasses choose the tiling.

    Raises:
        Unavailable: no NVIDIA GPU, or no nvcc to build the kernels with.
    """

    def __init__(self, source: str, symbol: str, numbers: int, norms: str = "") -> None:
        """Bind the launcher. ``numbers``: the count of numbers in a tiling; ``norms``: the types of the launcher's
        arguments for norms, as letters of ``bind``."""
        self._source = f"{source}.cu"
        self._launch = bind(source, symbol, "ppppiiiil" + "i" * numbers + norms + "ip")
        self._no_norms = (0,) * len(norms)

    @abstractmethod
    def tiling(self, x: Tensor, n: int, group: int, config: Mapping[str, Any] | None = None) -> Int4Tiling:
        """Return the tiling for ``x`` and a weight of ``n`` rows: that of ``config``, else the tuned one, else the
        rule's."""

    def __call__(
        self, x: Tensor, weight: Tensor, n: int, bias: Tensor | None = None, *, dependent_launch: bool = False,
        config: Mapping[str, Any] | None = None,
    ) -> Tensor:  # fmt: skip
        """Compute ``int4_matmul.reference``.

        ``dependent_launch``: see ``small_matmul.CudaRows``. ``config``: a value for each of the kernel's ``CHOICES``,
        instead of the tuned ones.

        Raises:
            ValueError: see ``cuda_refusal``; or the configuration does not fit the shape.
            RuntimeError: the launch failed.
        """
        reason = cuda_refusal(x, weight, n, bias)
        if reason:
            raise ValueError(f"{self._source}: {reason}")
        if x.shape[0] == 0 or n == 0:
            return x.new_empty((x.shape[0], n))
        tiling = self.tiling(x, n, group_of(weight), config)
        out = x.new_empty((x.shape[0], n))
        self._run(tiling, x, weight, n, bias, out, dependent_launch)
        return out

    def _run(
        self, tiling: Int4Tiling, x: Tensor, weight: Tensor, n: int, bias: Tensor | None, out: Tensor,
        dependent_launch: bool, norms: Sequence[int | float] = (),
    ) -> None:  # fmt: skip
        m, k = x.shape
        code = self._launch(
            x.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr(), m, n, k,
            group_of(weight), x.stride(0), *tiling.numbers, *(norms or self._no_norms), 2 if dependent_launch else 1,
            torch.cuda.current_stream(x.device).cuda_stream,
        )  # fmt: skip
        if code:
            raise RuntimeError(f"{self._source}: the launch of {tiling} for {m} x {k} by {n} x {k} returned {code}")


class CudaCodes(Codes):
    """``int4_matmul`` by ``int4_matmul.cu``; raises the same errors as ``Codes``."""

    def __init__(self) -> None:
        super().__init__("int4_matmul", "transect_int4_matmul", 10, "pppppf")
        self._at_once = bind("int4_matmul", "transect_int4_clusters", "i")
        self._clusters: dict[int, int] = {}
        self._tilings: dict[tuple[int, int, int, int], RowsTiling] = {}
        self._gated: dict[tuple[int, int, int, int], RowsTiling | None] = {}

    def clusters(self, device: torch.device) -> Mapping[int, int]:
        """Return how many clusters of 1, 2, 4 and 8 blocks run at once. They are fewer than the multiprocessors divided
        by the size, because a cluster stays within one of the chip's parts: an H200 takes 15 clusters of 8."""
        if not self._clusters:
            found = {1: multiprocessors(device)} | {size: self._at_once(size) for size in (2, 4, 8)}
            if not found[2]:  # launches are skipped: see ``cuda.skipped``
                return found
            self._clusters = found
        return self._clusters

    def tiling(self, x: Tensor, n: int, group: int, config: Mapping[str, Any] | None = None) -> RowsTiling:
        """Return the tiling for ``x`` and a weight of ``n`` rows: that of ``config``, else the tuned one, else the
        rule's."""
        m, k = x.shape
        clusters = self.clusters(x.device)
        if config is not None:
            return choose_tiling(m, n, k, group, clusters, config)
        key = (m, n, k, group)
        if key not in self._tilings:
            tiling = choose_tiling(m, n, k, group, clusters, choose("int4_matmul.cu", (m, n, k), x.device, rule))
            if not self._clusters:
                return tiling
            self._tilings[key] = tiling
        return self._tilings[key]

    def gated(self, x: Tensor, weight: Tensor, n: int, *, dependent_launch: bool = False) -> Tensor | None:
        """Compute ``silu(gate) * up [M, N / 2]`` of a weight whose groups of 16 rows are gate and up alternately; None
        where the epilogue cannot do that: for more than 8 rows, and where it is faster for blocks to share K."""
        (m, k), group = x.shape, group_of(weight)
        if cuda_refusal(x, weight, n) is not None or self.gates(m, n, k, group, x.device) is None:
            return None
        if self.tiling(x, n, group).ranks > 1:
            return None
        return self.beside(x, weight, n, Beside(), gated=True, dependent_launch=dependent_launch)[0]

    def beside(
        self, x: Tensor, weight: Tensor, n: int, norm: Beside, bias: Tensor | None = None, *, gated: bool = False,
        dependent_launch: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
        """Return a product of up to 8 rows with a norm beside it: (result, scaled, squares). The last two are those of
        ``stream_products.Stream``, or None where the result is not added to a stream. ``gated``: see the method of that
        name.

        Raises:
            ValueError: the arguments do not fit, see ``cuda_refusal``, ``Beside.refusal`` and ``gated``.
            RuntimeError: the launch failed.
        """
        (m, k), group = x.shape, group_of(weight)
        tiling = self.gates(m, n, k, group, x.device) if gated else self.tiling(x, n, group)
        reason = cuda_refusal(x, weight, n, bias) or norm.refusal(x, n)
        if reason or tiling is None or m > ROWS[0]:
            raise ValueError(f"{self._source}: {reason or 'norms and gates are for up to 8 rows that no blocks share'}")
        out = x.new_empty((m, n // 2 if gated else n))
        scaled = squares = None
        if norm.residual is not None:
            scaled, squares = x.new_empty((m, n)), x.new_empty((m, n // 16), dtype=torch.float32)
        tensors = (norm.residual, norm.scale, scaled, squares, norm.squares)
        norms = (*(0 if t is None else t.data_ptr() for t in tensors), norm.eps)
        self._run(tiling, x, weight, n, bias, out, dependent_launch, norms)
        return out, scaled, squares

    def gates(self, m: int, n: int, k: int, group: int, device: torch.device) -> RowsTiling | None:
        """Return the tiling of a product of m rows with the gate in its epilogue; None where there is none."""
        clusters, key = self.clusters(device), (m, n, k, group)
        if key not in self._gated:
            config = dict(choose("int4_matmul.cu", (m, n, k), device, rule))
            config |= {"ranks": 1, "warps": min(config["warps"], MOST_GATED)}
            tiling = tiling_of(config, m, n, k, group, clusters, gated=True)
            if not self._clusters:  # launches are skipped: see ``cuda.skipped``
                return tiling
            self._gated[key] = tiling
        return self._gated[key]


def cuda_refusal(x: Tensor, weight: Tensor, n: int, bias: Tensor | None = None) -> str | None:
    """Return the reason why ``int4_matmul.cu`` and ``int4_matmul_hopper.cu`` do not take these arguments; None if they
    do."""
    if any(t is not None and t.dtype != torch.bfloat16 for t in (x, bias)):
        return "it computes in bfloat16"
    if not (weight.is_contiguous() and is_arranged(weight, n, x.shape[1])):
        return f"the weight must be what arrange of int4_packing.py gives for {n} rows of {x.shape[1]}"
    if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
        return "it reads 16 bytes of x at a time: the rows' stride and the address must be multiples of 16 bytes"
    return None
