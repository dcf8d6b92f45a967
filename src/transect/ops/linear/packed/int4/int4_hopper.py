"""``int4_matmul_hopper.cu`` for Python: its tilings, and the call. bfloat16, Hopper.

A block takes ``per`` sixteens of rows of W and all of K. Where a weight has too few rows for all multiprocessors, a
cluster of ``ranks`` blocks shares K. Fewer and wider shares of rows mean that X is read less often. The head of
``int4_matmul_hopper.cu`` says what a block does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ....lang.jit import multiprocessors
from ....tuning import choose
from .int4_packing import CHUNK
from .int4_rows import BESIDE, MOST_STAGES, SHARED, Codes

KERNELS = {8: (1, 2, 4), 16: (1, 2, 4), 32: (1, 2), 64: (1, 2)}
"""``columns`` compiled for each ``rows`` of X at a time, for groups of 128; narrower groups lack 64 rows, and 4 columns
of 16 rows. It takes more rows, but reads W again for them."""
MOST_WARPS = {8: 16, 16: 16, 32: 8, 64: 8}
"""The most warps of a block; the registers of a kernel limit them."""
CHOICES = {
    "columns": (1, 2, 4),
    "warps": (1, 2, 3, 4, 6, 7, 8, 14, 16),
    "teams": (1, 2, 3, 4, 8, 16),
    "ranks": (1, 2, 4, 8),
    "blocks": (1, 2),
    "beside": (True, False),
}
"""The knobs to tune: those of ``Int4HopperTiling``, how many blocks share a multiprocessor, and whether one leaves room
for the next."""


@dataclass(frozen=True, slots=True)
class Int4HopperTiling:
    """The tiling of ``int4_matmul_hopper.cu``; the fields are arguments of its launcher, in this order."""

    rows: int
    """Rows of X at a time."""
    columns: int
    """Groups of 16 rows of W for a warp at a time."""
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

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers that the launcher takes."""
        return (self.rows, self.columns, self.warps, self.teams, self.stages, self.per, self.ranks)


def kernels(group: int) -> Mapping[int, tuple[int, ...]]:
    """Return the part of ``KERNELS`` for one group size."""
    return KERNELS if group == 128 else {8: (1, 2, 4), 16: (1, 2), 32: (1, 2)}


def rows_at_once(m: int, group: int) -> int:
    """Return the rows of X that a block takes at a time."""
    known = kernels(group)
    return next(rows for rows in known if m <= rows or rows == max(known))


