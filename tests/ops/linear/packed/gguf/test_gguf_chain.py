"""Products of one row with blocks of GGUF files, alone and four in one launch: what is refused everywhere, results on a
GPU."""

import pytest
import torch
from cuda_kernels import chain_on_host, loaded, miss

from transect.ops.linear.few_rows.cuda import SHARED, Beside
from transect.ops.linear.packed.gguf import gguf_chain
from transect.ops.linear.packed.gguf.gguf_chain import BlockPart, ChainWeights, GGUFChain, fitting, values
from transect.ops.linear.packed.gguf.gguf_matmul import drawn
from transect.spec.numbers.gguf import UNITS


def matrix(*parts, k, device="cpu"):
    return tuple(
        BlockPart(drawn(name, outputs, k, device, seed), name, outputs) for seed, (name, outputs) in enumerate(parts)
    )


def row(size, device="cpu", seed=1):
    return torch.randn(1, size, generator=torch.Generator().manual_seed(seed)).to(device, torch.bfloat16)


def weights_of(d, q, f, n, types, device="cpu", bias=False):
    def vector(size):
        return 1 + row(size, device, size)[0] / 8

    v = n // 4
    o, gate_up, down, qk, own_v = types
    return ChainWeights(
        matrix((o, d), k=q, device=device), matrix((gate_up, 2 * f), k=d, device=device),
        matrix((down, d), k=f, device=device), matrix((qk, n - v), (own_v, v), k=d, device=device),
        (vector(d), vector(d)), (1e-5, 1e-6), vector(n) if bias else None,
    )  # fmt: skip


TYPES = ("Q4_K", "Q4_K", "Q6_K", "Q4_K", "Q6_K")
OTHERS = ("Q8_0", "Q5_K", "Q4_0", "Q2_K", "Q3_K")


def test_what_the_kernel_does_not_take_is_said():
    weights = weights_of(256, 512, 256, 64, TYPES)
    assert gguf_chain.chain_refusal(weights) is None
    assert "follow" in gguf_chain.chain_refusal(weights._replace(down=weights.o))
    assert "bfloat16" in gguf_chain.chain_refusal(weights._replace(bias=torch.ones(64)))
    assert "multiples of 16" in gguf_chain.refusal(matrix(("Q4_K", 24), k=256))
    assert "three parts" in gguf_chain.refusal(weights.qkv * 2).replace("3", "three")
    assert "as far across" in gguf_chain.refusal((*weights.o, *weights.down))
    assert "not units of Q5_K" in gguf_chain.refusal((weights.o[0]._replace(name="Q5_K"),))
    two = weights._replace(gate_up=matrix(("Q4_K", 256), ("Q6_K", 256), k=256))
    assert "one part" in gguf_chain.chain_refusal(two)


def test_it_takes_one_row_of_whole_units():
    assert gguf_chain.takes(row(512), [(64, 512, False), (64, 256, True)])
    assert not gguf_chain.takes(row(512).expand(2, 512), [(64, 512, False)])
    assert not gguf_chain.takes(row(512).float(), [(64, 512, False)])
    assert not gguf_chain.takes(row(576), [(64, 576, False)])
    assert not gguf_chain.takes(row(512), [(48, 512, True)])


@pytest.mark.parametrize("name", UNITS)
def test_stages_fit(name):
    unit = UNITS[name].unit
    for k in (256, 4096, 14336, 28672):
        stages = fitting(8, unit, k, 70)
        taken = 8 * stages * unit + k // 256 * gguf_chain.SPAN + 64 * (70 + 8)
        assert taken <= SHARED - 4096 and 2 <= stages <= 8
    assert fitting(3, unit, 4096, 70) == 3
    assert fitting(8, unit, 1 << 17, 70) is None


def test_the_reference_is_four_products_and_two_norms():
    weights = weights_of(256, 512, 256, 64, TYPES, bias=True)
    a, r = row(512).double(), row(256, seed=2).double()
    y, u = gguf_chain.reference(a, r, weights)
    o, gate_up, down, qkv = (values(each, torch.float64) for each in weights.matrices)

    def normed(t, place):
        return t / (t.square().mean() + weights.eps[place]).sqrt() * weights.norms[place].double()

    t = a @ o.T + r
    h = (normed(t, 0) @ gate_up.T).view(-1, 2, 16)
    want = (h[:, 0] / (1 + (-h[:, 0]).exp()) * h[:, 1]).reshape(1, -1) @ down.T + t
    torch.testing.assert_close(u, want)
    torch.testing.assert_close(y, normed(want, 1) @ qkv.T + weights.bias.double())


@pytest.fixture(scope="module")
def chain():
    return loaded(GGUFChain)


@pytest.mark.gpu
@pytest.mark.parametrize("name", UNITS)
@pytest.mark.parametrize(("n", "k"), [(48, 512), (4096, 4096), (16, 1280), (992, 14336)])
def test_one_product_has_the_values(chain, name, n, k):
    own, x, bias = matrix((name, n), k=k, device="cuda"), row(k, "cuda"), row(n, "cuda", 2)[0]
    x[0, 5] *= 30
    wanted = x.double() @ values(own, torch.float64).T + bias.double()
    found = chain(x, own, bias)[0]
    assert miss(found, wanted) < 4e-3
    assert torch.equal(chain(x, own, bias, dependent_launch=True)[0], found)
    for stages in (2, 3, 5):
        assert torch.equal(chain(x, own, bias, stages=stages)[0], found), stages
    if n % 32 == 0:
        wanted = gguf_chain.gate_turns(x.double() @ values(own, torch.float64).T)
        assert miss(chain(x, own, gated=True)[0], wanted) < 6e-3


