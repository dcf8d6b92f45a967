"""The losses of routers, and training a mixture of experts."""

import copy
import dataclasses

import pytest
import torch
import transformers
from training_runs import tiny_run, write_text
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from transect.checkpoints.resolve import resolve
from transect.models.context import VarlenContext
from transect.models.decoder import Decoder
from transect.spec.model import ModelConfig
from transect.spec.moe import MoEConfig
from transect.train.config import RouterConfig
from transect.train.loop.trainer import Trainer
from transect.train.model.activations import stack_with
from transect.train.model.build import training_ops
from transect.train.objectives.balance import Balance, balance_loss, z_loss

CONFIG = ModelConfig(
    architecture="qwen2_moe", vocab_size=61, dim=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, ffn_dim=48,
    max_position=64, qkv_bias=True, moe=MoEConfig(6, 2, 16, shared_dim=8, shared_gate=True),
)  # fmt: skip
ROUTER = RouterConfig(balance=0.5, z_loss=0.3)


def loss_and_gradients(model):
    """The loss of tokens that predict the next, with both losses of the routers, and its gradients."""
    tokens = torch.arange(40) % 23
    context = VarlenContext(torch.tensor([0, 25, 40], dtype=torch.int32), model.ops)
    balance = Balance(model, ROUTER)
    with balance.watching():
        logits = model.logits(model(tokens, context.positions(), context))
    loss = torch.nn.functional.cross_entropy(logits[:-1], tokens[1:]) + balance.loss()
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def drawn(config=CONFIG, dtype=torch.float64, ops=None):
    model = Decoder(config, dtype=dtype, ops=ops)
    return model.init_weights(0.2, torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_gradients_in_float32_are_those_of_float64(score):
    """Every weight, routers and experts included, through the operators that training uses."""
    config = dataclasses.replace(CONFIG, moe=dataclasses.replace(CONFIG.moe, score=score))
    exact_model = drawn(config)
    model = drawn(config, torch.float32, training_ops(torch.device("cpu")))
    model.load_state_dict(exact_model.state_dict())
    exact, gradients = loss_and_gradients(exact_model)
    loss, ours = loss_and_gradients(model)
    assert loss == pytest.approx(float(exact), rel=1e-5)
    for name, gradient in gradients.items():
        assert (ours[name] - gradient).norm() <= 2e-5 * gradient.norm().clamp(min=1e-3), name
    assert gradients["layers.0.mlp.router.weight"].norm() > 1e-4


def test_gradient_of_the_router_by_differences():
    """The router's gradient is the slope of the loss, where no choice changes."""
    model = drawn()
    _, gradients = loss_and_gradients(model)
    weight = model.get_parameter("layers.1.mlp.router.weight")
    direction = torch.randn(weight.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    slope = (gradients["layers.1.mlp.router.weight"] * direction).sum()
    losses = []
    for step in (1e-6, -1e-6):
        moved = copy.deepcopy(model)
        moved.zero_grad()
        with torch.no_grad():
            moved.get_parameter("layers.1.mlp.router.weight").add_(direction, alpha=step)
        losses.append(float(loss_and_gradients(moved)[0]))
    assert (losses[0] - losses[1]) / 2e-6 == pytest.approx(float(slope), rel=1e-4)


@pytest.mark.parametrize("checkpointing", ["selective", "full"])
def test_checkpointing_sees_each_layer_once(checkpointing):
    plain = drawn()
    again = copy.deepcopy(plain)
    again.stack = stack_with(again, checkpointing)
    (loss, gradients), (other, others) = loss_and_gradients(plain), loss_and_gradients(again)
    assert loss == other
    for name, gradient in gradients.items():
        torch.testing.assert_close(others[name], gradient, rtol=1e-12, atol=1e-14)


def test_balance_is_that_of_transformers():
    logits = torch.randn(30, 6, generator=torch.Generator().manual_seed(1))
    experts = logits.topk(2).indices
    assert balance_loss(logits, experts) == pytest.approx(float(load_balancing_loss_func((logits,), 6, 2)), rel=1e-6)
    even = torch.arange(60).view(30, 2) % 6
    assert balance_loss(torch.zeros(30, 6), even) == pytest.approx(2)
    assert z_loss(torch.zeros(4, 6)) == pytest.approx(float(torch.tensor(6.0).log() ** 2))


def test_a_run_trains_experts(tmp_path):
    """From random weights, a few steps: the loss falls, the log has the routers' losses, and the result is served."""
    (tmp_path / "model").mkdir()
    config = transformers.MixtralConfig(
        vocab_size=300, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=4, max_position_embeddings=128, bos_token_id=256, eos_token_id=257,
    )  # fmt: skip
    from tiny_llm import save_tiny_llm_text

    config.architectures = ["MixtralForCausalLM"]
    config.save_pretrained(tmp_path / "model")
    save_tiny_llm_text(tmp_path / "model")
    write_text(tmp_path / "text.txt")
    run = tiny_run(tmp_path, task="pretrain", steps=12, optimizer={"learning_rate": 1e-2}, router={"z_loss": 0.01})
    trainer = Trainer(run)
    history = []
    trainer_loss = trainer.objective.loss
    trainer.objective.loss = lambda batch: (value := trainer_loss(batch), history.append(float(value.detach())))[0]
    trainer.run()
    assert history[-1] < history[0] - 0.5
    assert set(trainer.objective.metrics()) == {"expert_balance", "router_z"}
    saved = next((tmp_path / "run").rglob("config.json")).parent
    assert resolve(str(saved)).config.moe == MoEConfig(4, 2, 32)


def test_negative_factors_are_refused():
    with pytest.raises(ValueError, match=r"router\.balance"):
        RouterConfig(balance=-1)


def test_adapters_on_experts_are_refused_with_what_to_do(tmp_path):
    """By both doors: what is to be trained, and what PEFT has trained."""
    import json

    from safetensors.torch import save_file

    from transect.checkpoints.adapter_peft import read_adapter
    from transect.train.adapters.lora import attach
    from transect.train.config import LoRAConfig

    plain = dataclasses.replace(CONFIG, moe=MoEConfig(6, 2, 16))
    for targets in (("q", "gate"), ("up_proj",)):
        with pytest.raises(ValueError, match=r"experts have no adapters: .* some of embed, head, k, o, q, v"):
            attach(drawn(plain, torch.float32), LoRAConfig(targets=targets), seed=0)
    assert len(attach(drawn(plain, torch.float32), LoRAConfig(targets=("q", "v")), seed=0)) == 4
    names = attach(drawn(plain, torch.float32), LoRAConfig(), seed=0)  # nobody chose: what has adapters gets them
    assert {name.split(".")[-1] for name in names} == {"q", "k", "v", "o"} and len(names) == 8
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    for module in ("mlp.experts.2.up_proj", "mlp.experts", "mlp.experts.base_layer"):
        name = f"base_model.model.model.layers.0.{module}.lora_{{}}.weight"
        factors = {name.format("A"): torch.zeros(4, 32), name.format("B"): torch.zeros(16, 4)}
        save_file(factors, tmp_path / "adapter_model.safetensors")
        with pytest.raises(ValueError, match=r"factors for experts .*merge_and_unload"):
            read_adapter(tmp_path, plain)
