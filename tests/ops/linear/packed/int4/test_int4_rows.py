"""``int4_matmul.cu``: its tilings everywhere, the kernel on a GPU."""

import itertools
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from cuda_kernels import check_int4_product, check_int4_tilings, int4_weight, loaded, product_inputs

from transect.ops.linear.few_rows.cuda import Beside
from transect.ops.linear.packed.int4 import int4_matmul, int4_rows
from transect.ops.linear.packed.int4.int4_rows import RowsTiling

CLUSTERS = {1: 132, 2: 66, 4: 30, 8: 15}
SHAPES = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096), (48, 128), (5, 1024)]


def _fits(tiling: RowsTiling, m: int, n: int, k: int, group: int) -> None:
    """What the launcher asks for, and that all of W is covered."""
    assert tiling.rows in int4_rows.ROWS
    assert tiling.warps * tiling.teams <= int4_rows.most_warps(group, tiling.columns)
    assert tiling.stages > 0
    assert tiling.stages % tiling.teams == 0
    assert tiling.ranks * tiling.teams <= k // 128
    wide = int4_rows.tiles_at_once(tiling)
    assert 2 <= wide <= tiling.warps * tiling.columns
    assert tiling.ranks * tiling.teams == 1 or wide == tiling.per
    assert int4_rows.shared_bytes(tiling, m, group) <= int4_rows.SHARED
    assert tiling.per * CLUSTERS[tiling.ranks] * 2 >= -(-n // 16)


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("m", [1, 8, 16, 32, 64, 100])
def test_the_rule_gives_a_tiling_that_fits(m: int, n: int, k: int, group: int) -> None:
    _fits(int4_rows.choose_tiling(m, n, k, group, CLUSTERS), m, n, k, group)


def test_every_choice_fits_or_is_refused() -> None:
    kept = 0
    for values in itertools.product(*int4_rows.CHOICES.values()):
        config = dict(zip(int4_rows.CHOICES, values, strict=True))
        for m in (8, 16):
            tiling = int4_rows.tiling_of(config, m, 4096, 14336, 128, CLUSTERS)
            if tiling is not None:
                _fits(tiling, m, 4096, 14336, 128)
                assert int4_rows.shared_bytes(tiling, m, 128) <= int4_rows.BESIDE
                assert tiling.whole == config["whole"] <= (m == 8)
                kept += 1
    assert kept > 10


@pytest.mark.parametrize(
    ("m", "n", "k", "tiling"),
    [(1, 28672, 4096, RowsTiling(8, 7, 1, 6, 14, 1, 6, True)), (8, 28672, 4096, RowsTiling(8, 7, 1, 6, 14, 1, 6, True)),
     (16, 28672, 4096, RowsTiling(16, 7, 1, 5, 14, 2, 5)), (1, 4096, 14336, RowsTiling(8, 9, 1, 4, 18, 8, 5, True)),
     (8, 4096, 14336, RowsTiling(8, 9, 1, 4, 18, 8, 5, True)),
     (16, 4096, 14336, RowsTiling(16, 6, 1, 3, 18, 8, 3, False, 3)),
     (32, 4096, 14336, RowsTiling(32, 9, 1, 6, 18, 8, 6))],
)  # fmt: skip
def test_the_rule_gives_what_was_quickest_on_an_h200(m: int, n: int, k: int, tiling: RowsTiling) -> None:
    assert int4_rows.choose_tiling(m, n, k, 128, CLUSTERS) == tiling


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("m", [1, 8, 16, 32, 64])
def test_what_the_rule_says_can_be_tuned(m: int, n: int, k: int) -> None:
    for name, value in int4_rows.rule((m, n, k)).items():
        assert value in int4_rows.CHOICES[name]


def test_three_sixteens_a_warp_are_for_16_rows_and_groups_of_128() -> None:
    config = dict(int4_rows.rule((16, 4096, 14336)))
    assert config["columns"] == 3
    for m, group, taken in ((16, 128, True), (9, 128, True), (8, 128, False), (17, 128, False), (16, 64, False)):
        assert (int4_rows.tiling_of(config, m, 4096, 14336, group, CLUSTERS) is not None) == taken
        assert int4_rows.choose_tiling(m, 4096, 14336, group, CLUSTERS, config).columns == 2 + taken


def test_what_no_cut_fits_is_refused() -> None:
    with pytest.raises(ValueError, match="shared memory"):
        int4_rows.choose_tiling(1, 4096, 4096, 128, {1: 0})


GATED = [(28672, 4096), (37888, 3584), (17920, 1536), (16384, 2048), (6144, 1024), (64, 128)]


@pytest.mark.parametrize(("n", "k"), GATED)
def test_a_warp_with_the_gate_in_its_epilogue_holds_whole_pairs(n: int, k: int) -> None:
    config = {**int4_rows.rule((1, n, k)), "ranks": 1, "warps": 8}
    tiling = int4_rows.tiling_of(config, 1, n, k, 128, CLUSTERS, gated=True)
    assert tiling is not None and tiling.gated and tiling.ranks == 1
    assert tiling.per % 2 == 0 == int4_rows.tiles_at_once(tiling) % 2
    _fits(tiling, 1, n, k, 128)
    for refused in ({"ranks": 2}, {"warps": 9}, {"columns": 3}):
        assert int4_rows.tiling_of({**config, **refused}, 1, n, k, 128, CLUSTERS, gated=True) is None
    assert int4_rows.tiling_of(config, 9, n, k, 128, CLUSTERS, gated=True) is None


@pytest.fixture
def kernel() -> int4_rows.CudaCodes:
    return loaded(int4_rows.CudaCodes, hopper=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dependent_launch", [False, True])
@pytest.mark.parametrize(
    ("m", "n", "k", "group"),
    [(1, 37, 256, 128), (1, 16, 256, 128), (5, 200, 1024, 64), (8, 520, 4096, 32), (16, 520, 4096, 128),
     (16, 256, 14336, 128), (9, 4096, 14336, 128), (23, 1000, 1024, 64), (16, 28672, 512, 32), (64, 4096, 4096, 128),
     (100, 1000, 1024, 128)],
)  # fmt: skip
def test_error_is_that_of_torch_and_every_run_gives_the_same(
    kernel: int4_rows.CudaCodes, m: int, n: int, k: int, group: int, dependent_launch: bool
) -> None:
    check_int4_product(kernel, m, n, k, group, dependent_launch=dependent_launch, repeats=5)


@pytest.mark.gpu
@pytest.mark.parametrize("dependent_launch", [False, True])
@pytest.mark.parametrize("m", [1, 3, 8])
@pytest.mark.parametrize(("n", "k"), [(n, k) for n, k in GATED if n >= 16384])
def test_the_gate_in_the_epilogue(kernel: int4_rows.CudaCodes, m: int, n: int, k: int, dependent_launch: bool) -> None:
    weight = int4_weight(n, k, 128, "cuda")
    x, *_ = product_inputs(m, n, k)
    both = int4_matmul.reference(x.double(), weight, n).unflatten(-1, (-1, 2, 16))
    want = (F.silu(both[:, :, 0]) * both[:, :, 1]).flatten(1)
    got = kernel.gated(x, weight, n, dependent_launch=dependent_launch)
    assert got is not None and got.shape == (m, n // 2)
    # Rounding the two factors before they are multiplied, as two kernels do, costs about 3e-3.
    assert (got.double() - want).norm() <= 3e-3 * want.norm()
    for _ in range(3):
        assert torch.equal(got, kernel.gated(x, weight, n, dependent_launch=dependent_launch))


@pytest.mark.gpu
@pytest.mark.parametrize("dependent_launch", [False, True])
@pytest.mark.parametrize("m", [1, 3, 8])
@pytest.mark.parametrize(
    ("d", "k", "n"), [(4096, 14336, 28672), (4096, 4096, 6144), (1024, 2048, 6144), (256, 512, 64)]
)
def test_norms_on_both_sides_of_products(
    kernel: int4_rows.CudaCodes, m: int, d: int, k: int, n: int, dependent_launch: bool
) -> None:
    """To a stream of ``d`` numbers from ``k``, then the next norm, a product and a gate-up product of ``n`` rows."""
    into, out = int4_weight(d, k, 128, "cuda"), int4_weight(n, d, 128, "cuda")
    x, *_ = product_inputs(m, d, k)
    residual, scale = torch.randn(m, d, device="cuda").bfloat16(), torch.rand(d, device="cuda").bfloat16() + 0.5
    beside = partial(kernel.beside, dependent_launch=dependent_launch)
    total, scaled, squares = beside(x, into, d, Beside(residual=residual, scale=scale))
    want = int4_matmul.reference(x.double(), into, d) + residual.double()
    assert (total.double() - want).norm() <= 4e-3 * want.norm()
    assert scaled is not None and squares is not None
    torch.testing.assert_close(scaled, (total.float() * scale.float()).bfloat16())
    torch.testing.assert_close(squares, total.float().square().unflatten(1, (-1, 16)).sum(-1), rtol=1e-5, atol=1e-5)
    norm = Beside(squares=squares, eps=1e-5)
    rms = total.double().square().mean(1, keepdim=True).add(1e-5).rsqrt()
    both = int4_matmul.reference(scaled.double() * rms, out, n)
    plain, none, _ = beside(scaled, out, n, norm)
    assert none is None and (plain.double() - both).norm() <= 4e-3 * both.norm()
    turns = both.unflatten(-1, (-1, 2, 16))
    gated = (F.silu(turns[:, :, 0]) * turns[:, :, 1]).flatten(1)
    got = beside(scaled, out, n, norm, gated=True)[0]
    assert (got.double() - gated).norm() <= 4e-3 * gated.norm()
    for _ in range(3):
        again = beside(x, into, d, Beside(residual=residual, scale=scale))
        assert all(torch.equal(a, b) for a, b in zip(again, (total, scaled, squares), strict=True))
        assert torch.equal(beside(scaled, out, n, norm, gated=True)[0], got)


@pytest.mark.gpu
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 37, 256), (5, 520, 4096), (8, 4096, 1024)])
def test_rows_as_whole_numbers_lose_nothing_that_shows(
    kernel: int4_rows.CudaCodes, m: int, n: int, k: int, group: int
) -> None:
    weight = int4_weight(n, k, group, "cuda")
    x, *_ = product_inputs(m, n, k)
    x = x * torch.where(torch.arange(k, device="cuda") % 100 == 7, 300, 1)  # activations have such columns
    x[:, 128:256] = 0
    want = int4_matmul.reference(x.double(), weight, n)
    of_torch = (F.linear(x, int4_matmul.dense(weight, n, x.dtype)).double() - want).norm()
    got = kernel(x, weight, n, config=dict(int4_rows.rule((m, n, k))) | {"whole": True})
    assert (got.double() - want).norm() <= 1.5 * of_torch


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [2, 3])
@pytest.mark.parametrize("unit", [2.0**-50, 1.0, 2.0**50])
def test_codes_as_subnormal_numbers_are_exact(kernel: int4_rows.CudaCodes, unit: float, columns: int) -> None:
    """16 rows, whose products take codes so, whatever the size of x."""
    n, k = 4096, 1024
    weight = int4_weight(n, k, 128, "cuda")
    x, *_ = product_inputs(16, n, k)
    x = x * unit
    want = int4_matmul.reference(x.double(), weight, n)
    of_torch = (F.linear(x, int4_matmul.dense(weight, n, x.dtype)).double() - want).norm()
    config = dict(int4_rows.rule((16, n, 16384))) | {"columns": columns, "warps": 6 if columns > 2 else 12}
    got = kernel(x, weight, n, config=config)
    assert got.isfinite().all()
    assert (got.double() - want).norm() <= of_torch