@pytest.mark.gpu
def test_a_row_with_no_finite_number_and_one_of_zeros(chain):
    own, x = matrix(("Q4_K", 64), k=512, device="cuda"), row(512, "cuda")
    x[0, 300] = float("inf")
    assert not chain(x, own)[0].isfinite().any()
    assert not chain(torch.zeros_like(x), own)[0].any()


@pytest.mark.gpu
def test_a_norm_on_either_side(chain):
    n, k = 512, 1024
    own, x, residual, scale = matrix(("Q6_K", n), k=k, device="cuda"), row(k, "cuda"), row(n, "cuda", 2), row(n, "cuda")
    total, scaled, squares = chain(x, own, None, Beside(residual=residual, scale=scale[0]))
    wanted = x.double() @ values(own, torch.float64).T + residual.double()
    assert miss(total, wanted) < 4e-3
    assert miss(scaled, total * scale) < 4e-3
    assert miss(squares, total.double().square().view(1, -1, 16).sum(-1)) < 1e-5
    after = matrix(("Q4_K", 64), ("Q8_0", 32), k=n, device="cuda")
    wanted = torch.nn.functional.rms_norm(total.double(), (n,), scale[0].double(), 1e-5) @ values(after).double().T
    assert miss(chain(scaled, after, None, Beside(squares=squares, eps=1e-5))[0], wanted) < 6e-3


@pytest.mark.gpu
@pytest.mark.parametrize("types", [TYPES, OTHERS])
@pytest.mark.parametrize("sizes", [(256, 512, 256, 64), (2048, 2048, 8192, 3072), (4096, 4096, 14336, 6144)])
def test_four_products_have_the_values(chain, types, sizes):
    d, q, f, n = sizes
    weights = weights_of(d, q, f, n, types, "cuda", bias=d == 2048)
    x, residual = row(q, "cuda"), row(d, "cuda", 2)
    want_y, want_u = gguf_chain.reference(x.double(), residual.double(), weights)
    first = None
    for stages in (8, 5, 2):
        for dependent in (False, True):
            y, u = chain.chain(x, residual, weights, dependent_launch=dependent, stages=stages)
            assert miss(u, want_u) < 0.01
            assert miss(y, want_y) < 0.015
            first = first or (y, u)
            assert torch.equal(first[0], y) and torch.equal(first[1], u)  # how far it reads ahead changes no bit


@pytest.fixture
def on_host(monkeypatch):
    return chain_on_host(monkeypatch)


@pytest.mark.parametrize("name", UNITS)
def test_the_source_has_the_values_of_one_product(on_host, name):
    n, k = 96, 768
    own, x, bias = matrix((name, n), k=k), row(k), row(n, seed=2)[0]
    x[0, 5] *= 30
    wanted = x.double() @ values(own, torch.float64).T
    on_host._launch.reads([x, bias, own[0].arranged])
    assert miss(on_host(x, own, bias, stages=3)[0], wanted + bias.double()) < 4e-3
    assert miss(on_host(x, own, gated=True, stages=2)[0], gguf_chain.gate_turns(wanted)) < 6e-3
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


@pytest.mark.parametrize(
    "types", [TYPES, pytest.param(("Q8_0", "Q5_K", "Q4_0", "Q2_K", "Q3_K"), marks=pytest.mark.prove)]
)
def test_the_source_of_four_products_has_the_values_in_any_order_of_threads(on_host, types):
    weights = weights_of(256, 512, 768, 320, types, bias=types is TYPES)
    x, residual = row(512), row(256, seed=2)
    want_y, want_u = gguf_chain.reference(x.double(), residual.double(), weights)
    found = []
    for order, stages in enumerate((5, 2)):
        on_host._launch.draw(order)
        y, u = on_host.chain(x, residual, weights, stages=stages)
        assert miss(u, want_u) < 0.01
        assert miss(y, want_y) < 0.015
        found.append(torch.cat((y, u), 1))
    assert torch.equal(*found)


FAULTS = {
    "all lanes have read the slot": ("__syncwarp();  // all lanes have read the slot", ""),
    "the phase changes": ("ring.slot = 0, ring.parity ^= 1", "ring.slot = 0"),
    "blocks meet": ("else meet(meetings + 32 * (number - 1), phase);", "else __syncthreads();"),
    "x is whole": ("__syncthreads();\n\n    int start = 0;", "int start = 0;"),
    "sums are whole": ("__syncthreads();\n\n    // The sum of a row", "// The sum of a row"),
    "the ring is not longer": ("if (++ring.slot == ring.stages)", "if (++ring.slot > ring.stages)"),
}
"""What the source relies on, and the source without."""


@pytest.mark.prove
@pytest.mark.parametrize("fault", FAULTS)
def test_what_the_source_relies_on_is_seen_to_be_missing(monkeypatch, fault):
    kernel = chain_on_host(monkeypatch, FAULTS[fault])
    weights = weights_of(256, 512, 768, 320, TYPES)
    x, residual = row(512), row(256, seed=2)
    want_y, want_u = gguf_chain.reference(x.double(), residual.double(), weights)
    with pytest.raises(AssertionError, match=r"wrong|wait for each other"):
        y, u = kernel.chain(x, residual, weights, stages=2)
        assert miss(u, want_u) < 0.01 and miss(y, want_y) < 0.015, "wrong"
