"""Rows whose experts other ranks have: whatever is in memory there, nothing of it reaches a token's gradient."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from transect.models.moe import MoE
from transect.ops.lang.jit import INTERPRETED
from transect.ops.moe import combining, grouped_gate_up, grouped_linear, routing
from transect.ops.numerics import sample
from transect.ops.opset import resolve_ops
from transect.spec.model import ModelConfig
from transect.spec.moe import MoEConfig

pytestmark = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="needs the interpreter or a GPU"
)
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
TOKENS, K, EXPERTS, FIRST, HELD, DIM, WIDTH = 9, 2, 6, 2, 2, 24, 20


@pytest.fixture
def nothing_is_zero_by_chance():
    """Memory that nobody has written holds NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # some of what torch does on a GPU is not
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def drawn(*shape, seed):
    return sample(*shape, seed=seed).to(DEVICE).requires_grad_(True)


@pytest.mark.usefixtures("nothing_is_zero_by_chance")
@pytest.mark.parametrize("ordered", [True, False])
def test_gradients_are_those_of_the_experts_here(ordered):
    """The kernels with half of the experts, beside torch with the same ones; rows in order, or copied before."""
    logits = sample(TOKENS, EXPERTS, seed=9).to(DEVICE)
    weights, _, order, places, starts = routing.reference(logits, None, K, FIRST, HELD)
    assert 0 < int(starts[-1]) < TOKENS * K

    def gradients(gate_up, linear, combine):
        x = drawn(TOKENS, DIM, seed=0)
        gate, up = drawn(HELD * WIDTH, DIM, seed=1), drawn(HELD * WIDTH, DIM, seed=2)
        down = drawn(HELD * DIM, WIDTH, seed=3)
        rows = x if ordered else x[order.long() // K]
        inner = gate_up(rows, gate, up, starts, order if ordered else None)
        out = combine(linear(inner, down, starts), places, weights)
        (out * sample(TOKENS, DIM, seed=4).to(DEVICE)).sum().backward()
        return x.grad, gate.grad, up.grad, down.grad

    found = gradients(grouped_gate_up.with_gradient, grouped_linear.grouped_linear, combining.expert_combine)
    want = gradients(grouped_gate_up.by_grouped_linear, grouped_linear.reference, combining.reference)
    for ours, theirs in zip(found, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


class Half:
    """Has the experts from FIRST on, and all tokens."""

    first, exchanges = FIRST, False
    gather = sum = staticmethod(lambda x: x)
    own = scatter = staticmethod(lambda x, tokens: x)


@pytest.mark.usefixtures("nothing_is_zero_by_chance")
def test_a_router_that_weighs_inputs_reads_no_row_of_nobody():
    sizes = {"dim": DIM, "n_layers": 1, "n_heads": 2, "n_kv_heads": 2, "ffn_dim": WIDTH, "vocab_size": 9}
    config = ModelConfig(architecture="llama", max_position=9, head_dim=12, **sizes)
    moe = MoEConfig(experts=EXPERTS, per_token=K, expert_dim=WIDTH, score="sigmoid", weighs_inputs=True, ranks=3)

    torch_ops = resolve_ops(DEVICE, differentiable=True)
    kernels = {
        "grouped_linear": grouped_linear.grouped_linear,
        "grouped_gate_up": grouped_gate_up.with_gradient,
        "expert_combine": combining.expert_combine,
    }

    def out(ops):
        layer = MoE(config, moe, ops, device=DEVICE)
        with torch.no_grad():
            for seed, parameter in enumerate(layer.parameters()):
                parameter.copy_(sample(*parameter.shape, seed=seed))
        layer.spread = Half()
        x = drawn(TOKENS, DIM, seed=7)
        found = layer(x)
        (found * sample(TOKENS, DIM, seed=4).to(DEVICE)).sum().backward()
        return found, x.grad, layer.router.weight.grad

    for ours, theirs in zip(out(replace(torch_ops, **kernels)), out(torch_ops), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-3)
