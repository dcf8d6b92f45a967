"""The frozen 4-bit base: close to the weights it stands for, exact in its gradient, and small."""

import pytest
import torch
from tiny_checkpoints import make_model
from tiny_llm import save_tiny_llm, save_tiny_llm_text
from training_runs import tiny_run

from transect.checkpoints.load import stored_weights
from transect.checkpoints.resolve import resolve
from transect.models.weights.dense import Dense
from transect.models.weights.int4 import Int4, quantize
from transect.ops.opset import resolve_ops
from transect.train.export.write import export_model, opened
from transect.train.loop import checkpoint
from transect.train.loop.trainer import Trainer


def linear(outputs=24, inputs=128):
    made = Dense(outputs, inputs, ops=resolve_ops())
    with torch.no_grad():
        made.weight.copy_(torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(0)))
    return made


def test_each_weight_is_off_by_at_most_half_a_step() -> None:
    base = linear()
    small = Int4.of(base, 32)
    step = small.scale.repeat_interleave(32, dim=1)
    assert bool(((small.dense() - base.weight).abs() <= 0.5001 * step).all())
    assert small.codes.numel() == base.weight.numel() // 2


def test_the_product_and_its_gradient_are_those_of_the_rebuilt_weight() -> None:
    small = Int4.of(linear(), 64)
    x = torch.randn(5, 128, requires_grad=True)
    upstream = torch.randn(5, 24)
    (ours,) = torch.autograd.grad(small(x), x, upstream)
    torch.testing.assert_close(small(x), x @ small.dense().T)
    torch.testing.assert_close(ours, upstream @ small.dense())


def test_constant_groups_stay_constant() -> None:
    codes, scale, zero = quantize(torch.full((2, 128), 0.25), 64)
    assert bool((codes == 0).all()) and bool((zero == 0.25).all()) and bool(scale.isfinite().all())


def test_a_width_without_whole_groups_is_refused() -> None:
    with pytest.raises(ValueError, match="whole pairs of groups of 64"):
        quantize(torch.zeros(2, 100), 64)


def test_training_over_the_4_bit_base_learns_and_resumes(tmp_path) -> None:
    torch.set_num_threads(1)
    (tmp_path / "model").mkdir()
    save_tiny_llm(tmp_path / "model", intermediate_size=128)
    config = tiny_run(
        tmp_path, task="qlora", steps=12, lora={"rank": 4, "group": 32, "targets": ["q", "v", "o"]},
        optimizer={"learning_rate": 1e-2},
    )  # fmt: skip
    trainer = Trainer(config)
    assert not any(isinstance(m, Dense) for layer in trainer.model.layers for m in layer.attention.children())
    first = [trainer.step().loss for _ in range(6)]
    with checkpoint.Writer(tmp_path / "run", keep=1) as writer:
        writer.save(trainer.snapshot())
    rest = [trainer.step().loss for _ in range(6)]
    assert rest[-1] < first[0]
    resumed = Trainer(config, checkpoint.newest(tmp_path / "run"))
    assert [resumed.step().loss for _ in range(6)] == rest


@torch.no_grad()
def test_merged_experts_have_the_router_that_was_trained_with(tmp_path) -> None:
    (tmp_path / "model").mkdir()
    make_model("mixtral", vocab_size=300, intermediate_size=128).save_pretrained(tmp_path / "model")
    save_tiny_llm_text(tmp_path / "model")
    with torch.enable_grad():
        trainer = Trainer(tiny_run(tmp_path, task="qlora", steps=2, lora={"rank": 4, "group": 32}))
        trainer.run()
    export_model(opened(str(tmp_path / "run")), tmp_path / "merged", "float32")
    merged = {name: stored.read() for name, stored in stored_weights(resolve(str(tmp_path / "merged")))}
    assert torch.equal(merged["layers.0.mlp.router.weight"], trainer.model.get_parameter("layers.0.mlp.router.weight"))
    for name, weight in trainer.model.weights():
        torch.testing.assert_close(merged[f"{name}.weight"], weight.dense(), atol=1e-6, rtol=1e-6)
