"""``int4_matmul.cu``: the order of a weight and its plans everywhere, the kernel on a GPU."""

import gc

import pytest
import torch

from transect.ops import int4_matmul, int4_packing, int4_rows
from transect.ops.registry import Unavailable

CLUSTERS = {1: 132, 2: 66, 4: 30, 8: 15}


def _weight(n: int, k: int, group: int, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(n + k)
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, generator=generator)
    scale = ((torch.rand(n, k // group, generator=generator) + 0.1) * k**-0.5 / 4).to(torch.bfloat16)
    zero = (-7.5 * scale).to(torch.bfloat16)
    return int4_packing.pack(codes, group).to(device), scale.to(device), zero.to(device)


@pytest.mark.parametrize("group", [32, 64, 128])
def test_repacked_words_hold_what_a_lane_feeds_to_a_product(group: int) -> None:
    n, k = 40, 256
    packed, scale, zero = _weight(n, k, group)
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
        int4_rows.repack(*_weight(16, 192, 32))


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
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    try:
        return int4_rows.CudaCodes()
    except Unavailable as error:
        pytest.skip(str(error))


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
    weight = _weight(n, k, group, "cuda")
    generator = torch.Generator("cuda").manual_seed(m)
    x = torch.randn(m, k + 8, device="cuda", dtype=torch.bfloat16, generator=generator)[:, :k]
    bias = torch.randn(n, device="cuda", dtype=torch.bfloat16, generator=generator)
    torch.cuda.synchronize()
    want = int4_matmul.reference(x.double(), weight[0], *(t.double() for t in (*weight[1:], bias)))
    got = kernel(x, *weight, bias, pdl=pdl)
    of_torch = (int4_matmul._peer(x, *weight, bias).double() - want).norm()
    assert (got.double() - want).norm() <= 2 * of_torch
    assert torch.equal(got, kernel(x, *weight, bias, pdl=pdl))


@pytest.mark.gpu
def test_a_changed_weight_is_repacked_and_a_dropped_one_forgotten(kernel: int4_rows.CudaCodes) -> None:
    codes, scale, zero = _weight(64, 256, 128, "cuda")
    x = torch.ones(1, 256, device="cuda", dtype=torch.bfloat16)
    before = kernel(x, codes, scale, zero)
    codes.copy_(15 - codes % 16)
    assert not torch.equal(before, kernel(x, codes, scale, zero))
    del codes
    gc.collect()
    assert not kernel._repacked
