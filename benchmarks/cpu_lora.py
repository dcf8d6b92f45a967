"""LoRA fine-tuning on this machine's processor beside transformers + PEFT: tokens per second of whole training steps.

SmolLM2-135M in float32, adapters of rank 16 on all seven matrices of each layer, AdamW, clipping by the global norm;
the same weights, tokens and labels in every step on both sides. Two kinds of work:

* rows    2 windows of 512 tokens, every token with a label
* chats   documents of 40 to 400 tokens, about 1024 tokens a step, labels on the assistant's part alone

The peer runs as its users would run it, in each of these ways, and the best median counts: ``padded`` (a batch of rows,
chats padded to the longest), ``packed`` (one row, documents told apart by their positions, as transformers does it with
SDPA) and, for both, ``labels`` (``logits_to_keep`` names the tokens that have one, so that no other logits are made).

Each contender runs in a process of its own, in turn, over several rounds. A round waits until the machine's load is
low; the ratio is the median of the rounds' ratios. Tokens are real ones, padding is not counted.

    python benchmarks/cpu_lora.py [--rounds 5] [--threads 2] [--model smollm2-135m]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import record

RANK, ALPHA = 16, 32.0
TARGETS = ("q", "k", "v", "o", "gate", "up", "down")
SETTINGS = {"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.0, "clip": 1.0}
WORK = {"rows": ("padded",), "chats": ("padded", "padded labels", "packed", "packed labels")}
"""Name: the ways in which the peer does it."""
STEP_TOKENS, ROW = 1024, 512
WORDS = [
    "a",
    "light",
    "wind",
    "moved",
    "over",
    "the",
    "low",
    "hills",
    "and",
    "the",
    "river",
    "ran",
    "slowly",
    "past",
    "old",
    "stone",
    "houses",
    "while",
    "people",
    "slept",
]
TOLERANCE = 1e-3
"""How far the losses of the two sides may be apart, in nats: they do the same steps on the same tokens."""


def write_data(folder: Path) -> None:
    """A text, and chats of random lengths, the same on every run."""
    rng = random.Random(0)

    def words(count: int) -> str:
        return " ".join(rng.choice(WORDS) for _ in range(count))

    (folder / "rows.txt").write_text(words(30 * STEP_TOKENS))
    with (folder / "chats.jsonl").open("w") as file:
        for _ in range(200):
            length = min(360, max(30, int(rng.lognormvariate(4.7, 0.6))))
            asked = rng.randrange(length // 4, length // 2)
            talk = [{"role": "user", "content": words(asked)}, {"role": "assistant", "content": words(length - asked)}]
            file.write(json.dumps({"messages": talk}) + "\n")


def write_model(name: str, folder: Path) -> None:
    """The model in float32 and Hugging Face layout, for both sides to load."""
    from transect.train.config import TrainConfig
    from transect.train.model import build

    trainable = build(TrainConfig(model=name, device="cpu"))
    trainable.write(trainable.snapshot(), folder)


def config_of(work: str, folder: Path, threads: int) -> Any:
    from transect.train.config import TrainConfig

    data = folder / ("rows.txt" if work == "rows" else "chats.jsonl")
    return TrainConfig.from_dict(
        {
            "model": str(folder / "model"),
            "task": "lora",
            "steps": 10**6,
            "device": "cpu",
            "threads": threads,
            "checkpointing": "none",
            "data": {"train": [str(data)], "seq_len": ROW, "micro_batch": STEP_TOKENS},
            "optimizer": SETTINGS,
            "schedule": {"kind": "constant"},
            "lora": {"rank": RANK, "alpha": ALPHA, "targets": list(TARGETS)},
        }
    )


def ours(work: str, folder: Path, threads: int) -> tuple[Callable[[], tuple[float, int]], str]:
    """One step of the trainer: (loss, tokens)."""
    from transect.train.trainer import Trainer

    trainer = Trainer(config_of(work, folder, threads))

    def step() -> tuple[float, int]:
        done = trainer.step()
        return done.loss, done.tokens

    return step, ", ".join(f"{op} {which}" for op, which in trainer.model.ops.chosen if which != "torch")


def peer(work: str, way: str, folder: Path, threads: int) -> Callable[[], tuple[float, int]]:
    """One step of transformers + PEFT on the batches that the trainer would see: (loss, tokens)."""
    import peft
    import torch
    import transformers

    from transect.train.data import Loader, load_stream
    from transect.train.model import build

    torch.set_num_threads(threads)
    config = config_of(work, folder, threads)
    source = build(config)
    loader = Loader(
        load_stream(config.data.train, source.source.config.vocab_size, source.tokenizer, source.template),
        config.data,
        config.seed,
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "model", dtype=torch.float32, attn_implementation="sdpa"
    )
    modules = [f"{target}_proj" for target in TARGETS]
    model = peft.get_peft_model(model, peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=modules))
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    betas = (SETTINGS["beta1"], SETTINGS["beta2"])
    optimizer = torch.optim.AdamW(trained, SETTINGS["learning_rate"], betas, weight_decay=0.0, fused=True)

    def arguments(batch: Any) -> dict[str, Any]:
        if way.startswith("packed"):
            made = {
                "input_ids": batch.tokens_T[None],
                "position_ids": batch.positions_T[None],
                "shift_labels": batch.labels_T[None],
            }
        else:
            sizes = batch.cu_seqlens.diff().tolist()
            tokens, labels = (
                torch.nn.utils.rnn.pad_sequence(x.split(sizes), batch_first=True, padding_value=fill)
                for x, fill in ((batch.tokens_T, 0), (batch.labels_T, -100))
            )
            made = {"input_ids": tokens, "shift_labels": labels}
            if len(set(sizes)) > 1:
                made["attention_mask"] = (torch.arange(tokens.shape[1]) < torch.tensor(sizes)[:, None]).long()
        if way.endswith("labels"):  # positions with a label in any row
            kept = (made["shift_labels"] != -100).any(0).nonzero()[:, 0]
            made |= {"logits_to_keep": kept, "shift_labels": made["shift_labels"][:, kept].contiguous()}
        return made

    def step() -> tuple[float, int]:
        batch = next(loader)
        made = arguments(batch)
        loss = model(**made, labels=made["shift_labels"], use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, SETTINGS["clip"])
        optimizer.step()
        optimizer.zero_grad()
        return loss.item(), batch.num_tokens

    return step


def one(options: argparse.Namespace) -> dict[str, Any]:
    """In this process: a first step to warm up, then timed ones."""
    side, work, way = options.one
    folder = options.folder
    kernels = ""
    if side == "transect":
        step, kernels = ours(work, folder, options.threads)
    else:
        step = peer(work, way, folder, options.threads)
    losses, rates = [step()[0]], []
    for _ in range(options.steps):
        start = time.perf_counter()
        loss, tokens = step()
        rates.append(tokens / (time.perf_counter() - start))
        losses.append(loss)
    return {"rate": statistics.median(rates), "losses": losses, "peak": record.peak_memory_bytes(), "kernels": kernels}


def measure(side: str, work: str, way: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One contender in a process of its own."""
    arguments = ["--one", side, work, way, "--folder", str(folder), "--threads", str(options.threads)]
    done = subprocess.run(
        [sys.executable, __file__, *arguments, "--steps", str(options.steps)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": str(options.threads)},
    )
    if done.returncode:
        raise SystemExit(f"{side} {work} {way} failed:\n{done.stderr[-3000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def wait_until_quiet(most: float, patience: float = 120.0) -> float:
    """Wait for the load of the last minute to fall below ``most``; the load at which it went on."""
    end = time.monotonic() + patience
    while os.getloadavg()[0] > most and time.monotonic() < end:
        time.sleep(5)
    return os.getloadavg()[0]


def step_flops(model: str, folder: Path) -> dict[str, float]:
    """FLOPs a token that the work needs: products forward and for the gradient of x, adapters thrice, attention 3.5
    times; the head only where there are labels. The first layer's inputs need no gradient."""
    from transect.models.cost import Row, step_cost
    from transect.models.resolve import resolve
    from transect.train.data import Loader, load_stream
    from transect.train.model import build

    shape = resolve(model).config
    flops = {}
    for work in WORK:
        config = config_of(work, folder, 1)
        source = build(config)
        stream = load_stream(config.data.train, shape.vocab_size, source.tokenizer, source.template)
        loader = Loader(stream, config.data, config.seed)
        needed, tokens = 0.0, 0
        adapters = sum(p.numel() for p in source.parameters.values())
        for _ in range(8):
            batch = next(loader)
            lengths = batch.cu_seqlens.diff().tolist()
            costs = step_cost(shape, [Row(n, n) for n in lengths], logit_rows=batch.num_labels)
            needed += 2 * (costs["linear"].flops + costs["head"].flops) + 3.5 * costs["paged_attention"].flops
            needed += 6 * adapters * batch.num_tokens
            needed -= 2 * batch.num_tokens * shape.dim * (shape.q_dim + 2 * shape.kv_dim)
            tokens += batch.num_tokens
        flops[work] = needed / tokens
    return flops


def table(result: dict[str, Any]) -> str:
    lines = [
        "| work | Transect tok/s | PEFT tok/s (best way) | ratio (min to max) | floor tok/s | of floor |",
        "|---|---|---|---|---|---|",
    ]
    for work, row in result["work"].items():
        ratio = row["ratio"]
        lines.append(
            f"| {work} | {row['transect']['median']:.0f} | {row['peer']['median']:.0f} ({row['way']}) | "
            f"{ratio['median']:.2f}x ({ratio['min']:.2f} to {ratio['max']:.2f}) | {row['floor']:.0f} | "
            f"{row['transect']['median'] / row['floor']:.0%} |"
        )
    memory = result["peak_memory_bytes"]
    lines.append(
        f"\npeak memory (rows): Transect {memory['transect'] / 2**20:.0f} MiB, transformers + PEFT "
        f"{memory['peer'] / 2**20:.0f} MiB; load of the machine before each round {result['load']['median']:.1f} "
        f"({result['load']['min']:.1f} to {result['load']['max']:.1f})"
    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="timed steps of a contender in a round")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--quiet", type=float, default=0.8, help="load of the machine below which a round starts")
    parser.add_argument("--out", type=Path, default=record.RESULTS / "cpu" / "lora.json")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(options)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_data(folder)
        write_model(options.model, folder / "model")
        record.write(options.out, race(folder, options))
    print(table(json.loads(options.out.read_text())))


def race(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Choose the peer's best way, then the rounds."""
    from transect.ops.cpu import ceilings, library

    flops = step_flops(options.model, folder)
    best = {}
    for work, ways in WORK.items():
        tried = {way: measure("peer", work, way, folder, options)["rate"] for way in ways}
        print(work, "peer:", {way: round(rate) for way, rate in tried.items()}, file=sys.stderr)
        best[work] = max(tried, key=lambda way: tried[way])
    rounds, loads, rates = [], [], []
    for number in range(options.rounds):
        loads.append(wait_until_quiet(options.quiet))
        rates.append(ceilings.measure(library.load(options.threads)).flops_per_second["float32"])
        found = {
            work: {side: measure(side, work, best[work], folder, options) for side in ("transect", "peer")}
            for work in WORK
        }
        for work, sides in found.items():
            apart = max(abs(a - b) for a, b in zip(*(sides[s]["losses"] for s in ("transect", "peer")), strict=True))
            if apart > TOLERANCE:
                raise SystemExit(f"{work}: the losses of the two sides are {apart:.4f} apart: not the same work")
        ratios = {work: round(s["transect"]["rate"] / s["peer"]["rate"], 2) for work, s in found.items()}
        print(f"round {number + 1}:", ratios, f"load {loads[-1]:.1f}", file=sys.stderr)
        rounds.append(found)
    return {
        "command": "python benchmarks/cpu_lora.py",
        "environment": record.environment(("torch", "numpy", "transformers", "peft")),
        "threads": options.threads,
        "model": options.model,
        "kernels": rounds[0]["rows"]["transect"]["kernels"],
        "load": record.summary(loads),
        "work": {
            work: {
                "way": best[work],
                "transect": record.summary([r[work]["transect"]["rate"] for r in rounds]),
                "peer": record.summary([r[work]["peer"]["rate"] for r in rounds]),
                "ratio": record.summary([r[work]["transect"]["rate"] / r[work]["peer"]["rate"] for r in rounds]),
                "flops_per_token": flops[work],
                "floor": statistics.median(rates) / flops[work],
            }
            for work in WORK
        },
        "peak_memory_bytes": {
            side: statistics.median(r["rows"][side]["peak"] for r in rounds) for side in ("transect", "peer")
        },
    }


if __name__ == "__main__":
    main()
