"""The account of a training step: its terms against the real objects, its phases, and advice that is enough."""

from dataclasses import replace

import pytest
import torch

from transect.costs.memory.fit import PLANS, first_that_fits, refusal, smallest_change
from transect.costs.memory.training import training
from transect.costs.memory.training_plan import TrainingPlan, state_bytes, trained_shapes
from transect.costs.units import GIB, parse_bytes
from transect.spec.shapes import PRESETS
from transect.train.config import OptimizerConfig
from transect.train.optim import build as build_optimizer

LLAMA_1B, LLAMA_8B = PRESETS["llama-3.2-1b"], PRESETS["llama-3.1-8b"]
LARGE = TrainingPlan(precision="bfloat16", micro_batch=8192, seq_len=4096)


def term(estimate, name):
    return next(t.bytes for t in estimate.terms if t.name == name)


@pytest.mark.parametrize("name", ["adamw", "adamw8bit", "lamb", "muon"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "mixed"])
def test_optimizer_state_is_what_the_optimizers_hold(name, precision):
    plan = TrainingPlan(optimizer=name, precision=precision)
    dtype = torch.float32 if precision == "float32" else torch.bfloat16
    shapes = {"embed.weight": (70, 65), "layers.0.mlp.up.weight": (96, 64), "norm.weight": (64,)}
    parameters = {key: torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for key, shape in shapes.items()}
    made = build_optimizer(OptimizerConfig(name=name), parameters, master_weights=precision == "mixed")
    masters = sum(4 * p.numel() for p in parameters.values()) if precision == "mixed" else 0
    assert sum(state_bytes(key, shape, plan) for key, shape in shapes.items()) + masters == made.state_bytes()


def test_a_llama_of_a_billion_in_bfloat16():
    """2 x 4096 tokens, AdamW: by hand from the shapes."""
    estimate = training(LLAMA_1B, LARGE)
    numbers = 1_235_814_400
    assert term(estimate, "weights") == term(estimate, "gradients") == 2 * numbers
    assert term(estimate, "optimizer state") == 4 * numbers
    # x, its norm, twice; q, k, v, out and log-sums; gate, up, their product
    each = 2 * (4 * 2048 + 2 * 2048 + 2 * 512 + 3 * 8192) + 4 * 32
    outside = 4 * 64 + 2 * 2048 + 8  # angles, final norm, token
    assert term(estimate, "activations") == 8192 * (16 * each + outside)
    assert estimate.peak < sum(t.bytes for t in estimate.terms)  # gradients come as activations go


def test_phases_grow_and_shrink_with_what_they_hold():
    plain, again = training(LLAMA_1B, LARGE), training(LLAMA_1B, replace(LARGE, accumulate=4))
    assert again.peak - plain.peak >= term(plain, "gradients") // 2  # gradients wait through the next forward pass
    kept = [training(LLAMA_1B, replace(LARGE, checkpointing=plan)).peak for plan in PLANS]
    assert kept == sorted(kept, reverse=True)
    mixed = training(LLAMA_1B, replace(LARGE, precision="mixed"))
    assert term(mixed, "master weights") == 2 * term(mixed, "weights")


def test_adapters_and_four_bits():
    full, lora, qlora = (training(LLAMA_8B, replace(LARGE, task=task)) for task in ("finetune", "lora", "qlora"))
    adapters = sum(a * b for a, b in trained_shapes(LLAMA_8B, replace(LARGE, task="lora")).values())
    assert term(lora, "gradients") == 2 * adapters
    assert full.peak > lora.peak > qlora.peak
    assert term(qlora, "weights") < 0.4 * term(lora, "weights")
    assert term(lora, "optimizer state") == 2 * 4 * adapters  # both moments in float32


def test_the_first_plan_that_fits():
    needs = [training(LLAMA_1B, replace(LARGE, checkpointing=plan)).needed for plan in PLANS]
    for plan, budget in zip(PLANS, needs, strict=True):
        found = first_that_fits(LLAMA_1B, LARGE, budget)
        assert found is not None and found[0].checkpointing == plan
    assert first_that_fits(LLAMA_1B, LARGE, needs[-1] - 1) is None


ONE = replace(LARGE, seq_len=8192, checkpointing="full")


@pytest.mark.parametrize(
    ("start", "enough", "settings"),
    [
        (LARGE, {"checkpointing": "selective"}, {"checkpointing"}),
        (LARGE, {"checkpointing": "full"}, {"checkpointing"}),
        (
            replace(LARGE, checkpointing="full", accumulate=2),
            {"micro_batch": 4096, "accumulate": 4},
            {"data.micro_batch", "accumulate"},
        ),
        (ONE, {"optimizer": "adamw8bit"}, {"optimizer.name"}),
        (ONE, {"task": "lora"}, {"task"}),
        (replace(LARGE, seq_len=8192), {"task": "lora", "checkpointing": "full"}, {"checkpointing", "task"}),
    ],
)
def test_the_smallest_change_comes_in_order_and_is_enough(start, enough, settings):
    budget = training(LLAMA_8B, replace(start, **enough)).needed
    assert not training(LLAMA_8B, start).fits(budget)
    change = smallest_change(LLAMA_8B, start, budget)
    assert change is not None
    assert {name for name, _ in change.settings} == settings
    assert training(LLAMA_8B, change.plan).fits(budget)
    assert change.plan.micro_batch * change.plan.accumulate >= start.micro_batch * start.accumulate


def test_a_refusal_names_numbers_and_the_change():
    text = refusal(LLAMA_8B, LARGE, 24 * GIB, training(LLAMA_8B, LARGE))
    assert "24.00 GiB are free" in text and 'task = "lora"' in text
    hopeless = refusal(LLAMA_8B, LARGE, GIB, training(LLAMA_8B, LARGE))
    assert "smaller model" in hopeless


def test_pretraining_is_never_told_to_take_adapters():
    plan = replace(LARGE, task="pretrain")
    assert smallest_change(LLAMA_8B, plan, 24 * GIB) is None


def test_sizes_are_read():
    assert parse_bytes("80GB") == 80 * 10**9
    assert parse_bytes("24 GiB") == 24 * GIB
    assert parse_bytes("1024") == 1024
    for wrong in ("", "GB", "8 XB", "-1GB", "nan"):
        with pytest.raises(ValueError, match="80GB"):
            parse_bytes(wrong)
