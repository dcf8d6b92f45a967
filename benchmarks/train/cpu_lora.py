"""LoRA fine-tuning on this machine's processor beside transformers + PEFT: tokens per second of whole training steps.

SmolLM2-135M in float32, adapters of rank 16 on all seven matrices of each layer, AdamW, clipping by the global norm;
the same weights, tokens and labels in every step on both sides. Two kinds of work:

* rows    2 windows of 512 tokens, every token with a label
* chats   documents of 40 to 400 tokens, about 1024 tokens a step, labels on the assistant's part alone

The peer runs as its users would run it, in each of these ways, and the best median counts: ``padded`` (a batch of rows,
chats padded to the longest), ``packed`` (one row, documents told apart by their positions, as transformers does it with
SDPA), both with ``labels``: ``logits_to_keep`` names the tokens that have one, so that no other logits are made.

Each contender runs in a process of its own, in turn, over several rounds. A round waits until the machine's load is
low; the ratio is the median of the rounds' ratios. Tokens are real ones, padding is not counted. The same ratio is also
taken from the processor time of each side, which other programs on the machine disturb less than the clock.

    python benchmarks/train/cpu_lora.py [--rounds 5] [--threads 2] [--model smollm2-135m]
    python benchmarks/train/cpu_lora.py --parts       products and attention alone, one thread, by its processor time
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
from functools import partial
from pathlib import Path
from typing import Any

import _paths  # noqa: F401
from benchmarks import record

RANK, ALPHA = 16, 32.0
TARGETS = ("q", "k", "v", "o", "gate", "up", "down")
SETTINGS = {"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.0, "clip": 1.0}
WORK = {"rows": ("padded",), "chats": ("packed labels", "padded labels")}
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
FIRST_TOLERANCE, TOLERANCE = 1e-4, 1e-2
"""Largest difference of the losses of the two sides, in nats: in the first step, where adapters change nothing yet, and
later, when they have moved from random starts that are not the same."""


def write_data(folder: Path) -> None:
    """Write a text, and chats of random lengths, the same on every run."""
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
    """Write the model in float32 and Hugging Face layout, for both sides to load."""
    from transect.train.config import TrainConfig
    from transect.train.model.build import build

    trainable = build(TrainConfig(model=name, device="cpu"))
    trainable.snapshot()(folder)


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
    """Return one step of the trainer: (loss, tokens)."""
    from transect.train.loop.trainer import Trainer

    trainer = Trainer(config_of(work, folder, threads))

    def step() -> tuple[float, int]:
        done = trainer.step()
        return done.loss, done.tokens

    return step, ", ".join(f"{op} {which}" for op, which in trainer.model.ops.chosen if which != "torch")


def peer(work: str, way: str, folder: Path, threads: int) -> Callable[[], tuple[float, int]]:
    """Return one step of transformers + PEFT on the batches that the trainer would see: (loss, tokens)."""
    import peft
    import torch
    import transformers

    from transect.train.data.loader import Loader, load_stream
    from transect.train.model.build import build

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
    """Measure in this process: a first step to warm up, then timed ones, of which the best counts, as the least
    disturbed."""
    side, work, way = options.one
    folder = options.folder
    kernels = ""
    if side == "transect":
        step, kernels = ours(work, folder, options.threads)
    else:
        step = peer(work, way, folder, options.threads)
    losses, rates, busy = [step()[0]], [], []
    for _ in range(options.steps):
        start, start_busy = time.perf_counter(), time.process_time()
        loss, tokens = step()
        rates.append(tokens / (time.perf_counter() - start))
        busy.append((time.process_time() - start_busy) / tokens)
        losses.append(loss)
    return {
        "rate": max(rates),
        "processor_seconds_per_token": min(busy),
        "losses": losses,
        "peak": record.peak_memory_bytes(),
        "kernels": kernels,
    }


def measure(side: str, work: str, way: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one contender in a process of its own."""
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
    """Compute the FLOPs per token that the work needs: products forward and for the gradient of x, adapters three
    times, attention 3.5 times; the head only where there are labels. The first layer's inputs need no gradient."""
    from transect.checkpoints.resolve import resolve
    from transect.costs.model import Row, step_cost
    from transect.train.data.loader import Loader, load_stream
    from transect.train.model.build import build

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
        "| work | Transect tok/s | PEFT tok/s (best mode) | ratio (min to max) | ratio by CPU time | floor tok/s "
        "| of floor |",
        "|---|---|---|---|---|---|---|",
    ]
    for work, row in result["work"].items():
        ratio, busy = row["ratio"], row["processor_time_ratio"]
        lines.append(
            f"| {work} | {row['transect']['median']:.0f} | {row['peer']['median']:.0f} ({row['way']}) | "
            f"{ratio['median']:.2f}x ({ratio['min']:.2f} to {ratio['max']:.2f}) | "
            f"{busy['median']:.2f}x ({busy['min']:.2f} to {busy['max']:.2f}) | {row['floor']:.0f} | "
            f"{row['transect']['median'] / row['floor']:.0%} |"
        )
    memory = result["peak_memory_bytes"]
    lines.append(
        f"\npeak memory (rows): Transect {memory['transect'] / 2**20:.0f} MiB, transformers + PEFT "
        f"{memory['peer'] / 2**20:.0f} MiB; load of the machine before each round {result['load']['median']:.1f} "
        f"({result['load']['min']:.1f} to {result['load']['max']:.1f})"
    )
    return "\n".join(lines)


