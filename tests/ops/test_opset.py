"""How a set of operators is picked, and that the batch-invariant one is."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from transect.ops import opset, registry
from transect.ops.attention.paged import rotary_kv_write
from transect.ops.linear.linear import fixed_rows
from transect.ops.norm import norms
from transect.ops.numerics import sample
from transect.ops.opset import OPERATORS, resolve_ops, with_dependent_launch
from transect.ops.registry import Implementation, Op, Unavailable, get


def with_extra(monkeypatch: pytest.MonkeyPatch, name: str, label: str, implementation: Implementation) -> None:
    """Register one more implementation of an operator for the length of a test."""
    old = get(name)
    fields = {field: getattr(old, field) for field in Op.__dataclass_fields__}
    fields["implementations"] = {**old.implementations, label: implementation}
    monkeypatch.setitem(registry._OPS, name, Op(**fields))


def refuse() -> Callable[..., object]:
    raise Unavailable("no compiler was found")


def test_torch_runs_everything() -> None:
    ops = resolve_ops()
    assert tuple(name for name, _ in ops.chosen) == OPERATORS
    assert all(callable(getattr(ops, name)) for name in OPERATORS)
    assert ops.passed_over == ()


def test_preference_and_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    def mine(*_: object) -> str:
        return "mine"

    with_extra(monkeypatch, "gelu", "quick", Implementation("special", lambda: mine, ("cpu",)))
    with_extra(monkeypatch, "swiglu", "quick", Implementation("special", refuse, ("cpu",)))
    with_extra(monkeypatch, "rotary", "quick", Implementation("special", lambda: mine, ("sm_90",)))
    ops = resolve_ops("cpu", ("special", "torch"))
    assert ops.gelu is mine and dict(ops.chosen)["gelu"] == "quick"
    assert ops.swiglu is get("swiglu").implementations["torch"].load()
    assert ops.passed_over == (
        ("rotary", "quick", "does not run on cpu"),
        ("swiglu", "quick", "no compiler was found"),
    )


def test_nothing_left_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with_extra(monkeypatch, "rms_norm", "quick", Implementation("special", refuse, ("cpu",)))
    with pytest.raises(
        ValueError, match=r"'rms_norm' has no implementation for cpu.*no compiler was found.*add 'torch'"
    ):
        resolve_ops("cpu", ("special",))
    with pytest.raises(ValueError, match="none is registered"):
        resolve_ops("cpu", ("no-such-backend",))


def test_batch_invariant_set() -> None:
    chosen = dict(resolve_ops(batch_invariant=True).chosen)
    assert chosen["linear"] == "torch_fixed_rows" and chosen["paged_attention"] == "torch_uniform"
    assert all(get(name).implementations[label].batch_invariant for name, label in chosen.items())


def test_batch_invariant_operators_of_a_gpu_leave_the_tuning_of_this_machine_aside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also behind what else is bound to them. The others have no knob that decides the order of a sum."""
    monkeypatch.setattr(opset, "_target", lambda device: "sm_90")
    asked: list[tuple[str, bool]] = []

    def choose(
        launcher: str, size: object, device: object, rule: Callable[[object], object], own: bool = True
    ) -> object:
        asked.append((launcher, own))
        return rule(size)

    monkeypatch.setattr(norms, "choose", choose)
    monkeypatch.setattr(rotary_kv_write, "choose", choose)
    inputs = {name: get(name).examples()[0] for name in ("rms_norm", "layer_norm", "add_rms_norm", "rotary_kv_write")}
    for invariant in (True, False):
        ops = with_dependent_launch(resolve_ops("cpu", ("triton", "torch"), batch_invariant=invariant), on=False)
        asked.clear()
        for name, each in inputs.items():
            getattr(ops, name)(**each)
        assert asked == [(name, not invariant) for name in inputs]


@pytest.mark.parametrize(("inputs", "outputs"), [(576, 192), (36, 7), (1536, 576)])
def test_fixed_rows_give_a_row_the_same_bits_in_any_batch(inputs: int, outputs: int) -> None:
    x, weight, bias = sample(70, inputs), sample(outputs, inputs, seed=1), sample(outputs, seed=2)
    together = fixed_rows(x, weight, bias)
    torch.testing.assert_close(together, x @ weight.T + bias, rtol=1e-4, atol=1e-4)
    for start, end in (*((row, row + 1) for row in range(70)), (37, 40), (11, 70), (16, 32)):
        assert torch.equal(fixed_rows(x[start:end], weight, bias), together[start:end])
    assert fixed_rows(x[:0], weight, bias).shape == (0, outputs)


def test_swiglu_gives_an_element_the_same_bits_anywhere() -> None:
    gate, up = 5 * sample(7, 72), sample(7, 72, seed=1)
    swiglu = resolve_ops(batch_invariant=True).swiglu
    together = swiglu(gate, up)
    for row in range(7):
        assert torch.equal(swiglu(gate[row : row + 1], up[row : row + 1]), together[row : row + 1])


def test_swiglu_far_from_zero() -> None:
    """No overflow forward or backward where exp(-gate) has none left."""
    gate = torch.tensor([-1e4, -100.0, -89.0, 89.0, 1e4], requires_grad=True)
    y = resolve_ops().swiglu(gate, torch.ones(5))
    (gradient,) = torch.autograd.grad(y.sum(), gate)
    assert y.tolist() == pytest.approx([0, 0, 0, 89, 1e4], abs=1e-30)
    assert gradient.tolist() == pytest.approx([0, 0, 0, 1, 1], abs=1e-30)


def test_operators_of_the_cpu_need_no_triton_and_no_compiler_of_torch() -> None:
    program = """
import sys
sys.modules["triton"] = None  # what an import of it then meets is an ImportError
import transect.engine.executors.gpu.build
from transect.ops.opset import resolve_ops
resolve_ops("cpu")
assert "torch._dynamo" not in sys.modules, "it takes a second at every start"
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
