"""The frozen 4-bit base: close to the weights it stands for, exact in its gradient, and small."""

import pytest
import torch
from tiny_llm import save_tiny_llm
from training_runs import tiny_run

from transect.models.weights.dense import Dense
from transect.models.weights.int4 import Int4, quantize
from transect.ops.opset import resolve_ops
from transect.train import checkpoint
from transect.train.trainer import Trainer


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
