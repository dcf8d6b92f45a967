"""A training step over the Triton operators with gradients, in the interpreter, against the same over torch's."""

from dataclasses import replace

import pytest
import torch
from effort import proving
from training_runs import packed_batch

pytest.importorskip("triton")

from transect.models.decoder import Decoder
from transect.ops.lang.jit import INTERPRETED
from transect.ops.loss import linear_cross_entropy as kernel_loss
from transect.ops.loss.linear_cross_entropy_torch import linear_cross_entropy
from transect.ops.opset import resolve_ops
from transect.ops.registry import get
from transect.spec.model import ModelConfig
from transect.train.adapters.lora import attach
from transect.train.config import LoRAConfig
from transect.train.model.activations import stack_with
from transect.train.objectives.loss import batch_loss

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAYERS = 2 if proving() or DEVICE == "cuda" else 1
CONFIG = ModelConfig(
    architecture="qwen3", vocab_size=64, dim=32, n_layers=LAYERS, n_heads=2, n_kv_heads=1, head_dim=16, ffn_dim=48,
    max_position=64, qk_norm=True,
)  # fmt: skip
NAMES = ("rms_norm", "rotary", "swiglu", "linear", "attention")


def kernels():
    """The training operators of a GPU, whatever runs them here."""
    loaded = {}
    for name in NAMES:
        autograd = get(name).implementations["triton"].autograd
        assert autograd is not None
        loaded[name] = autograd()
    return replace(resolve_ops(DEVICE), **loaded)


def gradients(ops, loss, plan, lora):
    model = Decoder(CONFIG, device=DEVICE, dtype=torch.float32, ops=ops)
    model.init_weights(std=0.2, generator=torch.Generator(DEVICE).manual_seed(1))
    if lora:
        attach(model, LoRAConfig(rank=4), seed=0)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(".b"):
                    parameter.normal_(0, 0.2, generator=torch.Generator(DEVICE).manual_seed(len(name)))
    model.stack = stack_with(model, plan)
    value = batch_loss(model, packed_batch(DEVICE), loss)
    value.backward()
    return float(value.detach()), {n: p.grad for n, p in model.named_parameters() if p.requires_grad}


@pytest.mark.skipif(not INTERPRETED and DEVICE == "cpu", reason="needs Triton's interpreter or a GPU")
@pytest.mark.parametrize(("plan", "lora"), [("none", False), ("selective", True)])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_loss_and_gradients(plan: str, lora: bool) -> None:
    torch.set_num_threads(1)
    loss, found = gradients(kernels(), kernel_loss.linear_cross_entropy_autograd, plan, lora)
    expected_loss, expected = gradients(resolve_ops(DEVICE), linear_cross_entropy, "none", lora)
    assert loss == pytest.approx(expected_loss, abs=1e-5)
    assert set(found) == set(expected)
    for name, gradient in expected.items():
        assert found[name] is not None, name
        torch.testing.assert_close(found[name], gradient, atol=1e-5, rtol=1e-3, msg=lambda m, n=name: f"{n}: {m}")
