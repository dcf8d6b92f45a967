"""The hand-written layers against autograd through the model's own, over torch's operators."""

import itertools
from dataclasses import replace

import pytest
import torch
from effort import proving, quick_first
from training_runs import packed_batch

pytest.importorskip("triton")

from transect.costs.memory.merged import merged_kept
from transect.models.decoder import Decoder
from transect.ops.lang.jit import INTERPRETED
from transect.ops.loss.linear_cross_entropy_torch import linear_cross_entropy
from transect.ops.opset import resolve_ops
from transect.spec.model import ModelConfig
from transect.train.adapters.lora import attach
from transect.train.adapters.qlora import quantize_layers
from transect.train.config import LoRAConfig
from transect.train.data.batches import Batch
from transect.train.model.build import training_ops
from transect.train.model.merged_layers import MergedLayers, MergedStep, PackedDocuments
from transect.train.model.merging import refusal
from transect.train.objectives.loss import batch_loss

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CONFIG = ModelConfig(
    architecture="llama", vocab_size=64, dim=64, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, ffn_dim=128,
    max_position=64,
)  # fmt: skip
SMALL = CONFIG if proving() or DEVICE == "cuda" else replace(CONFIG, dim=32, n_heads=2, n_kv_heads=1, ffn_dim=64)
"""The interpreter needs a second for every product of the larger one, which weights in groups of 32 need."""
needs_kernels = pytest.mark.skipif(
    not INTERPRETED and DEVICE == "cpu", reason="needs Triton's interpreter (TRITON_INTERPRET=1) or a GPU"
)


def config_of(task):
    """Two layers, which hand their gradients on; in the interpreter one where adapters are trained."""
    config = CONFIG if task == "qlora" else SMALL
    return config if SMALL is CONFIG or task == "finetune" else replace(config, n_layers=1)


def model_of(config=None, task="finetune", *, dtype=torch.float32, ops=None):
    config = config or config_of(task)
    model = Decoder(config, device=DEVICE, dtype=dtype, ops=ops or resolve_ops(DEVICE))
    model.init_weights(std=1.6 * config.dim**-0.5, generator=torch.Generator(DEVICE).manual_seed(1))
    with torch.no_grad():
        for layer in model.layers:
            layer.attention_norm.weight.mul_(1.3)
    if task == "qlora":
        quantize_layers(model, LoRAConfig(group=32))
    if task != "finetune":
        targets = ("q", "v", "up", "down") if task == "some" else LoRAConfig().targets
        attach(model, LoRAConfig(rank=4, targets=targets, rank_stabilized=task == "some"), seed=0)
        model.layers[0].attention.v.scale *= 0.5  # adapters beside each other need not have one scale
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(".b"):
                    parameter.normal_(0, 0.2, generator=torch.Generator(DEVICE).manual_seed(len(name)))
    return model


def gradients(model, steps=1):
    for _ in range(steps):
        loss = batch_loss(model, packed_batch(DEVICE), linear_cross_entropy)
        loss.backward()
    return float(loss.detach()), {n: p.grad for n, p in model.named_parameters() if p.requires_grad}


@needs_kernels
@pytest.mark.parametrize(
    ("task", "keep"),
    quick_first(
        [("finetune", "full"), ("some", "selective"), ("qlora", "none"),
         ("finetune", "none"), ("lora", "none"), ("lora", "full"), ("qlora", "selective")], 3,
    ),
)  # fmt: skip
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_loss_and_gradients_are_those_of_the_model_s_own_layers(task: str, keep: str) -> None:
    torch.set_num_threads(1)
    expected_loss, expected = gradients(model_of(task=task))
    model = model_of(task=task)
    model.stack = MergedLayers(model, keep)
    loss, found = gradients(model)
    assert loss == pytest.approx(expected_loss, abs=1e-5)
    assert set(found) == set(expected)
    for name, gradient in expected.items():
        atol = 5e-5 * max(1.0, float(gradient.abs().max()))
        torch.testing.assert_close(found[name], gradient, atol=atol, rtol=1e-3, msg=lambda m, n=name: f"{n}: {m}")


@needs_kernels
@pytest.mark.parametrize(
    ("change", "task", "keep"),
    quick_first(
        [({"qk_norm": True}, "finetune", "selective"), ({"qkv_bias": True}, "finetune", "full"),
         ({"qk_norm": True}, "lora", "full"), ({"qkv_bias": True}, "lora", "none"),
         ({"qk_norm": True}, "finetune", "none")], 2,
    ),
)  # fmt: skip
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_norms_of_heads_and_biases_against_float64(change: dict, task: str, keep: str) -> None:
    """The exact gradients are those of the model's own layers in float64."""
    torch.set_num_threads(1)
    layers = 1 if INTERPRETED and not proving() else 2
    config = replace(SMALL, **change, n_layers=layers, architecture="qwen3" if "qk_norm" in change else "qwen2")

    def made(dtype: torch.dtype) -> Decoder:
        model = model_of(config, task)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                generator = torch.Generator(DEVICE).manual_seed(len(name))
                if "_norm" in name:
                    parameter.add_(torch.randn(parameter.shape, generator=generator, device=DEVICE), alpha=0.2)
                if name.endswith("bias"):
                    parameter.normal_(0, 0.3, generator=generator)
        return model if dtype == torch.float32 else model.double()

    exact_loss, exact = gradients(made(torch.float64))
    model = made(torch.float32)
    model.stack = MergedLayers(model, keep)
    loss, found = gradients(model)
    assert loss == pytest.approx(exact_loss, abs=1e-5)
    assert set(found) == set(exact)
    names = [name for name in found if "q_norm" in name or "k.bias" in name]
    assert names or task != "finetune"
    for name, gradient in exact.items():
        atol = 5e-5 * max(1.0, float(gradient.abs().max()))
        torch.testing.assert_close(
            found[name].double(), gradient, atol=atol, rtol=1e-3, msg=lambda m, n=name: f"{n}: {m}"
        )


