"""``int4_matmul_hopper.cu``: its tilings everywhere, the kernel on a GPU."""

import itertools

import pytest
from cuda_kernels import check_int4_product, check_int4_tilings, loaded

from transect.ops.linear.packed.int4 import int4_hopper

CLUSTERS = {1: 132, 2: 66, 4: 33, 8: 16}
SHAPES = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096), (48, 128), (5, 1024)]


def _fits(tiling: int4_hopper.Int4HopperTiling, m: int, n: int, k: int, group: int) -> None:
    """What the launcher asks for, and that all of W is covered."""
    assert tiling.columns in int4_hopper.kernels(group)[tiling.rows]
    assert tiling.warps * tiling.teams <= int4_hopper.MOST_WARPS[tiling.rows]
    assert tiling.stages > 0
    assert tiling.stages % tiling.teams == 0  # or a team would take the filling of another for its own
    assert tiling.ranks <= k // 128
    wide = int4_hopper.tiles_at_once(tiling)
    assert tiling.columns <= wide <= tiling.warps * tiling.columns
    assert tiling.ranks * tiling.teams == 1 or wide == tiling.per
    assert int4_hopper.shared_bytes(tiling, m, group) <= int4_hopper.SHARED
    assert tiling.per * CLUSTERS[tiling.ranks] * 2 >= -(-n // 16)


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("m", [1, 8, 16, 32, 64, 100])
def test_the_rule_gives_a_tiling_that_fits(m: int, n: int, k: int, group: int) -> None:
    _fits(int4_hopper.choose_tiling(m, n, k, group, CLUSTERS), m, n, k, group)


def test_every_choice_fits_or_is_refused() -> None:
    kept = 0
    for values in itertools.product(*int4_hopper.CHOICES.values()):
        config = dict(zip(int4_hopper.CHOICES, values, strict=True))
        tiling = int4_hopper.tiling_of(config, 16, 4096, 14336, 128, CLUSTERS)
        if tiling is not None:
            _fits(tiling, 16, 4096, 14336, 128)
            kept += 1
    assert kept > 5


def test_a_choice_that_leaves_room_takes_less_than_half() -> None:
    config = dict(int4_hopper.rule((8, 28672, 4096))) | {"ranks": 1, "blocks": 1}
    for beside in (True, False):
        tiling = int4_hopper.tiling_of(config | {"beside": beside}, 8, 28672, 4096, 128, CLUSTERS)
        assert tiling is not None
        assert (int4_hopper.shared_bytes(tiling, 8, 128) <= int4_hopper.BESIDE) == beside


@pytest.fixture
def kernel() -> int4_hopper.HopperCodes:
    return loaded(int4_hopper.HopperCodes, hopper=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dependent_launch", [False, True])
@pytest.mark.parametrize(
    ("m", "n", "k", "group"),
    [(1, 37, 256, 128), (5, 200, 1024, 64), (8, 520, 4096, 32), (16, 520, 4096, 128), (16, 256, 14336, 128),
     (9, 4096, 14336, 128), (23, 1000, 1024, 64), (16, 28672, 512, 32), (64, 4096, 4096, 128), (100, 1000, 1024, 128)],
)  # fmt: skip
def test_error_is_that_of_torch_and_every_run_gives_the_same(
    kernel: int4_hopper.HopperCodes, m: int, n: int, k: int, group: int, dependent_launch: bool
) -> None:
    check_int4_product(kernel, m, n, k, group, dependent_launch=dependent_launch, repeats=5)


@pytest.mark.gpu
def test_every_tiling_gives_the_product(kernel: int4_hopper.HopperCodes) -> None:
    check_int4_tilings(kernel, int4_hopper, CLUSTERS, 13)
