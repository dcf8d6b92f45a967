"""One small model pretrained by this trainer and by transformers with torch's AdamW: the same losses, how fast each.

    python benchmarks/train/pretrain_race.py OUT.json TEXT [--steps 80]

The model is that of examples/pretrain (``library-h200``: a Llama of 512 x 8, bytes for tokens). All start from the
same weights and see the same rows of 1024 tokens of TEXT, 64 a step, in the same order, under the same schedule, AdamW,
decay and clipping. Here: ``precision = "mixed"`` (bfloat16 weights to compute with, float32 master copies).
transformers: float32 weights, autocast to bfloat16, SDPA, fused AdamW; eager and under torch.compile. Each contender is
a process; all build and warm up (kernels compile), then each runs alone, from the first weights.
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

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples" / "pretrain"))

SEQUENCE = 1024
CONTENDERS = ("transect", "transformers", "transformers compiled")
WARM = 3

Run = Callable[[int], list[tuple[float, float]]]
"""Loss and seconds of each of some steps, from the first weights."""


def settings(folder: Path, steps: int, device: str, rows: int) -> Any:
    """Return the run, whose settings transformers follows too."""
    from transect.train.config import TrainConfig

    return TrainConfig.from_dict(
        {
            "model": str(folder / "model"),
            "task": "pretrain",
            "run_dir": str(folder / "run"),
            "steps": steps,
            "precision": "mixed" if device == "cuda" else "float32",
            "checkpointing": "none",
            "device": device,
            "data": {"train": [str(folder / "rows.tokens")], "seq_len": SEQUENCE, "micro_batch": rows * SEQUENCE},
            "optimizer": {"learning_rate": 1e-3},
            "schedule": {"kind": "cosine", "warmup": 20},
        }
    )


def prepare(folder: Path, text: bytes, device: str, layers: int, dim: int) -> None:
    """Write the model's directory with first weights, and a token file whose documents are rows of ``SEQUENCE``
    tokens."""
    import numpy as np
    from byte_model import ROWS, Shape, write_model

    from transect.checkpoints.hf_out import save_hf
    from transect.train.data.tokens import token_dtype, write_meta
    from transect.train.model.build import build

    write_model(folder / "model", Shape(dim, layers, heads=dim // 64, ffn=-(-dim // 24) * 64, context=SEQUENCE))
    (folder / "model" / "tokenizer.json").unlink()  # the rows are bytes already
    tokens = np.frombuffer(text[: len(text) // SEQUENCE * SEQUENCE], np.uint8).astype(token_dtype(ROWS))
    out = folder / "rows.tokens"
    out.mkdir()
    tokens.tofile(out / "tokens.bin")
    np.arange(SEQUENCE, len(tokens) + 1, SEQUENCE, dtype=np.uint64).tofile(out / "ends.bin")
    write_meta(out, len(tokens), len(tokens) // SEQUENCE, ROWS, "bytes")
    trainable = build(settings(folder, 1, device, 1))
    (folder / "first").mkdir()
    save_hf(trainable.snapshot(), trainable.source.config, folder / "first")


def transect(config: Any) -> Run:
    """Run this trainer. Its first weights follow from the seed."""
    from transect.train.loop.trainer import Trainer

    def run(steps: int) -> list[tuple[float, float]]:
        trainer = Trainer(config)
        records = [trainer.step() for _ in range(steps)]
        return [(record.loss, record.seconds) for record in records]

    return run


def peer(config: Any, folder: Path, *, compiled: bool) -> Run:
    """Run transformers, from the weights that were saved, on the batches that this trainer would make."""
    import torch
    import transformers

    from transect.train.data.loader import Loader, load_stream
    from transect.train.loop.schedule import factor

    device = torch.device(config.device)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "first", dtype=torch.float32, attn_implementation="sdpa"
    ).to(device)
    model.train()
    first = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    forward = torch.compile(model) if compiled else model
    rates = config.optimizer
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]

    def run(steps: int) -> list[tuple[float, float]]:
        model.load_state_dict(first)
        groups = [{"params": matrices, "weight_decay": rates.weight_decay}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(
            groups, lr=rates.learning_rate, betas=(rates.beta1, rates.beta2), eps=rates.eps, fused=device.type == "cuda"
        )
        loader = Loader(load_stream(config.data.train, model.config.vocab_size), config.data, config.seed, ahead=True)
        found = []
        for step in range(steps):
            begin = time.perf_counter()
            batch = next(loader).to(device)
            rows = batch.tokens_T.view(-1, SEQUENCE)
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                loss = forward(input_ids=rows, labels=rows, use_cache=False).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), rates.clip)
            for group in optimizer.param_groups:
                group["lr"] = rates.learning_rate * factor(config.schedule, step, config.steps)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            found.append((loss.item(), time.perf_counter() - begin))
        return found

    return run


def contender(name: str, folder: Path, steps: int, device: str, rows: int) -> None:
    """Build, warm up, say so, wait for a line, run, and print what came of it."""
    config = settings(folder, steps, device, rows)
    run = transect(config) if name == "transect" else peer(config, folder, compiled="compiled" in name)
    run(WARM)
    print("ready", flush=True)
    input()
    found = run(steps)
    import torch

    losses, times = [loss for loss, _ in found], [seconds for _, seconds in found[WARM:]]
    median = statistics.median(times)
    print(
        json.dumps(
            {
                "contender": name,
                "tokens_per_second": rows * SEQUENCE / median,
                "step_seconds": {"median": median, "min": min(times), "max": max(times), "runs": len(times)},
                "peak_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else 0,
                "losses": losses,
            }
        ),
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--without", default="", help="contenders to leave out, by comma")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        contender(options.one[0], Path(options.one[1]), options.steps, options.device, options.rows)
        return
    from transect.hardware.environment import environment

    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder, options.text.read_bytes(), options.device, options.layers, options.dim)
        names = [one for one in CONTENDERS if one not in options.without.split(",")]
        started = [
            subprocess.Popen(
                [sys.executable, __file__, *sys.argv[1:], "--one", one, name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for one in names
        ]
        try:
            ready = [one.stdout is not None and one.stdout.readline().strip() == "ready" for one in started]
            for one, process, built in zip(names, started, ready, strict=True):
                if not built:
                    rows.append({"contender": one, "error": "ended while it was built; see above"})
                    continue
                answer, _ = process.communicate("go\n", timeout=300)
                rows.append(json.loads(answer.splitlines()[-1]))
                print({k: v for k, v in rows[-1].items() if k != "losses"}, flush=True)
        finally:
            for process in started:
                process.kill()
                process.wait()
    ours = rows[0].get("losses", [])
    for row in rows[1:]:
        row["largest_difference"] = max(
            (abs(a - b) for a, b in zip(ours, row.get("losses", []), strict=False)), default=None
        )
    result = {
        "command": f"python benchmarks/train/pretrain_race.py OUT.json TEXT --steps {options.steps}",
        "method": f"{options.dim} x {options.layers} Llama of bytes, {options.rows} x {SEQUENCE} tokens a step; "
        "the same first weights, rows, AdamW, schedule and clipping; each contender alone after all are warm",
        "rows": rows,
        "environment": environment(("torch", "numpy", "triton", "transformers")),
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
