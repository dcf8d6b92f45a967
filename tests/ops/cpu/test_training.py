"""The C++ kernels of training, on every instruction set: values and gradients against float64."""

import pytest
import torch

from transect.ops import opset  # noqa: F401
from transect.ops.attention.packed import attention
from transect.ops.cpu.library import Library
from transect.ops.cpu.training import Kernels
from transect.ops.loss import linear_cross_entropy_cpu, linear_cross_entropy_torch
from transect.ops.registry import Unavailable, get
from transect.ops.tools.accuracy import check

OPERATORS = ("rms_norm", "swiglu", "rotary", "attention")


@pytest.fixture(scope="module")
def native(library: Library) -> Kernels:
    return Kernels(library)


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def far(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize(
    ("rows", "inner", "columns"), [(1, 1, 1), (7, 5, 3), (40, 77, 50), (13, 1700, 33), (64, 900, 16)]
)
def test_sums_of_products(native: Kernels, rows: int, inner: int, columns: int) -> None:
    x, w = draw(rows, inner), draw(columns, inner, seed=1)
    h, b = draw(rows, 3, seed=2), draw(columns, 3, seed=3)
    exact = x.double() @ w.double().mT + 0.5 * (h.double() @ b.double().mT)
    y = native.products([(x, w.mT, 1.0), (h, b.mT, 0.5)])
    assert far(y, exact) < 1e-6
    assert far(native.products([(x, w.mT, 1.0)], y.clone()), exact + x.double() @ w.double().mT) < 1e-6
    assert far(native.products([(y, w, 1.0)]), y.double() @ w.double()) < 1e-6
    assert far(native.products([(x.mT, y, 2.0)]), 2 * x.double().mT @ y.double()) < 1e-6


def test_a_row_of_a_product_does_not_depend_on_the_others(native: Kernels) -> None:
    x, w = draw(50, 800), draw(40, 800, seed=1)
    whole = native.products([(x, w.mT, 1.0)])
    for rows in (1, 2, 13, 37):
        assert torch.equal(native.products([(x[:rows], w.mT, 1.0)]), whole[:rows])


def test_shapes_that_do_not_fit_are_refused(native: Kernels) -> None:
    with pytest.raises(ValueError, match="does not give"):
        native.products([(draw(2, 3), draw(4, 5), 1.0)])
    with pytest.raises(ValueError, match="float32"):
        native.products([(draw(2, 3).double(), draw(3, 5), 1.0)])
    with pytest.raises(ValueError, match="contiguous"):
        native.products([(draw(2, 3), draw(3, 2), 1.0)], draw(2, 2).mT)
    with pytest.raises(ValueError, match="end at the number of tokens"):
        native.attention(
            draw(4, 1, 8), draw(4, 1, 8), draw(4, 1, 8), torch.tensor([0, 5], dtype=torch.int32), 1.0, None
        )


@pytest.mark.parametrize(
    ("lengths", "heads", "kv_heads", "size", "window"),
    [((5, 1, 37), 6, 2, 16, None), ((3, 170, 2), 4, 1, 10, 9), ((200, 75), 9, 3, 64, None), ((300,), 3, 3, 33, 100)],
)
def test_attention(native: Kernels, lengths, heads: int, kv_heads: int, size: int, window: int | None) -> None:
    tokens = sum(lengths)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    q, k, v, grad = (draw(tokens, n, size, seed=i) for i, n in enumerate((heads, kv_heads, kv_heads, heads)))
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    exact = attention.reference(*wide, cu_seqlens, 0.3, window)
    exact.backward(grad.double())
    out, lse = native.attention(q, k, v, cu_seqlens, 0.3, window)
    assert far(out, exact.detach()) < 2e-6
    found = native.attention_backward(grad, out, lse, q, k, v, cu_seqlens, 0.3, window)
    for gradient, x in zip(found, wide, strict=True):
        assert far(gradient, x.grad) < 2e-6


def test_swiglu_norm_and_rotation(native: Kernels) -> None:
    gate, up, grad = (draw(9, 37, seed=i) for i in range(3))
    wide = [x.double().requires_grad_() for x in (gate, up)]
    exact = torch.nn.functional.silu(wide[0]) * wide[1]
    exact.backward(grad.double())
    assert far(native.swiglu(gate, up), exact.detach()) < 1e-6
    for found, x in zip(native.swiglu_backward(grad, gate, up), wide, strict=True):
        assert far(found, x.grad) < 1e-6
    weight = draw(37, seed=4)
    x = gate.double().requires_grad_()
    exact = torch.nn.functional.rms_norm(x, (37,), weight.double(), 1e-5)
    exact.backward(grad.double())
    y, r = native.rms_norm(gate, weight, 1e-5)
    assert far(y, exact.detach()) < 1e-6
    assert far(native.rms_norm_backward(grad, gate, weight, r), x.grad) < 1e-6
    heads, angle = draw(5, 3, 34), draw(5, 17, seed=1)
    turned = native.rotate(heads[:, 1:], angle.cos(), angle.sin(), 1.0)
    expected = get("rotary").reference(*[heads[:, 1:].double()] * 2, angle.cos().double(), angle.sin().double())[0]
    assert far(turned, expected) < 1e-6
    assert far(native.rotate(turned, angle.cos(), angle.sin(), -1.0), heads[:, 1:].double()) < 1e-6


@pytest.mark.parametrize("rows", [1, 5])
def test_cross_entropy(native: Kernels, rows: int) -> None:
    logits, labels = 8 * draw(rows, 3001), torch.arange(rows) * 700
    wide = logits.double().requires_grad_()
    exact = torch.nn.functional.cross_entropy(wide, labels, reduction="none")
    (exact.sum() / 7).backward()
    loss = native.cross_entropy(logits, labels, 1 / 7)
    assert far(loss, exact.detach()) < 1e-6
    assert far(logits, wide.grad) < 1e-6


@pytest.mark.parametrize("name", OPERATORS)
def test_the_operator_against_float64_like_every_implementation(name: str) -> None:
    op = get(name)
    made = op.implementations["cpu"]
    try:
        made.load()
    except Unavailable as reason:
        pytest.skip(str(reason))
    findings = list(check(op, made, torch.float32))
    assert findings
    assert [finding for finding in findings if not finding.passed] == []


@pytest.mark.parametrize("name", OPERATORS)
def test_other_dtypes_run_in_torch(name: str) -> None:
    op = get(name)
    try:
        call = op.implementations["cpu"].load()
    except Unavailable as reason:
        pytest.skip(str(reason))
    example = {
        k: v.double() if torch.is_tensor(v) and v.is_floating_point() else v for k, v in op.examples()[1].items()
    }
    found, exact = call(**example), op.reference(**example)
    for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (found, exact)), strict=True):
        assert a.dtype == torch.float64
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("ignored", [0, 3, 7])
def test_the_loss_of_an_output_head(trained: bool, ignored: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_cross_entropy_cpu, "LOSS_ELEMENTS", 120)  # several chunks
    try:
        loss = linear_cross_entropy_cpu.LinearCrossEntropy()
    except Unavailable as reason:
        pytest.skip(str(reason))
    target = torch.arange(7) * 5
    target[torch.randperm(7, generator=torch.Generator().manual_seed(0))[:ignored]] = -100
    found, exact = [], []
    for dtype, results in ((torch.float32, found), (torch.float64, exact)):
        x = draw(7, 12).to(dtype).requires_grad_()
        weight = draw(41, 12, seed=1).to(dtype).requires_grad_(trained)
        call = loss if dtype == torch.float32 else linear_cross_entropy_torch.linear_cross_entropy
        value = call(x, weight, target, -100)
        (3 * value).backward()
        results += [value.detach(), x.grad, *([weight.grad] if trained else [])]
    for a, b in zip(found, exact, strict=True):
        torch.testing.assert_close(a.double(), b, atol=1e-5, rtol=1e-5, equal_nan=True)
    with pytest.raises(ValueError, match=r"0\.\.40"):
        loss(draw(2, 12), draw(41, 12), torch.tensor([0, 41]), -100)
