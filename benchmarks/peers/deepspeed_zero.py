"""Training steps of DeepSpeed's ZeRO on one device, with states and weights in host memory where asked for."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Any

from benchmarks.peers.peer import TrainingStep
from benchmarks.peers.training import ADAMW, model_of

PACKAGES = ("deepspeed", "transformers", "torch")
HOST = {"device": "cpu", "pin_memory": True}
STAGES: dict[str, dict[str, Any]] = {
    "none": {"stage": 1},
    "optimizer": {"stage": 2, "offload_optimizer": HOST, "overlap_comm": True, "contiguous_gradients": True},
    "all": {"stage": 3, "offload_optimizer": HOST, "offload_param": HOST, "overlap_comm": True},
}
"""ZeRO stages by the state that goes to host memory, as DeepSpeed's tutorials combine them."""


def one_process() -> None:
    """Set the variables of a job of one process, as a launcher would."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    job = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in job.items()}


def zero(values: Mapping[str, Any], offload: str, rows: int, length: int, device: str = "cuda") -> TrainingStep:
    """Return a step of transformers' model under ZeRO: bfloat16, float32 master weights, AdamW, gradients clipped at 1.

    On a GPU the model has Liger-Kernel's operators where that package is installed.

    Args:
        values: of the model's ``config.json``.
        offload: one of ``STAGES``.
    """
    one_process()
    import deepspeed
    import torch

    if device == "cuda":
        import liger_kernel.transformers

        getattr(liger_kernel.transformers, f"apply_liger_kernel_to_{values['model_type']}")()
    model = model_of(values, device, use_cache=False)
    adamw = {name: value for name, value in ADAMW.items() if name != "fused"}
    if offload == "none":  # on the device torch's fused AdamW; on the host DeepSpeed's own, in C++
        adamw |= {"torch_adam": True, "fused": device == "cuda"}
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": rows,
            "gradient_accumulation_steps": 1,
            "bf16": {"enabled": True},
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": adamw},
            "zero_optimization": STAGES[offload],
        },
    )
    generator = torch.Generator().manual_seed(0)
    vocabulary = min(10_000, values["vocab_size"])
    data = torch.randint(0, vocabulary, (40, rows, length), generator=generator).to(device)
    count = 0

    def step() -> Any:
        nonlocal count
        ids = data[count % len(data)]
        count += 1
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step
