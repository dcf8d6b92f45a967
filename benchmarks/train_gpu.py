"""Training on one GPU beside transformers, Liger-Kernel and PEFT: tokens per second, MFU and peak memory.

    python benchmarks/train_gpu.py OUT.json [--only NAME,...] [--seconds 20]

Each contender runs in a process of its own on the same random tokens: 2 x 4096 a step, bfloat16 weights and optimizer
state, AdamW (fused), no gradient clipping, no activation checkpointing. Random weights of the true shapes.
Contenders that need a package that is not installed are listed with the reason.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

SEQUENCE, ROWS = 4096, 2
WORK = {
    "full 1b": ("llama-3.2-1b", "pretrain"),
    "lora 8b": ("llama-3.1-8b", "lora"),
    "qlora 8b": ("llama-3.1-8b", "qlora"),
}
CONTENDERS = {
    "full 1b": ("transect", "transformers", "liger"),
    "lora 8b": ("transect", "liger compiled"),
    "qlora 8b": ("transect",),
}


def transect(shape: str, task: str) -> Callable[[], tuple[float, dict[str, Any]]]:
    """One step of our trainer."""
    import numpy as np

    from transect.train.config import TrainConfig
    from transect.train.tokens import token_dtype, write_meta
    from transect.train.trainer import Trainer

    folder = Path(tempfile.mkdtemp()) / "random.tokens"
    folder.mkdir()
    count = 40 * SEQUENCE * ROWS
    tokens = np.random.default_rng(0).integers(0, 10000, count).astype(token_dtype(128256))
    tokens.tofile(folder / "tokens.bin")
    np.arange(SEQUENCE, count + 1, SEQUENCE, dtype=np.uint64).tofile(folder / "ends.bin")
    write_meta(folder, count, count // SEQUENCE, 128256, "none")
    config = TrainConfig.from_dict(
        {
            "model": shape,
            "load_format": "dummy",
            "task": task,
            "steps": 10**6,
            "precision": "bfloat16",
            "checkpointing": "none",
            "data": {"train": [str(folder)], "seq_len": SEQUENCE, "micro_batch": SEQUENCE * ROWS},
            "optimizer": {"learning_rate": 1e-5, "clip": 0.0},
            "lora": {"rank": 16},
        }
    )
    trainer = Trainer(config)

    def step() -> tuple[float, dict[str, Any]]:
        record = trainer.step()
        return record.loss, {}

    return step


def peer(shape: str, task: str, *, liger: bool, compiled: bool) -> Callable[[], tuple[float, dict[str, Any]]]:
    """One step of transformers, with Liger-Kernel, PEFT and torch.compile where asked for."""
    import torch
    import transformers

    from transect.models.presets import PRESETS

    if liger:
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama()
    values = PRESETS[shape].to_hf()
    values.pop("architectures", None)
    config = transformers.LlamaConfig(**{k: v for k, v in values.items() if k != "model_type"})
    config._attn_implementation = "sdpa"
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = transformers.LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    if task == "lora":
        import peft

        targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        model = peft.get_peft_model(
            model, peft.LoraConfig(r=16, lora_alpha=32, target_modules=targets), autocast_adapter_dtype=False
        )
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    generator = torch.Generator().manual_seed(0)
    data = torch.randint(0, 10000, (40, ROWS, SEQUENCE), generator=generator).cuda()
    run = torch.compile(model) if compiled else model
    count = 0

    def step() -> tuple[float, dict[str, Any]]:
        nonlocal count
        ids = data[count % len(data)]
        count += 1
        loss = run(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss), {}

    return step


def measure(work: str, contender: str, seconds: float) -> dict[str, Any]:
    """In this process: warm up, then time steps for a while."""
    import torch

    shape, task = WORK[work]
    begin = time.perf_counter()
    if contender == "transect":
        step = transect(shape, task)
    else:
        step = peer(shape, task, liger="liger" in contender, compiled="compiled" in contender)
    built = time.perf_counter() - begin
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    warm = time.perf_counter() - begin - built
    torch.cuda.reset_peak_memory_stats()
    times: list[float] = []
    loss = 0.0
    end = time.perf_counter() + seconds
    while len(times) < 5 or (time.perf_counter() < end and len(times) < 40):
        start = time.perf_counter()
        loss, _ = step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    tokens = SEQUENCE * ROWS
    median = statistics.median(times)
    return {
        "work": work,
        "contender": contender,
        "tokens_per_second": tokens / median,
        "step_seconds": {"median": median, "min": min(times), "max": max(times), "runs": len(times)},
        "mfu": useful_flops(shape, task) / median / 750e12,
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "build_seconds": built,
        "warm_up_seconds": warm,
        "last_loss": loss,
    }


def useful_flops(shape: str, task: str) -> float:
    """FLOPs of a step."""
    from transect.models.presets import PRESETS
    from transect.train.flops import flops_per_token

    return SEQUENCE * ROWS * flops_per_token(PRESETS[shape], SEQUENCE, frozen=task != "pretrain")


def profile(work: str, out: str) -> None:
    """Where a step of ours spends the GPU's time, as a table."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as watch

    step = transect(*WORK[work])
    for _ in range(3):
        step()
    with watch(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        step()
    Path(out).write_text(found.key_averages().table(sort_by="cuda_time_total", row_limit=45, max_name_column_width=70))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--seconds", type=float, default=12)
    parser.add_argument("--one", nargs=2)
    parser.add_argument("--profile", default="")
    arguments = parser.parse_args()
    if arguments.profile:
        profile(arguments.profile, str(arguments.out))
        return
    if arguments.one:
        arguments.out.write_text(json.dumps(measure(*arguments.one, arguments.seconds)))
        return
    from transect.hardware.environment import environment

    rows = []
    chosen = arguments.only.split(",") if arguments.only else list(WORK)
    for work in chosen:
        for contender in CONTENDERS[work]:
            part = Path(tempfile.mkdtemp()) / "part.json"
            command = [
                sys.executable,
                __file__,
                str(part),
                "--seconds",
                str(arguments.seconds),
                "--one",
                work,
                contender,
            ]
            done = subprocess.run(command, capture_output=True, text=True, timeout=400)
            if part.exists():
                row = json.loads(part.read_text())
            else:
                row = {"work": work, "contender": contender, "error": done.stderr.strip().splitlines()[-1:]}
                print(done.stderr[-3000:], file=sys.stderr)
            print({k: v for k, v in row.items() if k != "step_seconds"}, flush=True)
            rows.append(row)
    result = {
        "command": "python benchmarks/train_gpu.py OUT.json",
        "method": "each contender in its own process, 2 x 4096 random tokens a step, bfloat16 weights and AdamW state; "
        "MFU by useful FLOPs at 750 TFLOP/s",
        "rows": rows,
        "environment": environment(),
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
