"""Progressive layer dropping: how often each layer runs, what it adds, and that runs are repeatable."""

import math

import pytest
import torch
from training_runs import tiny_run

from transect.train.loop.trainer import Trainer
from transect.train.model.layer_drop import dropping, kept_layers, share_kept


def test_shares_fall_to_what_is_asked_for():
    assert share_kept(0, 100, 0.5) == 1.0
    assert share_kept(1, 100, 0.5) == pytest.approx(0.5 * math.exp(-1) + 0.5)
    assert share_kept(99, 100, 0.5) == pytest.approx(0.5)


def test_each_layer_runs_as_often_as_its_probability():
    steps, layers = 4000, 4
    drawn = [kept_layers(0, 3000 + step, steps, 0.5, layers) for step in range(1000)]
    for layer in range(layers):
        p = 1 - layer / layers * 0.5
        ran = sum(1 for each in drawn if each[layer]) / len(drawn)
        assert ran == pytest.approx(p, abs=0.05)
        assert all(each[layer] == pytest.approx(p) for each in drawn if each[layer])
    assert drawn[0] == kept_layers(0, 3000, steps, 0.5, layers)  # the same for every rank and again


def test_what_runs_is_the_plain_formula(tmp_path):
    trainer = Trainer(tiny_run(tmp_path, steps=50, layer_keep=0.5))
    model = trainer.model
    batch = trainer.objective.batches(0)[0]
    step = next(s for s in range(1, 200) if 0.0 in kept_layers(0, s, 50, 0.5, len(model.layers)))
    kept = kept_layers(0, step, 50, 0.5, len(model.layers))
    seen = []
    model.stack = dropping(model, trainer.config.seed, 0.5, lambda: (step, 50), recompute=False)
    hooks = [layer.register_forward_hook(lambda m, i, out: seen.append((i[0], out))) for layer in model.layers]
    loss = trainer._loss(0, batch.to(trainer.device))
    assert len(seen) == sum(1 for p in kept if p)
    x = seen[0][0]
    running = [p for p in kept if p]
    for (before, out), p in zip(seen, running, strict=True):
        torch.testing.assert_close(before, x)
        x = x + (out - before) / p
    loss.backward()
    for number, p in enumerate(kept):
        gradients = [q.grad for q in model.layers[number].parameters()]
        assert all((g is None) == (p == 0.0) for g in gradients)
    for hook in hooks:
        hook.remove()


def test_a_run_learns_and_is_the_same_when_layers_are_computed_again(tmp_path):
    how = {"steps": 12, "layer_keep": 0.5, "schedule": {"kind": "constant"}}
    plain = Trainer(tiny_run(tmp_path, run_dir=str(tmp_path / "a"), **how))
    again = Trainer(tiny_run(tmp_path, run_dir=str(tmp_path / "b"), checkpointing="full", **how))
    one, two = ([trainer.step().loss for _ in range(12)] for trainer in (plain, again))
    assert one == pytest.approx(two, abs=1e-5) and one[-1] < one[0]


def test_what_cannot_drop_layers_says_so(tmp_path):
    with pytest.raises(ValueError, match="layer_keep"):
        Trainer(tiny_run(tmp_path, accumulate=2, layer_keep=0.5, parallel={"data": 2, "zero": 3}))
    with pytest.raises(ValueError, match="at most 1"):
        tiny_run(tmp_path, layer_keep=1.5)
