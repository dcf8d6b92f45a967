"""Products of one row with blocks of GGUF files: what is refused everywhere, the source on a processor, results on a
GPU."""

import pytest
import torch
from cuda_kernels import loaded, miss, row_on_host

from transect.ops.linear.few_rows.cuda import SHARED, Beside
from transect.ops.linear.packed.gguf import gguf_row
from transect.ops.linear.packed.gguf.gguf_matmul import drawn
from transect.ops.linear.packed.gguf.gguf_row import BlockPart, GGUFRow, fitting, values
from transect.spec.numbers.gguf import UNITS


def matrix(*parts, k, device="cpu"):
    return tuple(
        BlockPart(drawn(name, outputs, k, device, seed), name, outputs) for seed, (name, outputs) in enumerate(parts)
    )


def row(size, device="cpu", seed=1):
    return torch.randn(1, size, generator=torch.Generator().manual_seed(seed)).to(device, torch.bfloat16)


def test_what_the_kernel_does_not_take_is_said():
    o, down = matrix(("Q4_K", 256), k=512), matrix(("Q6_K", 256), k=256)
    assert gguf_row.refusal(o) is None
    assert "multiples of 16" in gguf_row.refusal(matrix(("Q4_K", 24), k=256))
    assert "one to 3 parts" in gguf_row.refusal(o * 4)
    assert "as far across" in gguf_row.refusal((*o, *down))
    assert "not units of Q5_K" in gguf_row.refusal((o[0]._replace(name="Q5_K"),))


def test_it_takes_one_row_of_whole_units():
    assert gguf_row.takes(row(512), [(64, 512, False), (64, 256, True)])
    assert not gguf_row.takes(row(512).expand(2, 512), [(64, 512, False)])
    assert not gguf_row.takes(row(512).float(), [(64, 512, False)])
    assert not gguf_row.takes(row(576), [(64, 576, False)])
    assert not gguf_row.takes(row(512), [(48, 512, True)])


@pytest.mark.parametrize("name", UNITS)
def test_stages_fit(name):
    unit = UNITS[name].unit
    for k in (256, 4096, 14336, 28672):
        stages = fitting(8, unit, k, 70)
        taken = 8 * stages * unit + k // 256 * gguf_row.SPAN + 64 * (70 + 8)
        assert taken <= SHARED - 4096 and 2 <= stages <= 8
    assert fitting(3, unit, 4096, 70) == 3
    assert fitting(8, unit, 1 << 17, 70) is None


@pytest.fixture(scope="module")
def kernel():
    return loaded(GGUFRow)


@pytest.mark.gpu
@pytest.mark.parametrize("name", UNITS)
@pytest.mark.parametrize(("n", "k"), [(48, 512), (4096, 4096), (16, 1280), (992, 14336)])
def test_one_product_has_the_values(kernel, name, n, k):
    own, x, bias = matrix((name, n), k=k, device="cuda"), row(k, "cuda"), row(n, "cuda", 2)[0]
    x[0, 5] *= 30
    wanted = x.double() @ values(own, torch.float64).T + bias.double()
    found = kernel(x, own, bias)[0]
    assert miss(found, wanted) < 4e-3
    assert torch.equal(kernel(x, own, bias, dependent_launch=True)[0], found)
    for stages in (2, 3, 5):
        assert torch.equal(kernel(x, own, bias, stages=stages)[0], found), stages
    if n % 32 == 0:
        wanted = gguf_row.gate_turns(x.double() @ values(own, torch.float64).T)
        assert miss(kernel(x, own, gated=True)[0], wanted) < 6e-3


@pytest.mark.gpu
def test_a_row_with_no_finite_number_and_one_of_zeros(kernel):
    own, x = matrix(("Q4_K", 64), k=512, device="cuda"), row(512, "cuda")
    x[0, 300] = float("inf")
    assert not kernel(x, own)[0].isfinite().any()
    assert not kernel(torch.zeros_like(x), own)[0].any()


