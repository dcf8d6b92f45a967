"""The table of what gradients keep, against what autograd really holds while a tiny model runs."""

from dataclasses import replace

import pytest
import torch
from effort import proving, quick_first

from transect.costs.memory.part import RankPart
from transect.costs.memory.training import Account
from transect.costs.memory.training_plan import TrainingPlan
from transect.models.context import VarlenContext
from transect.models.decoder import Decoder
from transect.ops.lang.jit import INTERPRETED
from transect.ops.opset import resolve_ops
from transect.ops.registry import get
from transect.spec.model import ModelConfig
from transect.train.adapters.lora import attach
from transect.train.adapters.qlora import quantize_layers
from transect.train.config import LoRAConfig
from transect.train.model.activations import stack_with

TOKENS, RANK = 64, 3
SHAPES = {
    "llama": {"architecture": "llama"},
    "qwen3": {"architecture": "qwen3", "qk_norm": True, "tied_embeddings": True},
    "gpt2": {
        "architecture": "gpt2", "norm": "layernorm", "activation": "gelu_tanh", "gated_mlp": False, "qkv_bias": True,
        "o_bias": True, "mlp_bias": True, "position": "learned", "n_kv_heads": 4, "tied_embeddings": True,
    },
}  # fmt: skip


def config_of(name):
    sizes = {
        "vocab_size": 48, "dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 16, "ffn_dim": 128,
        "max_position": 64,
    }  # fmt: skip
    return ModelConfig(**{**sizes, **SHAPES[name]})


def operators(backend):
    """Those that a training run has: torch's, or the ones that a GPU runs, here on CPU tensors."""
    ops = resolve_ops("cpu", ("cpu", "torch"), differentiable=True)
    if backend == "cpu":
        return ops
    names = ("rms_norm", "layer_norm", "rotary", "swiglu", "gelu", "linear", "attention")
    found = {name: get(name).implementations["triton"].autograd() for name in names}
    return replace(ops, **found)


def held_by_autograd(config, plan):
    """Bytes of distinct storages that a forward pass leaves for its backward pass; weights and buffers not counted."""
    generator = torch.Generator().manual_seed(0)
    model = Decoder(config, dtype={4: torch.float32, 2: torch.bfloat16}[plan.element], ops=operators(plan.backend))
    model.init_weights(generator=generator)
    if plan.task == "qlora":
        quantize_layers(model, LoRAConfig(group=plan.group))
    if plan.adapted:
        attach(model, LoRAConfig(rank=RANK, targets=plan.targets), seed=0)
    model.stack = stack_with(model, plan.checkpointing)
    own = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        # Copies of weights in float32, which torch's norms make, belong to no token.
        if storage.data_ptr() not in own and tensor.shape[0] != config.dim:
            kept[storage.data_ptr()] = storage  # held, so that no address comes twice
        return tensor

    tokens = torch.randint(0, config.vocab_size, (TOKENS - 1,), generator=generator)
    context = VarlenContext(torch.tensor([0, 40, TOKENS - 1], dtype=torch.int32), model.ops)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(tokens, context.positions(), context)
    held = sum(storage.nbytes() for storage in kept.values())
    if plan.checkpointing == "full" and model.rope is not None:
        held += 4 * config.head_dim * len(tokens)  # cos and sin: arguments of the checkpoint, out of autograd's sight
    return held


def predicted(config, plan):
    return Account(replace(plan, micro_batch=TOKENS - 1, rank=RANK), RankPart.whole(config)).kept_bytes(config.n_layers)


CASES = [
    *(("llama", task, kept, precision) for task in ("finetune", "lora") for kept in ("none", "selective", "full")
      for precision in ("float32", "bfloat16")),
    ("llama", "qlora", "none", "bfloat16"),
    ("qwen3", "finetune", "none", "bfloat16"),
    ("qwen3", "lora", "selective", "float32"),
    ("gpt2", "finetune", "none", "float32"),
    ("gpt2", "finetune", "selective", "bfloat16"),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "task", "kept", "precision"), CASES)
def test_torch_operators_keep_what_the_table_says(shape, task, kept, precision):
    torch.set_num_threads(1)
    config = config_of(shape)
    plan = TrainingPlan(task=task, checkpointing=kept, precision=precision, group=32, backend="cpu")
    assert predicted(config, plan) == pytest.approx(held_by_autograd(config, plan), rel=0.05)


@pytest.mark.skipif(not INTERPRETED, reason="Triton's interpreter is chosen before its import, where there is no GPU")
@pytest.mark.parametrize(
    ("shape", "task", "kept", "precision"),
    quick_first(
        dict.fromkeys(CASES[::3] + CASES[-4:]),
        [("llama", "lora", "selective", "bfloat16"), ("qwen3", "finetune", "none", "bfloat16"),
         ("gpt2", "finetune", "none", "float32")],
    ),
)  # fmt: skip
def test_gpu_operators_keep_what_the_table_says(shape, task, kept, precision):
    torch.set_num_threads(1)
    config = replace(config_of(shape), n_layers=2 if proving() else 1)
    plan = TrainingPlan(task=task, checkpointing=kept, precision=precision, group=32, backend="gpu")
    assert predicted(config, plan) == pytest.approx(held_by_autograd(config, plan), rel=0.05)


def test_adapters_on_some_matrices_keep_less():
    config = config_of("llama")
    few = TrainingPlan(task="lora", targets=("q", "v"), backend="cpu")
    assert predicted(config, few) == pytest.approx(held_by_autograd(config, few), rel=0.05)
    assert predicted(config, few) < predicted(config, TrainingPlan(task="lora", backend="cpu"))