@needs_kernels
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("task", quick_first(["lora", "finetune"], 0))
def test_every_plan_is_the_same_to_the_bit(task: str) -> None:
    torch.set_num_threads(1)
    results = []
    plans = (("none", 0), ("full", 1), ("selective", 0), ("full", 0))
    for keep, whole in plans if proving() else plans[:2]:
        model = model_of(task=task)
        model.stack = MergedLayers(model, keep, whole)
        results.append(gradients(model, steps=2))
    for loss, found in results[1:]:
        assert loss == results[0][0]
        assert all(torch.equal(found[name], gradient) for name, gradient in results[0][1].items())


def test_what_merged_layers_cannot_compute_runs_operator_by_operator() -> None:
    for change in ({"dora": True}, {"dropout": 0.1}):
        model = Decoder(SMALL, device="cpu", ops=resolve_ops("cpu"))
        model.init_weights()
        attach(model, LoRAConfig(rank=4, targets=("o",), **change), seed=0)
        reason = model.layers[0].attention.o.refuses_merging()
        assert reason is not None
        with pytest.raises(ValueError, match="train with merged = false"):
            model.layers[0].attention.o.training_part()


@needs_kernels
def test_the_weights_stay_the_model_s() -> None:
    model, plain = model_of(), model_of()
    MergedLayers(model, "none")
    state = model.state_dict()
    assert all(torch.equal(state[name], weight) for name, weight in plain.state_dict().items())
    query, key = model.layers[0].attention.q.weight, model.layers[0].attention.k.weight
    assert key.data_ptr() == query.data_ptr() + query.nbytes


def test_other_layers_are_refused() -> None:
    assert refusal(CONFIG) is None
    assert refusal(replace(CONFIG, qk_norm=True)) is None and refusal(replace(CONFIG, qkv_bias=True)) is None
    assert "normalised" in str(refusal(replace(CONFIG, qk_norm=True, qk_norm_whole=True)))
    assert "biases" in str(refusal(replace(CONFIG, mlp_bias=True)))
    assert "SwiGLU" in str(refusal(replace(CONFIG, activation="gelu", gated_mlp=False)))


@needs_kernels
@pytest.mark.parametrize(
    ("task", "plan"),
    quick_first(
        itertools.product(["finetune", "lora", "some", "qlora"], ["none", "selective", "full"]),
        [("finetune", "none"), ("lora", "full"), ("some", "selective"), ("qlora", "none")],
    ),
)
def test_a_layer_keeps_what_the_memory_account_says(task: str, plan: str) -> None:
    torch.set_num_threads(1)
    stack = MergedLayers(model_of(task=task), plan)
    tokens = 40
    config = config_of(task)
    x = torch.randn(tokens, config.dim, device=DEVICE)
    cos, sin = torch.ones(2, tokens, config.head_dim // 2, device=DEVICE)
    step = MergedStep(cos, sin, PackedDocuments(torch.tensor([0, tokens], dtype=torch.int32, device=DEVICE)))
    with torch.no_grad():
        kept, _, _ = stack.layers[0].forward(x, x.clone(), step)
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept.tensors() if t is not None}
    targets = ("q", "v", "up", "down") if task == "some" else LoRAConfig().targets
    account = merged_kept(config, targets, 0 if task == "finetune" else 4, 4)
    assert sum(held.values()) == tokens * account.under(plan)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="bfloat16 on the kernels of a GPU")
@pytest.mark.parametrize("task", ["finetune", "lora"])
def test_in_bfloat16_gradients_are_as_near_to_float32_as_the_model_s_own(task: str) -> None:
    config = replace(CONFIG, vocab_size=1000, dim=512, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=128, ffn_dim=1536)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 1000, (1536,), generator=generator)
    bounds = torch.tensor([0, 700, 1536], dtype=torch.int32)
    positions = torch.cat([torch.arange(700), torch.arange(836)])
    packed = Batch(tokens, tokens.roll(-1), positions, bounds, 1536, 836).to(torch.device("cuda"))

    def found(model: Decoder) -> dict[str, torch.Tensor]:
        batch_loss(model, packed, linear_cross_entropy).backward()
        return {name: p.grad.float() for name, p in model.named_parameters() if p.requires_grad}

    half = [model_of(config, task, dtype=torch.bfloat16, ops=training_ops(torch.device("cuda"))) for _ in range(2)]
    exact = model_of(config, task)
    exact.load_state_dict({name: t.float() for name, t in half[0].state_dict().items()})
    half[1].stack = MergedLayers(half[1], "none")
    expected, own, merged = found(exact), found(half[0]), found(half[1])

    def error(made: dict[str, torch.Tensor], name: str) -> float:
        return float((made[name] - expected[name]).norm() / expected[name].norm())

    worst = max(expected, key=lambda name: error(merged, name) / error(own, name))
    assert error(merged, worst) < 1.25 * error(own, worst), (worst, error(merged, worst), error(own, worst))