@pytest.mark.gpu
def test_a_norm_on_either_side(kernel):
    n, k = 512, 1024
    own, x, residual, scale = matrix(("Q6_K", n), k=k, device="cuda"), row(k, "cuda"), row(n, "cuda", 2), row(n, "cuda")
    total, scaled, squares = kernel(x, own, None, Beside(residual=residual, scale=scale[0]))
    wanted = x.double() @ values(own, torch.float64).T + residual.double()
    assert miss(total, wanted) < 4e-3
    assert miss(scaled, total * scale) < 4e-3
    assert miss(squares, total.double().square().view(1, -1, 16).sum(-1)) < 1e-5
    after = matrix(("Q4_K", 64), ("Q8_0", 32), k=n, device="cuda")
    wanted = torch.nn.functional.rms_norm(total.double(), (n,), scale[0].double(), 1e-5) @ values(after).double().T
    assert miss(kernel(scaled, after, None, Beside(squares=squares, eps=1e-5))[0], wanted) < 6e-3


@pytest.fixture
def on_host(monkeypatch):
    return row_on_host(monkeypatch)


@pytest.mark.parametrize("name", UNITS)
def test_the_source_has_the_values_of_one_product(on_host, name):
    n, k = 96, 768
    own, x, bias = matrix((name, n), k=k), row(k), row(n, seed=2)[0]
    x[0, 5] *= 30
    wanted = x.double() @ values(own, torch.float64).T
    on_host._launch.reads([x, bias, own[0].arranged])
    assert miss(on_host(x, own, bias, stages=3)[0], wanted + bias.double()) < 4e-3
    assert miss(on_host(x, own, gated=True, stages=2)[0], gguf_row.gate_turns(wanted)) < 6e-3
    on_host._launch.reads([x, bias, own[0].arranged[:, :2]])
    with pytest.raises(AssertionError, match="outside of all tensors"):
        on_host(x, own, stages=3)
    on_host._launch.reads([])


def test_the_source_has_three_parts_and_rows_of_no_finite_number(on_host):
    own, x = matrix(("Q4_K", 64), ("Q6_K", 16), ("Q8_0", 32), k=512), row(512)
    wanted = x.double() @ values(own, torch.float64).T
    assert miss(on_host(x, own)[0], wanted) < 4e-3  # more warps than units, too
    assert miss(on_host(x, own, stages=2)[0], wanted) < 4e-3
    x[0, 300] = float("inf")
    assert not on_host(x, own)[0].isfinite().any()
    assert not on_host(torch.zeros_like(x), own)[0].any()


FAULTS = {
    "all lanes have read the slot": ("__syncwarp();  // all lanes have read the slot", ""),
    "the phase changes": ("ring.slot = 0, ring.parity ^= 1", "ring.slot = 0"),
    "x is whole": ("__syncthreads();\n\n  int start = 0;", "int start = 0;"),
    "sums are whole": ("__syncthreads();\n\n  // The sum of a row", "// The sum of a row"),
    "the ring is not longer": ("if (++ring.slot == ring.stages)", "if (++ring.slot > ring.stages)"),
}
"""What the source relies on, and the source without."""


@pytest.mark.prove
@pytest.mark.parametrize("fault", FAULTS)
def test_what_the_source_relies_on_is_seen_to_be_missing(monkeypatch, fault):
    kernel = row_on_host(monkeypatch, FAULTS[fault])
    own, x = matrix(("Q4_K", 320), ("Q6_K", 64), k=1024), row(1024)
    wanted = x.double() @ values(own, torch.float64).T
    with pytest.raises(AssertionError, match=r"wrong|wait for each other"):
        for seed in range(4):
            kernel._launch.draw(seed)
            assert miss(kernel(x, own, stages=2)[0], wanted) < 4e-3, "wrong"
