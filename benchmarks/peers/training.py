"""Training steps of transformers' models: alone, with Liger-Kernel, PEFT and torch.compile, or under torch's FSDP2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.peers.peer import TrainingStep

EXPERTS = "grouped_mm"
"""Implementation of products by experts in transformers."""
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ADAMW = {"lr": 1e-5, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}


def model_of(values: Mapping[str, Any], device: str = "cuda", **settings: Any) -> Any:
    """Return transformers' model of a ``config.json`` in bfloat16 on a device, with random weights."""
    import torch
    import transformers

    family = values["model_type"]
    made = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe"}[family]
    left = {k: v for k, v in values.items() if k not in ("model_type", "architectures", "torch_dtype")}
    config = getattr(transformers, f"{made}Config")(**left | settings)
    config._attn_implementation = "sdpa"
    if family.endswith("moe"):
        config._experts_implementation = EXPERTS
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = getattr(transformers, f"{made}ForCausalLM")(config)
    torch.set_default_dtype(torch.float32)
    return model.train()


def step_of(run: Any, parameters: Any, rows: int, length: int, seed: int) -> TrainingStep:
    """Return a step of ``run`` on random tokens, ``rows`` documents of ``length``, by fused AdamW."""
    import torch

    optimizer = torch.optim.AdamW(parameters, **ADAMW)
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 10000, (40, rows, length), generator=generator).cuda()
    count = 0

    def step() -> Any:
        nonlocal count
        ids = data[count % len(data)]
        count += 1
        loss = run(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def one_gpu(
    values: Mapping[str, Any], task: str, rows: int, length: int, *, liger: bool, compiled: bool, grouped: bool
) -> TrainingStep:
    """Return a step of transformers, with Liger-Kernel, PEFT and torch.compile where asked for.

    Args:
        values: of the model's ``config.json``.
        grouped: Liger-Kernel leaves experts alone.
    """
    import torch

    if liger:
        import liger_kernel.transformers

        how = {"swiglu": False} if grouped else {}
        getattr(liger_kernel.transformers, f"apply_liger_kernel_to_{values['model_type']}")(**how)
    model = model_of(values)
    if task == "lora":
        import peft

        lora = peft.LoraConfig(r=16, lora_alpha=32, target_modules=list(TARGETS))
        model = peft.get_peft_model(model, lora, autocast_adapter_dtype=False)
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    return step_of(torch.compile(model) if compiled else model, trained, rows, length, 0)


def fsdp2(values: Mapping[str, Any], rows: int, length: int, *, compiled: bool) -> TrainingStep:
    """Return a step of transformers' Llama with Liger-Kernel under torch's FSDP2, on all ranks."""
    import torch
    import torch.distributed as dist
    from liger_kernel.transformers import apply_liger_kernel_to_llama
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    apply_liger_kernel_to_llama()
    torch.manual_seed(0)
    model = model_of(values, use_cache=False)  # or every layer would be compiled anew, for the number of its cache
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for index, layer in enumerate(model.model.layers):
        if compiled:
            layer.compile()
        last = index + 1 == len(model.model.layers)
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=not last)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return step_of(model, model.parameters(), rows, length, dist.get_rank())
