"""``int4_matmul_hopper.cu``: its plans everywhere, the kernel on a GPU."""

import itertools

import pytest
from cuda_kernels import check_int4_plans, check_int4_product, loaded

from transect.ops.linear.packed import int4_hopper

CLUSTERS = {1: 132, 2: 66, 4: 33, 8: 16}
SHAPES = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096), (48, 128), (5, 1024)]


def _fits(plan: int4_hopper.Plan, m: int, n: int, k: int, group: int) -> None:
    """What the launcher asks for, and that all of W is covered."""
    assert plan.columns in int4_hopper.kernels(group)[plan.rows]
    assert plan.warps * plan.teams <= int4_hopper.MOST_WARPS[plan.rows]
    assert plan.stages > 0
    assert plan.stages % plan.teams == 0  # or a team would take the filling of another for its own
    assert plan.ranks <= k // 128
    wide = int4_hopper.tiles_at_once(plan)
    assert plan.columns <= wide <= plan.warps * plan.columns
    assert plan.ranks * plan.teams == 1 or wide == plan.per
    assert int4_hopper.shared_bytes(plan, m, group) <= int4_hopper.SHARED
    assert plan.per * CLUSTERS[plan.ranks] * 2 >= -(-n // 16)


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("m", [1, 8, 16, 32, 64, 100])
def test_the_rule_gives_a_plan_that_fits(m: int, n: int, k: int, group: int) -> None:
    _fits(int4_hopper.plan_codes(m, n, k, group, CLUSTERS), m, n, k, group)


def test_every_choice_fits_or_is_refused() -> None:
    kept = 0
    for values in itertools.product(*int4_hopper.CHOICES.values()):
        config = dict(zip(int4_hopper.CHOICES, values, strict=True))
        plan = int4_hopper.plan_of(config, 16, 4096, 14336, 128, CLUSTERS)
        if plan is not None:
            _fits(plan, 16, 4096, 14336, 128)
            kept += 1
    assert kept > 5


def test_a_choice_that_leaves_room_takes_less_than_half() -> None:
    config = dict(int4_hopper.rule((8, 28672, 4096))) | {"ranks": 1, "blocks": 1}
    for beside in (True, False):
        plan = int4_hopper.plan_of(config | {"beside": beside}, 8, 28672, 4096, 128, CLUSTERS)
        assert plan is not None
        assert (int4_hopper.shared_bytes(plan, 8, 128) <= int4_hopper.BESIDE) == beside


@pytest.fixture
def kernel() -> int4_hopper.HopperCodes:
    return loaded(int4_hopper.HopperCodes, hopper=True)


@pytest.mark.gpu
@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize(
    ("m", "n", "k", "group"),
    [(1, 37, 256, 128), (5, 200, 1024, 64), (8, 520, 4096, 32), (16, 520, 4096, 128), (16, 256, 14336, 128),
     (9, 4096, 14336, 128), (23, 1000, 1024, 64), (16, 28672, 512, 32), (64, 4096, 4096, 128), (100, 1000, 1024, 128)],
)  # fmt: skip
def test_error_is_that_of_torch_and_every_run_gives_the_same(
    kernel: int4_hopper.HopperCodes, m: int, n: int, k: int, group: int, pdl: bool
) -> None:
    check_int4_product(kernel, m, n, k, group, pdl=pdl, repeats=5)


@pytest.mark.gpu
def test_every_plan_gives_the_product(kernel: int4_hopper.HopperCodes) -> None:
    check_int4_plans(kernel, int4_hopper, CLUSTERS, 13)