@pytest.mark.gpu
def test_an_infinity_or_nan_stays_in_its_row(kernel: int4_rows.CudaCodes) -> None:
    weight = int4_weight(64, 512, 128, "cuda")
    x, *_ = product_inputs(8, 64, 512)
    config = dict(int4_rows.rule((8, 64, 512))) | {"whole": True}
    finite = kernel(x, weight, 64, config=config)
    x[2, 300], x[5, 17] = torch.inf, torch.nan
    got = kernel(x, weight, 64, config=config)
    of_rows = got.isfinite().all(1)
    assert of_rows.tolist() == [row not in (2, 5) for row in range(8)]
    assert torch.equal(got[of_rows], finite[of_rows])


@pytest.mark.gpu
@pytest.mark.parametrize("m", [5, 13, 30])
def test_every_tiling_gives_the_product(kernel: int4_rows.CudaCodes, m: int) -> None:
    check_int4_tilings(kernel, int4_rows, kernel.clusters(torch.device("cuda")), m)


@pytest.mark.gpu
def test_launches_that_follow_closely_read_what_the_one_before_wrote(kernel: int4_rows.CudaCodes) -> None:
    n = 1024
    weights = [int4_weight(n, n, group, "cuda") for group in (128, 64, 32)]
    x, *_ = product_inputs(8, n, n)
    want = x
    for i in range(12):
        want = F.linear(want, int4_matmul.dense(weights[i % 3], n, x.dtype)) * 8
    kernel(x, weights[0], n)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x
        for i in range(12):
            y = kernel(y, weights[i % 3], n, dependent_launch=i % 4 != 3) * 8
    graph.replay()
    first = y.clone()
    for _ in range(20):
        graph.replay()
        assert torch.equal(y, first)
    assert (first.float() - want.float()).norm() <= 0.1 * want.float().norm()


def test_what_is_no_arranged_weight_is_refused() -> None:
    x = torch.zeros(2, 256, dtype=torch.bfloat16)
    weight = int4_weight(40, 256, 128)
    assert int4_rows.cuda_refusal(x, weight, 40) is None
    assert "arrange" in int4_rows.cuda_refusal(x, weight, 60)
    assert "arrange" in int4_rows.cuda_refusal(x[:, :128], weight, 40)
    assert "bfloat16" in int4_rows.cuda_refusal(x.float(), weight, 40)
    assert "16 bytes" in int4_rows.cuda_refusal(torch.zeros(2, 260, dtype=x.dtype)[:, 2:258], weight, 40)
