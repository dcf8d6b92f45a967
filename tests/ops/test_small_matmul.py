"""Products of few rows: the plans everywhere, the CUDA kernels on a GPU."""

import pytest
import torch
import torch.nn.functional as F
from cuda_kernels import check_chain, loaded, product_inputs

from transect.ops import small_matmul


@pytest.mark.parametrize("n", [16, 37, 1024, 3072, 4096, 6144, 28672, 128256])
@pytest.mark.parametrize("m", [1, 8, 16, 32, 300])
def test_a_plan_covers_the_weight_fits_and_sums_in_one_order(m: int, n: int) -> None:
    plan = small_matmul.plan_rows(m, n, 132)
    assert (plan.columns, plan.stages) in small_matmul.KERNELS
    assert plan.per * 16 * 132 >= n
    assert small_matmul.shared_bytes(plan, m) <= small_matmul.SHARED
    alone = small_matmul.plan_rows(1, n, 132)
    assert (plan.warps, plan.ranks, plan.per) == (alone.warps, alone.ranks, alone.per)


def test_what_the_cuda_kernels_do_not_take_is_said() -> None:
    x, weight = torch.zeros(2, 64, dtype=torch.bfloat16), torch.zeros(5, 64, dtype=torch.bfloat16)
    assert small_matmul.cuda_refuses(x, weight) == ""
    assert "bfloat16" in small_matmul.cuda_refuses(x.float(), weight)
    assert "16 bytes" in small_matmul.cuda_refuses(x[:, 1:], weight[:, 1:])
    assert "[M, K]" in small_matmul.cuda_refuses(x[:, :32], weight)


@pytest.fixture
def rows() -> small_matmul.CudaRows:
    return loaded(small_matmul.CudaRows)


@pytest.mark.gpu
@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(1, 37, 72), (3, 200, 1000), (8, 6144, 4096), (16, 1024, 3072), (23, 1000, 1024), (100, 28672, 64)],
)
def test_error_is_that_of_torch_and_every_run_gives_the_same(
    rows: small_matmul.CudaRows, m: int, n: int, k: int, pdl: bool
) -> None:
    x, weight, bias = product_inputs(m, n, k)
    want = x.double() @ weight.double().T + bias.double()
    got = rows(x, weight, bias, pdl=pdl)
    error, of_torch = ((y.double() - want).norm() for y in (got, F.linear(x, weight, bias)))
    assert error <= 2 * of_torch
    assert torch.equal(got, rows(x, weight, bias, pdl=pdl))


@pytest.mark.gpu
def test_every_cut_gives_the_product(rows: small_matmul.CudaRows) -> None:
    x, weight, bias = product_inputs(9, 520, 4096)
    want = x.double() @ weight.double().T + bias.double()
    of_torch = (F.linear(x, weight, bias).double() - want).norm()
    for columns, stages in small_matmul.KERNELS:
        for warps, ranks in ((4, 1), (4, 2), (8, 1), (4, 8)):
            plan = small_matmul.Plan(columns, stages, columns + 1, warps, ranks)
            if small_matmul.shared_bytes(plan, 9) > small_matmul.SHARED:
                continue
            got = rows(x, weight, bias, plan=plan)
            assert (got.double() - want).norm() <= 2 * of_torch, plan


@pytest.mark.gpu
def test_a_row_does_not_depend_on_the_others(rows: small_matmul.CudaRows) -> None:
    x, weight, bias = product_inputs(300, 1000, 4096)
    everything = rows(x, weight, bias)
    for m in (1, 7, 8, 9, 16, 17, 32, 33, 256):
        assert torch.equal(rows(x[:m], weight, bias), everything[:m]), m
    assert torch.equal(rows(x[290:], weight, bias), everything[290:])


@pytest.mark.gpu
def test_launches_on_one_stream_in_a_graph_follow_each_other(rows: small_matmul.CudaRows) -> None:
    check_chain(rows, 4, [{}] * 4, 0.05)