def parts() -> dict[str, Any]:
    """Measure GFLOP/s of one thread, by its processor time (so that other programs matter little), best of several."""
    import torch

    from transect.ops.attention.packed.attention import by_document
    from transect.ops.cpu.gradients import attention
    from transect.ops.cpu.training import kernels

    torch.set_num_threads(1)
    native = kernels(1)

    def rate(flops: float, call: Callable[[], Any]) -> float:
        call()
        times = []
        for _ in range(7):
            start = time.thread_time()
            call()
            times.append(time.thread_time() - start)
        return flops / min(times) / 1e9

    begin = time.thread_time()
    peak = native.library.fma_probe(1_000_000) / (time.thread_time() - begin) / 1e9
    rows = {}
    for outputs, inputs in ((576, 576), (1536, 576), (576, 1536)):
        x, w, g = torch.randn(STEP_TOKENS, inputs), torch.randn(outputs, inputs), torch.randn(STEP_TOKENS, outputs)
        flops = 2.0 * STEP_TOKENS * outputs * inputs
        for name, a, b in (("x W^T", x, w.mT), ("g W", g, w)):
            ours = rate(flops, partial(native.products, [(a, b, 1.0)]))
            theirs = rate(flops, partial(torch.matmul, a, b))
            rows[f"{name}, W {outputs} x {inputs}"] = {"transect": ours, "torch": theirs}
    for length in (512, 128):
        bounds = torch.arange(0, STEP_TOKENS + 1, length, dtype=torch.int32)
        q, k, v = (torch.randn(STEP_TOKENS, heads, 64, requires_grad=True) for heads in (9, 3, 3))
        g = torch.randn_like(q)
        flops = 3.5 * 4 * 64 * 9 * (STEP_TOKENS // length) * length * (length + 1) / 2

        def both(
            call: Callable[..., Any], q: Any = q, k: Any = k, v: Any = v, g: Any = g, bounds: Any = bounds
        ) -> None:
            torch.autograd.grad(call(q, k, v, bounds, 0.125), (q, k, v), g)

        chosen = {"transect": attention(by_document), "torch": by_document}
        rows[f"attention and its gradient, documents of {length}"] = {
            side: rate(flops, partial(both, call)) for side, call in chosen.items()
        }
    return {
        "command": "python benchmarks/train/cpu_lora.py --parts",
        "environment": record.environment(),
        "peak": peak,
        "rows": rows,
    }


def parts_table(result: dict[str, Any]) -> str:
    lines = ["| part | Transect GFLOP/s | of the peak | torch GFLOP/s | ratio |", "|---|---|---|---|---|"]
    for name, row in result["rows"].items():
        lines.append(
            f"| {name} | {row['transect']:.0f} | {row['transect'] / result['peak']:.0%} | {row['torch']:.0f} | "
            f"{row['transect'] / row['torch']:.2f}x |"
        )
    lines.append(f"\npeak: multiply-adds on registers alone, {result['peak']:.0f} GFLOP/s of one thread")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="timed steps of a contender in a round")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--quiet", type=float, default=0.8, help="load of the machine below which a round starts")
    parser.add_argument("--out", type=Path, default=record.RESULTS / "cpu" / "lora.json")
    parser.add_argument("--parts", action="store_true", help="measure products and attention alone")
    parser.add_argument("--chats", choices=WORK["chats"], help="the peer's way with chats; default: the faster one")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.parts:
        result = parts()
        record.write(options.out.with_name("lora_parts.json"), result)
        print(parts_table(result))
        return
    if options.one:
        print(json.dumps(one(options)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_data(folder)
        write_model(options.model, folder / "model")
        race(folder, options)
    print(table(json.loads(options.out.read_text())))


def race(folder: Path, options: argparse.Namespace) -> None:
    """Choose the peer's best way where there are several, then the rounds; what there is is kept after each."""
    from transect.hardware import cpu

    flops = step_flops(options.model, folder)
    best = {}
    for work, ways in WORK.items():
        if work == "chats" and options.chats:
            ways = (options.chats,)
        tried = {way: measure("peer", work, way, folder, options)["rate"] if len(ways) > 1 else 0.0 for way in ways}
        if len(ways) > 1:
            print(work, "peer tok/s:", {way: round(rate) for way, rate in tried.items()}, file=sys.stderr)
        best[work] = max(tried, key=lambda way: tried[way])
    rounds, loads, rates = [], [], []
    for number in range(options.rounds):
        loads.append(wait_until_quiet(options.quiet))
        rates.append(cpu.measure().flops_per_second["float32"])
        found = {
            work: {side: measure(side, work, best[work], folder, options) for side in ("transect", "peer")}
            for work in WORK
        }
        for work, sides in found.items():
            pairs = zip(sides["transect"]["losses"], sides["peer"]["losses"], strict=True)
            apart = [abs(a - b) for a, b in pairs]
            if apart[0] > FIRST_TOLERANCE or max(apart) > TOLERANCE:
                raise SystemExit(f"{work}: the losses of the two sides are {apart} apart: not the same work")
        ratios = {work: round(s["transect"]["rate"] / s["peer"]["rate"], 2) for work, s in found.items()}
        print(f"round {number + 1}:", ratios, f"load {loads[-1]:.1f}", file=sys.stderr)
        rounds.append(found)
        record.write(options.out, account(rounds, loads, rates, best, flops, options))


def account(
    rounds: list[dict[str, Any]],
    loads: list[float],
    rates: list[float],
    best: dict[str, str],
    flops: dict[str, float],
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Build the record of the rounds so far."""
    return {
        "command": "python benchmarks/train/cpu_lora.py" + (f" --chats '{options.chats}'" if options.chats else ""),
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
                "processor_time_ratio": record.summary(
                    [
                        r[work]["peer"]["processor_seconds_per_token"]
                        / r[work]["transect"]["processor_seconds_per_token"]
                        for r in rounds
                    ]
                ),
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