def tiles_at_once(tiling: Int4HopperTiling) -> int:
    """Return the groups of 16 rows of W that a block works on at a time: its share in equal passes."""
    passes = -(-tiling.per // (tiling.warps * tiling.columns))
    return -(-tiling.per // passes)


def shared_bytes(tiling: Int4HopperTiling, m: int, group: int) -> int:
    """Return the shared memory of a block: the ring and its barriers; at the end the parts of Y reuse the ring's
    memory."""
    wide, sources = tiles_at_once(tiling), tiling.ranks * tiling.teams
    held = min(m, 8) if tiling.rows == 8 else tiling.rows
    stage = wide * (1024 + CHUNK // group * 64) + held * 272 + CHUNK // group * tiling.rows * 4
    parts = -(-wide // tiling.ranks) * sources * 16 * (tiling.rows + 2) * 4 if sources > 1 else 0
    return -(-tiling.stages * 24 // 128) * 128 + max(tiling.stages * stage, parts)


def tiling_of(
    config: Mapping[str, Any], m: int, n: int, k: int, group: int, clusters: Mapping[int, int]
) -> Int4HopperTiling | None:
    """Return the tiling of a configuration (``CHOICES``) at a shape, with as many stages as fit; None if it makes no
    sense.

    ``clusters``: how many of each size there is room for, one block on a multiprocessor.
    """
    rows, chunks = rows_at_once(m, group), k // CHUNK
    ranks, columns, warps, teams = (config[name] for name in ("ranks", "columns", "warps", "teams"))
    if columns not in kernels(group)[rows] or warps * teams > MOST_WARPS[rows] or ranks * teams > chunks:
        return None
    if not clusters.get(ranks):
        return None
    per = -(-n // (16 * clusters[ranks] * config["blocks"]))
    tiling = Int4HopperTiling(rows, columns, warps, teams, 1, per, ranks)
    wide = tiles_at_once(tiling)
    if wide < columns or (ranks * teams > 1 and wide < per):
        return None
    most = BESIDE if config["beside"] or config["blocks"] > 1 else SHARED
    wanted = -(-per // wide) * -(-chunks // ranks)
    fitting = [s for s in range(teams, max(min(wanted, MOST_STAGES), teams) + 1, teams)
               if shared_bytes(replace(tiling, stages=s), m, group) <= most]  # fmt: skip
    return replace(tiling, stages=fitting[-1]) if fitting else None


def rule(size: tuple[int, int, int]) -> Mapping[str, Any]:
    """Return the quickest tiling on an H200 for a weight ``[n, k]`` and ``m`` rows of X, as a rule (``size`` is m, n,
    k)."""
    m, n, _ = size
    shared = {"blocks": 1, "beside": True}
    if m > 16:
        return shared | {"columns": 2, "warps": 8, "teams": 1, "ranks": 1 if n >= 16384 else 8}
    if n >= 65536:
        return shared | {"columns": 4, "warps": 8, "teams": 1, "ranks": 1, "blocks": 2}
    if n >= 16384:
        return shared | {"columns": 2, "warps": 7, "teams": 2, "ranks": 1}
    return shared | {"columns": 2, "warps": 8, "teams": 2, "ranks": 8}


def choose_tiling(
    m: int, n: int, k: int, group: int, clusters: Mapping[int, int], config: Mapping[str, Any] | None = None
) -> Int4HopperTiling:
    """Return the tiling of ``config``, or of ``rule``; where it does not fit the shape, of the first that does.

    Raises:
        ValueError: none fits.
    """
    wanted = config or rule((m, n, k))
    narrower = [dict(wanted) | {"ranks": ranks, "columns": columns, "warps": warps, "teams": teams, "beside": False}
                for ranks in (wanted["ranks"], 4, 2, 1) for columns in (2, 1) for warps in (8, 4, 2, 1)
                for teams in (2, 1)]  # fmt: skip
    for tried in (wanted, *narrower):
        tiling = tiling_of(tried, m, n, k, group, clusters)
        if tiling is not None:
            return tiling
    raise ValueError(
        f"int4_matmul_hopper.cu: no cut of {m} x {k} by {n} x {k} fits the shared memory; use the Triton kernel"
    )


class HopperCodes(Codes):
    """``int4_matmul`` by ``int4_matmul_hopper.cu``; raises the same errors as ``Codes``."""

    def __init__(self) -> None:
        super().__init__("int4_matmul_hopper", "transect_int4_hopper", 7)
        self._plans: dict[tuple[int, int, int, int], Int4HopperTiling] = {}

    def tiling(self, x: Tensor, n: int, group: int, config: Mapping[str, Any] | None = None) -> Int4HopperTiling:
        """Return the tiling for ``x`` and a weight of ``n`` rows: that of ``config``, else the tuned one, else the
        rule's."""
        m, k = x.shape
        count = multiprocessors(x.device)
        clusters = {ranks: count // ranks for ranks in (1, 2, 4, 8)}
        if config is not None:
            return choose_tiling(m, n, k, group, clusters, config)
        key = (m, n, k, group)
        if key not in self._plans:
            chosen = choose("int4_matmul_hopper.cu", (m, n, k), x.device, rule)
            self._plans[key] = choose_tiling(m, n, k, group, clusters, chosen)
        return self._plans[key]
