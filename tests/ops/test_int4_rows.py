"""``int4_matmul.cu``: the order of a weight and its plans everywhere, the kernel on a GPU."""

import pytest
import torch
from cuda_kernels import check_int4_product, check_repacking, int4_weight, loaded

from transect.ops import int4_packing, int4_rows

CLUSTERS = {1: 132, 2: 66, 4: 30, 8: 15}


@pytest.mark.parametrize("group", [32, 64, 128])
def test_repacked_words_hold_what_a_lane_feeds_to_a_product(group: int) -> None:
    n, k = 40, 256
    packed, scale, zero = int4_weight(n, k, group)
    codes = int4_packing.unpack(packed, group)
    words, scales = int4_rows.repack(packed, scale, zero)
    assert words.shape == (3, 2, 4, 32, 2)
    assert scales.shape == (3, 2, 128 // group, 8, 2, 2)
    for block, chunk, part, lane, half in ((0, 0, 0, 0, 0), (1, 1, 3, 31, 1), (2, 0, 2, 13, 1), (0, 1, 1, 22, 0)):
        word = int(words[block, chunk, part, lane, half]) & 0xFFFFFFFF
        row, first = block * 16 + lane // 4, chunk * 128 + part * 32 + half * 16 + lane % 4 * 2
        for i, (below, right) in enumerate(((0, 0), (8, 0), (0, 8), (8, 8))):
            for odd in (0, 1):
                got = word >> (4 * i + 16 * odd) & 15
                want = int(codes[row + below, first + right + odd]) if row + below < n else 0
                assert got == want
    for row, at in ((3, 0), (11, 255), (37, 128)):
        held = scales[row // 16, at // 128, at % 128 // group, row % 8, row % 16 // 8]
        assert torch.equal(held, torch.stack((scale[row, at // group], zero[row, at // group])))


def test_repack_needs_whole_tiles() -> None:
    with pytest.raises(ValueError, match="multiple of 128"):
        int4_rows.repack(*int4_weight(16, 192, 32))


@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096), (48, 128)])
@pytest.mark.parametrize("m", [1, 8, 16, 64])
def test_a_plan_covers_the_weight_and_fits(m: int, n: int, k: int) -> None:
    plan = int4_rows.plan_codes(m, n, k, 128, CLUSTERS)
    assert (plan.columns, plan.stages) in int4_rows.KERNELS[plan.rows]
    assert plan.per * 16 * CLUSTERS[plan.ranks] >= n
    assert int4_rows.shared_bytes(plan, m, k, 128) <= int4_rows.SHARED


def test_rows_too_long_for_any_cluster_are_refused() -> None:
    with pytest.raises(ValueError, match="shared memory"):
        int4_rows.plan_codes(16, 4096, 128 * 1024, 128, CLUSTERS)


@pytest.fixture
def kernel() -> int4_rows.CudaCodes:
    return loaded(int4_rows.CudaCodes)


@pytest.mark.gpu
@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize(
    ("m", "n", "k", "group"),
    [(1, 37, 256, 128), (5, 200, 1024, 64), (8, 520, 4096, 32), (16, 520, 4096, 128), (16, 256, 14336, 128),
     (9, 4096, 14336, 128), (23, 1000, 1024, 64), (16, 28672, 512, 32), (100, 1000, 1024, 128)],
)  # fmt: skip
def test_error_is_that_of_torch_and_every_run_gives_the_same(
    kernel: int4_rows.CudaCodes, m: int, n: int, k: int, group: int, pdl: bool
) -> None:
    check_int4_product(kernel, m, n, k, group, pdl=pdl, repeats=1)


@pytest.mark.gpu
def test_a_changed_weight_is_repacked_and_a_dropped_one_forgotten(kernel: int4_rows.CudaCodes) -> None:
    check_repacking(kernel)
